"""Scored groups -> Samples -> one Batch: pure functions, no torch.

A turn whose prompt extends all tokens of a sample is appended to it. Where the chat template
rewrote history, or an agent's calls branch, a new sample starts. So every trained token follows
exactly the tokens that the sampler saw, with the log-prob and version that the sampler returned,
and is trained once: in the sample of its own turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate
from typing import Any

from retrain.algorithms.base import Credit
from retrain.errors import RunError, shown
from retrain.losses import Normalisation, row_of, settings
from retrain.types import Batch, Denominators, Group, Sample, Trajectory, Turn


def fitting(
    groups: Sequence[Group], returned: Sequence[Sequence[Credit]], owner: str
) -> list[Sequence[Credit]]:
    """`returned`, the advantages from `owner`, checked to have one entry per trajectory.

    Raises RunError otherwise.
    """
    expected = [len(group.trajectories) for group in groups]
    got: list[int] | None = None
    with suppress(TypeError):
        got = [len(credit) for credit in returned]
    if got != expected:
        lengths = "" if got is None else f" with the lengths {shown(got)}"
        raise RunError(
            f"{owner}: advantages returned {shown(returned)}{lengths}, expected one list per "
            f"group, with one entry per trajectory: {len(groups)} lists with the lengths "
            f"{shown(expected)}"
        )
    return list(returned)


def make_samples(
    groups: Sequence[Group], credits: Sequence[Sequence[Credit]], *, paired: bool = False
) -> list[Sample]:
    """The samples of scored groups; `paired` adds the stream `pair_ids`, one number per group.

    Raises ValueError when the credits do not fit the groups.
    """
    samples: list[Sample] = []
    for number, (group, group_credit) in enumerate(zip(groups, credits, strict=True)):
        rollouts = zip(group.trajectories, group_credit, strict=True)
        for index, (trajectory, credit) in enumerate(rollouts):
            run_id = f"{group.prompt.id}#{index}"
            run_id = f"{run_id}/{trajectory.seat}" if trajectory.seat else run_id
            made = segments(trajectory, credit, run_id)
            if paired:
                made = [
                    replace(s, streams={"pair_ids": [float(number)] * len(s.token_ids)})
                    for s in made
                ]
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
    counts = _tokens_by_rollout(samples)
    sizes = Denominators(sum(counts.values()), sum(map(bool, counts.values())))
    batch = Batch(samples, loss, dict(loss_config), sizes)
    return batch if normalisation is None else normalised(batch, normalisation)


def rollout_tokens(samples: Sequence[Sample]) -> list[int]:
    """For each sample, the trained tokens of its whole rollout: of all samples with its `run_id`.

    A sample without a `run_id` is a rollout by itself.
    """
    counts = _tokens_by_rollout(samples)
    return [counts[sample.run_id or row] for row, sample in enumerate(samples)]


def _tokens_by_rollout(samples: Sequence[Sample]) -> dict[str | int, int]:
    counts: dict[str | int, int] = {}
    for row, sample in enumerate(samples):
        rollout = sample.run_id or row
        counts[rollout] = counts.get(rollout, 0) + sum(sample.loss_mask)
    return counts


def kl_penalised(
    samples: Sequence[Sample], reference: Sequence[Sequence[float]], coefficient: float
) -> list[Sample]:
    """The samples with a KL penalty, A_t - coefficient x (log p_t - log ref_t).

    p_t is the sampler's and ref_t the reference's probability of the sampled token: the penalty of
    Ziegler et al. 2019 (arXiv:1909.08593, eq. 2), charged to the token that causes it. For every
    loss its policy gradient is that of the sum over positions of KL(p || ref), with the contexts
    held constant. `reference` becomes the stream `reference_logprobs`, from which the adapter
    reports `kl/reference`.
    """
    charged = []
    for sample, logprobs in zip(samples, reference, strict=True):
        rows = zip(sample.loss_mask, sample.logprobs, logprobs, sample.advantages, strict=True)
        advantages = [a - coefficient * (lp - ref) if kept else a for kept, lp, ref, a in rows]
        streams = {**sample.streams, "reference_logprobs": list(logprobs)}
        charged.append(replace(sample, advantages=advantages, streams=streams))
    return charged


def segments(trajectory: Trajectory, credit: Credit, run_id: str) -> list[Sample]:
    """The samples of one rollout: one, and another wherever its history was rewritten or branches.

    `credit` is one advantage, or one per sampled token, turn after turn.
    """
    sampled, turns = trajectory.sampled_tokens, trajectory.turns
    advantages = [float(credit)] * sampled if isinstance(credit, (int, float)) else list(credit)
    if len(advantages) != sampled:
        raise ValueError(
            f"rollout {run_id} has {sampled} sampled tokens, but {len(advantages)} advantages; "
            "expected one number, or one per sampled token"
        )
    if len(turns) == 1 and sampled:  # the common case, fast
        prompt_ids, said, given = turns[0].prompt_ids, turns[0].completion, len(turns[0].prompt_ids)
        return [
            Sample(
                [*prompt_ids, *said.token_ids],
                [0] * given + [1] * sampled,
                [0.0] * given + [*said.logprobs],
                [0.0] * given + advantages,
                [-1] * given + [*(said.versions or [said.version] * sampled)],
                group_id=trajectory.prompt.id,
                run_id=run_id,
            )
        ]
    starts = list(accumulate([len(t.completion.token_ids) for t in turns], initial=0))
    samples = []
    for branch in branches(turns):
        ids: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        credits: list[float] = []
        versions: list[int] = []
        for number in branch:
            prompt, said = turns[number].prompt_ids, turns[number].completion
            given, count = len(prompt) - len(ids), len(said.token_ids)
            ids += [*prompt[len(ids) :], *said.token_ids]
            mask += [0] * given + [1] * count
            logprobs += [0.0] * given
            logprobs += said.logprobs
            credits += [0.0] * given
            credits += advantages[starts[number] : starts[number + 1]]
            versions += [-1] * given
            versions += said.versions or [said.version] * count
        streams = (ids, mask, logprobs, credits, versions)
        if any(mask):
            samples.append(Sample(*streams, group_id=trajectory.prompt.id, run_id=run_id))
    return samples


def branches(turns: Sequence[Turn]) -> list[list[int]]:
    """The turns of each sample of a rollout: each turn's prompt extends the turn before it.

    Of the branches that a prompt extends, it continues the longest, which has most of its history.
    """
    made: list[list[int]] = []
    for number, turn in enumerate(turns):
        extended = [b for b in made if turns[b[-1]].is_start_of(turn.prompt_ids)]
        if extended:
            max(extended, key=lambda b: turns[b[-1]].length).append(number)
        else:
            made.append([number])
    return made


def normalised(batch: Batch, by: Normalisation, divisor: float = 1.0) -> Batch:
    """The batch with an average folded into its advantages; every loss itself is a sum over tokens.

    `token` is the mean over tokens, `sequence` the mean over sequences of the mean over each one's
    tokens, `batch` the mean over sequences of the sum over each one's tokens. A sequence is a
    rollout, with the tokens of all its samples.

    Raises ValueError for `sequence` with a loss that has keys to scale too (`Loss.scaled`): they
    cannot have a factor per sequence.
    """
    tokens, sequences = (max(1, n) for n in batch.denominators)
    scaled = row_of(batch.loss).scaled
    if by == "sequence":
        if scaled:
            raise ValueError(f"{batch.loss} can't be normalised by sequence; use token or batch")
        factors = [1.0 / (max(1, n) * sequences) for n in rollout_tokens(batch.samples)]
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
    """A batch of one of TRL's losses as a batch of the shared loss that it equals (`Loss.shared`).

    `max_tokens` is the completion length that dr_grpo divides by.
    """
    row = row_of(batch.loss)
    if row.shared is None:
        return batch
    loss, by = row.shared
    divisor = float(max_tokens) if row.over_max_tokens else 1.0
    return normalised(replace(batch, loss=loss), by, divisor)
