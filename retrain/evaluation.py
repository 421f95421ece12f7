"""Held-out prompts, played beside training with the weights that are served at the time.

An evaluation's seeds depend on its prompts alone, so that two evaluations differ by the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from statistics import fmean

from retrain.config import EvalConfig
from retrain.prompts import PromptSource
from retrain.slots import Slot
from retrain.types import Group, Metrics, Ticket

EPOCH = -1
"""The epoch of evaluation tickets: never a training one."""


async def evaluate(
    config: EvalConfig,
    prompts: PromptSource,
    make_slot: Callable[[], Slot],
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
