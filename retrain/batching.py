"""Scored groups -> Samples -> one Batch: pure functions, no torch.

A turn whose prompt extends everything before it, token by token, joins the running sample; where
the chat template rewrote history, a new sample starts. So every trained token stands after exactly
the tokens that the sampler saw, with the log-prob and version that it returned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from retrain.algorithms.base import Credit
from retrain.algorithms.functional import kl_estimates
from retrain.errors import RunError, shown
from retrain.losses import Normalisation, row_of, settings
from retrain.types import Batch, Denominators, Group, Sample, Trajectory


def fitting(
    groups: Sequence[Group], returned: Sequence[Sequence[Credit]], owner: str
) -> list[Sequence[Credit]]:
    """`returned`, what `owner` gave as advantages; RunError unless one is there a trajectory."""
    expected = [len(group.trajectories) for group in groups]
    try:
        credits = list(returned)
        got = [len(credit) for credit in credits]
    except TypeError as error:
        raise RunError(
            f"{owner}: advantages returned {shown(returned)}, expected a list for each group that "
            "holds a number for each of its trajectories"
        ) from error
    if len(got) != len(expected):
        raise RunError(
            f"{owner}: advantages returned {len(got)} lists, expected {len(expected)}: one for "
            "each group"
        )
    for number, (many, wanted) in enumerate(zip(got, expected, strict=True)):
        if many != wanted:
            raise RunError(
                f"{owner}: advantages returned a list of {many} for group {number}, expected "
                f"{wanted}: one for each of its trajectories"
            )
    return credits


def make_samples(
    groups: Sequence[Group], credits: Sequence[Sequence[Credit]], *, paired: bool = False
) -> list[Sample]:
    """The samples of scored groups; `paired` adds the stream `pair_ids`, one number per group.

    Raises ValueError when the credits do not fit the groups.
    """
    samples: list[Sample] = []
    for number, (group, group_credit) in enumerate(zip(groups, credits, strict=True)):
        rollouts = zip(group.trajectories, group_credit, strict=True)
        made = [
            sample
            for index, (trajectory, credit) in enumerate(rollouts)
            for sample in segments(trajectory, credit, f"{group.prompt.id}#{index}")
        ]
        if paired:
            made = [_with_stream(s, "pair_ids", [float(number)] * len(s.token_ids)) for s in made]
        samples += made
    return samples


def batch_of(
    samples: Sequence[Sample],
    *,
    loss: str,
    loss_config: Mapping[str, Any],  # the loss's own keys
    normalisation: Normalisation | None = None,
) -> Batch:
    """The batch of one step; `normalisation` is None for a loss that normalises itself."""
    counts = [sum(sample.loss_mask) for sample in samples]
    batch = Batch(
        samples, loss, dict(loss_config), Denominators(sum(counts), sum(map(bool, counts)))
    )
    return batch if normalisation is None else normalised(batch, normalisation)


def penalised(
    samples: Sequence[Sample], reference: Sequence[Sequence[float]], coefficient: float
) -> tuple[list[Sample], float]:
    """A KL penalty as credit, and the KL: A_t - coefficient x (log p_t - log ref_t).

    p_t is the sampler's and ref_t the reference's probability of the sampled token: the penalty of
    Ziegler et al. 2019 (arXiv:1909.08593, eq. 2), charged to the token that causes it. Its policy
    gradient is that of the sum over positions of KL(p || ref), the contexts held fixed, whatever
    the loss. The KL that is told is the mean of x - 1 - log x, x = ref_t / p_t, over the sampled
    tokens: estimator k3 of http://joschu.net/blog/kl-approx.html, never negative.
    """
    charged, distances = [], []
    for sample, logprobs in zip(samples, reference, strict=True):
        rows = zip(sample.loss_mask, sample.logprobs, logprobs, strict=True)
        gaps = [lp - ref if kept else 0.0 for kept, lp, ref in rows]
        advantages = [a - coefficient * gap for a, gap in zip(sample.advantages, gaps, strict=True)]
        kept_gaps = [gap for gap, kept in zip(gaps, sample.loss_mask, strict=True) if kept]
        distances += kl_estimates(kept_gaps, [0.0] * len(kept_gaps), "k3")
        charged.append(replace(sample, advantages=advantages))
    return charged, math.fsum(distances) / max(1, len(distances))


def segments(trajectory: Trajectory, credit: Credit, run_id: str) -> list[Sample]:
    """The samples of one rollout: one, or one more for each rewriting of its history.

    `credit` is one advantage, or one for each sampled token, turn after turn.
    """
    flat = None if isinstance(credit, (int, float)) else list(credit)
    if flat is not None and len(flat) != (sampled := trajectory.sampled_tokens):
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


def _with_stream(sample: Sample, name: str, values: Sequence[float]) -> Sample:
    return replace(sample, streams={**sample.streams, name: values})


class _Segment:
    """A sample under construction."""

    __slots__ = ("advantages", "logprobs", "loss_mask", "token_ids", "versions")

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

    Losses are sums over tokens. A mean over tokens (`token`), over sequences of means over their
    tokens (`sequence`), or over sequences of sums (`batch`) is that sum with scaled advantages. The
    keys in `Loss.scaled` are scaled too, which a factor per sequence cannot do.

    Raises ValueError for a loss with such keys by `sequence`.
    """
    tokens, sequences = (max(1, n) for n in batch.denominators)
    scaled = row_of(batch.loss).scaled
    if by == "sequence":
        if scaled:
            raise ValueError(f"{batch.loss} can't be normalised by sequence; use token or batch")
        factors = [1.0 / (max(1, sum(s.loss_mask)) * sequences) for s in batch.samples]
    else:
        factors = [1.0 / (tokens if by == "token" else sequences)] * len(batch.samples)
    samples = [
        replace(sample, advantages=[a * factor / divisor for a in sample.advantages])
        for sample, factor in zip(batch.samples, factors, strict=True)
    ]
    config = dict(batch.loss_config)
    if scaled and factors:
        keys = settings(batch.loss, config)
        config |= {name: keys[name] * factors[0] / divisor for name in scaled}
    return replace(batch, samples=samples, loss_config=config)


def as_shared(batch: Batch, max_tokens: int) -> Batch:
    """A batch whose loss is TRL's as the loss and normalisation that it equals (`Loss.shared`).

    `max_tokens` is the completion length that dr_grpo divides by.
    """
    row = row_of(batch.loss)
    if row.shared is None:
        return batch
    loss, by = row.shared
    divisor = float(max_tokens) if row.over_max_tokens else 1.0
    return normalised(replace(batch, loss=loss), by, divisor)
