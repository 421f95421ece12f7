"""Held-out prompts, played beside training with the weights that are served at the time.

An evaluation's seeds depend on its prompts alone, so that two evaluations differ by the weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from statistics import fmean

from retrain.batching import segments
from retrain.config import EvalConfig
from retrain.prompts import PromptSource
from retrain.rollout.playback import Playback
from retrain.rollout.slot import Slot
from retrain.types import Group, Metrics, Sample, Ticket

Score = Callable[..., Awaitable[list[list[float]]]]
"""`Adapter.logprobs`."""
AT_ONCE = 64
"""Held-out rows that are scored at a time."""
EPOCH = -1
"""The epoch of evaluation tickets: never a training one."""


async def evaluate(
    config: EvalConfig,
    prompts: PromptSource,
    make_slot: Callable[[], Slot | Playback],
    *,
    concurrency: int,
    record: Callable[[Group], None],
) -> Metrics:
    """Mean reward and pass@k over all prompts, `config.samples` (k) rollouts each.

    A prompt passes when one of its k rollouts reaches `pass_threshold`; failed rollouts are left
    out of the mean and never pass. Raises what the sampler raises.
    """
    rows = iter(range(len(prompts)))
    groups: list[Group] = []

    async def worker() -> None:
        slot = make_slot()
        try:
            for row in rows:
                group = await slot.play(prompts.prompt(Ticket(EPOCH, row)))
                groups.append(group)
                record(group)
        finally:
            await slot.close()

    async with asyncio.TaskGroup() as workers:
        for index in range(min(concurrency, len(prompts))):
            workers.create_task(worker(), name=f"evaluate#{index}")
    rewards = [t.reward for group in groups for t in group.scored]
    passed = [any(t.reward >= config.pass_threshold for t in g.scored) for g in groups]
    versions = [v for g in groups for t in g.trajectories for v in t.versions]
    metrics: Metrics = {
        f"eval/pass@{config.samples}": fmean(passed),
        "eval/rollouts/ok": len(rewards),
        "eval/rollouts/failed": sum(len(g.trajectories) for g in groups) - len(rewards),
        "eval/version/min": min(versions, default=-1),
        "eval/version/max": max(versions, default=-1),
    }
    if rewards:
        metrics["eval/reward/mean"] = fmean(rewards)
    return metrics


async def held_out_loss(
    prompts: PromptSource,
    slot: Slot | Playback,
    score: Score,
    *,
    beta: float | None,
) -> Metrics:
    """The loss of held-out rows under the served weights: cross-entropy, or DPO's with `beta`.

    Of demonstrations the mean over all assistant tokens, and e to its power as the perplexity; of
    pairs the mean over pairs, and the share in which the chosen answer gains more on the reference
    than the rejected one. Rows that fail are counted and left out.
    """
    losses: list[float] = []
    tokens, right, failed = 0, 0, 0
    for start in range(0, len(prompts), AT_ONCE):
        rows = range(start, min(start + AT_ONCE, len(prompts)))
        groups = [await slot.play(prompts.prompt(Ticket(EPOCH, row))) for row in rows]
        samples = [s for g in groups for t in g.scored for s in segments(t, 1.0, g.prompt.id)]
        failed += sum(not group.scored for group in groups)
        logprobs = [_said(*row) for row in await _scored(samples, score)]
        if beta is None:
            losses += [-lp for row in logprobs for lp in row]
        else:
            reference = [_said(*row) for row in await _scored(samples, score, reference=True)]
            gains = [
                math.fsum(now) - math.fsum(before)
                for now, before in zip(logprobs, reference, strict=True)
            ]
            margins = [
                chosen - rejected for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)
            ]
            losses += [_softplus(-beta * margin) for margin in margins]
            right += sum(margin > 0 for margin in margins)
        tokens += sum(map(len, logprobs))
    if not losses:
        return {"eval/rows/failed": failed}
    loss = math.fsum(losses) / len(losses)
    shown = {"eval/perplexity": math.exp(min(loss, 700.0))}
    if beta is not None:
        shown = {"eval/dpo/accuracy": right / len(losses)}
    return {"eval/loss": loss, **shown, "eval/tokens": tokens, "eval/rows/failed": failed}


async def _scored(
    samples: Sequence[Sample], score: Score, *, reference: bool = False
) -> list[tuple[Sample, list[float]]]:
    logprobs = await score([s.token_ids for s in samples], reference=reference)
    return list(zip(samples, logprobs, strict=True))


def _said(sample: Sample, logprobs: Sequence[float]) -> list[float]:
    """The log-probs of the assistant's tokens."""
    return [lp for lp, kept in zip(logprobs, sample.loss_mask, strict=True) if kept]


def _softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))
