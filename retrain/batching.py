"""Scored groups -> Samples -> one Batch: pure functions, no torch.

A turn whose prompt extends everything before it, token by token, joins the running sample; where
the chat template rewrote history, a new sample starts. So every trained token stands after exactly
the tokens that the sampler saw, with the log-prob and version that it returned.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from retrain.algorithms.base import Credit
from retrain.types import Batch, Denominators, Group, Sample, Trajectory

Normalisation = Literal["token", "sequence", "batch"]

TRL_AS_SHARED: Mapping[str, tuple[str, Normalisation]] = {
    "dapo": ("ppo", "token"),
    "bnpo": ("ppo", "token"),
    "grpo": ("ppo", "sequence"),
    "dr_grpo": ("ppo", "batch"),
}
"""TRL's names that are a shared loss with a normaliser; dr_grpo is divided by max_tokens too.

bnpo averages over the tokens of a micro-batch; over a whole batch it is dapo.
"""


def make_batch(
    groups: Sequence[Group],
    credits: Sequence[Sequence[Credit]],
    *,
    loss: str,
    loss_config: Mapping[str, Any],
    normalisation: Normalisation | None = None,
) -> Batch:
    """The batch of one step; `normalisation` is None for losses that carry their normaliser.

    Raises ValueError when the credits don't fit the groups.
    """
    samples: list[Sample] = []
    for group, group_credit in zip(groups, credits, strict=True):
        for index, (trajectory, credit) in enumerate(
            zip(group.trajectories, group_credit, strict=True)
        ):
            samples += segments(trajectory, credit, f"{group.prompt.id}#{index}")
    counts = [sum(sample.loss_mask) for sample in samples]
    batch = Batch(
        samples, loss, dict(loss_config), Denominators(sum(counts), sum(map(bool, counts)))
    )
    return batch if normalisation is None else normalised(batch, normalisation)


def segments(trajectory: Trajectory, credit: Credit, run_id: str) -> list[Sample]:
    """The samples of one rollout: one, or one more for each rewriting of its history.

    `credit` is one advantage, or one for each sampled token, turn after turn.
    """
    flat = None if isinstance(credit, (int, float)) else list(credit)
    sampled = sum(len(turn.completion.token_ids) for turn in trajectory.turns)
    if flat is not None and len(flat) != sampled:
        raise ValueError(
            f"rollout {run_id} has {sampled} sampled tokens, but {len(flat)} advantages: "
            "one number, or one for each sampled token, is expected"
        )
    made: list[_Segment] = []
    used = 0
    for turn in trajectory.turns:
        prompt, completion = list(turn.prompt_ids), turn.completion
        if not made or prompt[: len(made[-1].token_ids)] != made[-1].token_ids:
            made.append(_Segment())
        count = len(completion.token_ids)
        advantages = [float(credit)] * count if flat is None else flat[used : used + count]  # type: ignore[arg-type]  # a float when flat is None
        used += count
        made[-1].extend(prompt, completion.token_ids, completion.logprobs, advantages)
        made[-1].versions += [completion.version] * count
    return [s.sample(trajectory.prompt.id, run_id) for s in made if any(s.loss_mask)]


class _Segment:
    """A sample under construction."""

    def __init__(self) -> None:
        self.token_ids: list[int] = []
        self.loss_mask: list[int] = []
        self.logprobs: list[float] = []
        self.advantages: list[float] = []
        self.versions: list[int] = []

    def extend(
        self,
        prompt: list[int],
        token_ids: Sequence[int],
        logprobs: Sequence[float],
        advantages: Sequence[float],
    ) -> None:
        """Append the prompt's new tokens, masked, and the completion's."""
        given = len(prompt) - len(self.token_ids)
        self.token_ids = [*prompt, *token_ids]
        self.loss_mask += [0] * given + [1] * len(token_ids)
        self.logprobs += [0.0] * given + list(logprobs)
        self.advantages += [0.0] * given + list(advantages)
        self.versions += [-1] * given

    def sample(self, group_id: str, run_id: str) -> Sample:
        return Sample(
            self.token_ids,
            self.loss_mask,
            self.logprobs,
            self.advantages,
            self.versions,
            group_id=group_id,
            run_id=run_id,
        )


def normalised(batch: Batch, by: Normalisation, divisor: float = 1.0) -> Batch:
    """Fold a normaliser into the advantages of a loss that is linear in them.

    Services sum over tokens; a mean over tokens, over sequences of means over their tokens, or over
    sequences of sums, is that sum with scaled advantages. The quadratic term of `dro` is scaled by
    its `beta`, which no per-sequence factor can do: that raises ValueError.
    """
    tokens, sequences = (max(1, n) for n in batch.denominators)
    if by == "sequence":
        if batch.loss == "dro":
            raise ValueError("dro can't be normalised by sequence: choose token or batch")
        factors = [1.0 / (max(1, sum(s.loss_mask)) * sequences) for s in batch.samples]
    else:
        factors = [1.0 / (tokens if by == "token" else sequences)] * len(batch.samples)
    samples = [
        replace(sample, advantages=[a * factor / divisor for a in sample.advantages])
        for sample, factor in zip(batch.samples, factors, strict=True)
    ]
    config = dict(batch.loss_config)
    if batch.loss == "dro" and factors:
        config["beta"] = config.get("beta", 0.05) * factors[0] / divisor
    return replace(batch, samples=samples, loss_config=config)


def as_shared(batch: Batch, max_tokens: int) -> Batch:
    """A batch with a TRL loss name as the shared loss that it is (`TRL_AS_SHARED`).

    `max_tokens` is dr_grpo's constant: the completion length that it divides by.
    """
    if batch.loss not in TRL_AS_SHARED:
        return batch
    loss, by = TRL_AS_SHARED[batch.loss]
    divisor = float(max_tokens) if batch.loss == "dr_grpo" else 1.0
    return normalised(replace(batch, loss=loss), by, divisor)
