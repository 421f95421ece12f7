"""Evaluations: held-out prompts, played beside training.

- An evaluation is of one version of the weights, the one that it begins with (P15): a backend keeps
  that version for it (`Adapter.pinned`), or the next publish waits (`let_go`).
- The seeds of an evaluation depend on its prompts only, so two evaluations differ by the weights.
- Until an evaluation has ended, no later step gets a checkpoint: a resume repeats the evaluation
  first, with the same weights.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from contextvars import ContextVar
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Protocol

from retrain.adapters.base import Adapter
from retrain.algorithms.batching import segments
from retrain.assembly import Parts
from retrain.config import EvalConfig, RunConfig
from retrain.losses import FLOATS
from retrain.pipeline.checkpoint import Checkpoints
from retrain.pipeline.meter import Meter
from retrain.pipeline.recorder import Recorder
from retrain.prompts import MIXTURE, PromptSource
from retrain.rollout import Playback, Slot
from retrain.sampler import Sampler
from retrain.supervision.boundary import apart
from retrain.types import Group, Metrics, Sample, Ticket

Score = Callable[..., Awaitable[list[list[float]]]]
"""`Adapter.logprobs`."""
AT_ONCE = 64
"""Held-out rows that are scored in one call."""
EPOCH = -1
"""The epoch of evaluation tickets; training epochs start at 0."""
_within: ContextVar[asyncio.Task[None] | None] = ContextVar("_within", default=None)
"""The evaluation that the caller runs in: it doesn't wait for itself."""


class Served(Protocol):
    """The backend of a run: its adapter, the version that is served, and the trainer's scores."""

    adapter: Adapter
    version: int

    @property
    def logprobs(self) -> Score: ...


@dataclass
class Evaluation:
    """The evaluations of a run: one at a time, each a task beside training."""

    config: RunConfig
    parts: Parts
    record: Recorder
    checkpoints: Checkpoints
    backend: Served
    announce: Callable[[int, Metrics], Awaitable[None]]
    fail: Callable[[Exception], None]
    best: float = -math.inf
    """The highest mean reward (the lowest loss, negated) so far."""
    owed: int | None = 0
    """The step whose evaluation has not ended. A new run begins with one."""
    make_slot: Callable[[int, Sampler], Slot | Playback] = field(init=False)
    """Set when the adapter is open."""
    _task: asyncio.Task[None] | None = None
    _holds: bool = False
    """The evaluation needs the weights that are served now."""
    _row: Metrics = field(default_factory=dict)

    @property
    def section(self) -> EvalConfig:
        assert self.config.eval is not None
        return self.config.eval

    def due(self, step: int, *, last: bool) -> bool:
        return last or step % self.section.every == 0

    async def previous(self) -> None:
        if self._task is not None and _within.get() is not self._task:
            await asyncio.wait([self._task])

    def start(self, step: int, beside: asyncio.TaskGroup) -> None:
        """Evaluate the weights of this step, which are served now, in a task of `beside`."""
        adapter, version = self.backend.adapter, self.backend.version
        self.owed = step
        kept, sampler = ExitStack(), adapter.sampler
        pinned = adapter.pinned()
        self._holds = pinned is None
        if pinned is not None:
            sampler = kept.enter_context(pinned)
        self._task = beside.create_task(self._guarded(step, version, sampler), name="evaluate")
        self._task.add_done_callback(lambda _: kept.close())

    async def let_go(self) -> bool:
        """Wait until the weights that are served now may be replaced; returns whether it waited."""
        if not self._holds or self._task is None or self._task.done():
            return False
        await self.previous()
        return True

    def cancel(self) -> None:
        """Cancel the current evaluation, unless it is the caller."""
        if self._task is not None and _within.get() is not self._task:
            self._task.cancel()

    def take_row(self) -> Metrics:
        """The metrics that are not in a row of metrics.jsonl yet."""
        row, self._row = self._row, {}
        return row

    def state(self, step: int, *, last: bool) -> dict[str, Any]:
        """The state after this step, as JSON values; a resume begins with the evaluation `owed`."""
        owed = self.owed is not None or self.due(step, last=last)
        return {"best": self.best, "row": self._row, "owed": step if owed else None}

    def restore(self, state: Mapping[str, Any]) -> None:
        self.owed = state.get("owed")
        if state:  # else the run had no evaluations then
            self.best, self._row = state["best"], dict(state["row"])
        if self._row:
            self.record.evaluations.append(self._row)

    def write_row(self) -> None:
        """Write such metrics as a separate row."""
        if row := self.take_row():
            self.record.evaluation_row(row)

    async def _guarded(self, step: int, version: int, sampler: Sampler) -> None:
        try:
            _within.set(self._task)
            await apart("evaluate", self._evaluate, step, version, sampler)
        except Exception as error:  # noqa: BLE001 - the run fails with it, after the step
            self.fail(error)

    async def _evaluate(self, step: int, version: int, sampler: Sampler) -> None:
        found = await self._measure(step, sampler)
        metrics = {**found, "eval/step": step, "eval/version": version}
        reward = metrics.get("eval/reward/mean", -metrics.get("eval/loss", math.inf))
        if reward > self.best:
            self.best = reward
            self.checkpoints.mark_best(step, self.record.fault)
        self.owed = None
        self.write_row()  # of the previous evaluation, if no step followed it
        self._row = metrics
        self.record.evaluations.append(metrics)
        self.record.event("eval", **metrics)
        await self.announce(step, metrics)

    async def _measure(self, step: int, sampler: Sampler) -> Metrics:
        section, prompts = self.section, self.parts.eval_prompts
        assert prompts is not None
        if self.parts.algorithm.source == "rollouts":
            groups = await self._play(prompts, section.samples, sampler)
            self.record.evaluated(groups, step)
            return rewards_of(groups, section, prompts.mixed)
        beta = self.parts.loss_config.get("beta")
        slot, score = self.make_slot(1, sampler), self.backend.logprobs
        return await held_out_loss(prompts, slot, score, beta=beta)

    async def _play(self, prompts: PromptSource, samples: int, sampler: Sampler) -> list[Group]:
        """One group per prompt, in their order. Raises what the sampler raises."""
        rows = iter(range(len(prompts)))
        groups: list[Group] = []

        async def worker() -> None:
            slot = self.make_slot(samples, sampler)
            try:
                for row in rows:
                    groups.append(await slot.play(prompts.prompt(Ticket(EPOCH, row))))
                    self.record.evaluated_group(groups[-1])
            finally:
                await slot.close()

        async with asyncio.TaskGroup() as workers:
            for index in range(min(self.config.train.groups_per_step, len(prompts))):
                workers.create_task(apart("evaluate", worker), name=f"evaluate#{index}")
        return sorted(groups, key=lambda group: group.ticket.row)


def rewards_of(groups: Sequence[Group], config: EvalConfig, mixed: Collection[str] = ()) -> Metrics:
    """Mean reward, also of each component, and pass@k, with k = `config.samples` per prompt.

    A prompt passes when one of its rollouts reaches `pass_threshold`. Failed rollouts never pass
    and don't enter the means. With seats, a prompt counts once for each seat, whose own mean is
    reported too: in a game somebody always wins. `mixed` are the sources of a mixture, which have
    a mean and a pass@k each.
    """
    meter = Meter(mixed=mixed)
    passed: dict[str, list[bool]] = {"": []}
    for group in groups:
        meter.group(group)
        for part in group.by_seat:
            passes = any(t.reward >= config.pass_threshold for t in part.scored)
            passed[""].append(passes)
            if mixed:
                passed.setdefault(f"/{group.prompt.metadata[MIXTURE]}", []).append(passes)
    return {
        **{f"eval/pass@{config.samples}{source}": fmean(each) for source, each in passed.items()},
        **meter.evaluation(),
    }


async def held_out_loss(
    prompts: PromptSource, slot: Slot | Playback, score: Score, *, beta: float | None
) -> Metrics:
    """The loss of held-out rows under the served weights: cross-entropy, or DPO's with `beta`.

    For demonstrations this is the mean over all assistant tokens, with its exponential as the
    perplexity. For pairs it is the mean over pairs, with the share of pairs in which the chosen
    answer gains more over the reference than the rejected one. Failed rows are only counted.
    """
    losses: list[float] = []
    tokens, right, ok, failed = 0, 0, 0, 0
    for start in range(0, len(prompts), AT_ONCE):
        rows = range(start, min(start + AT_ONCE, len(prompts)))
        groups = [await slot.play(prompts.prompt(Ticket(EPOCH, row))) for row in rows]
        scored = sum(bool(group.scored) for group in groups)
        ok, failed = ok + scored, failed + len(groups) - scored
        samples = [s for g in groups for t in g.scored for s in segments(t, 1.0, g.prompt.id)]
        logprobs = await _assistant_logprobs(samples, score)
        tokens += sum(map(len, logprobs))
        if beta is None:
            losses += [-logprob for row in logprobs for logprob in row]
        else:
            reference = await _assistant_logprobs(samples, score, reference=True)
            margins = _margins(logprobs, reference)
            losses += [-FLOATS.logsigmoid(beta * margin) for margin in margins]
            right += sum(margin > 0 for margin in margins)
    counts: Metrics = {"eval/rows/ok": ok, "eval/rows/failed": failed}
    if not losses:
        return counts
    loss = math.fsum(losses) / len(losses)
    shown = {"eval/perplexity": math.exp(min(loss, 700.0))}
    if beta is not None:
        shown = {"eval/dpo/accuracy": right / len(losses)}
    return {"eval/loss": loss, **shown, "eval/tokens": tokens, **counts}


async def _assistant_logprobs(
    samples: Sequence[Sample], score: Score, *, reference: bool = False
) -> list[list[float]]:
    rows = await score([s.token_ids for s in samples], reference=reference)
    return [
        [logprob for logprob, kept in zip(row, sample.loss_mask, strict=True) if kept]
        for sample, row in zip(samples, rows, strict=True)
    ]


def _margins(
    logprobs: Sequence[Sequence[float]], reference: Sequence[Sequence[float]]
) -> list[float]:
    """Per pair, the gain of the chosen answer over the reference, less that of the rejected one."""
    gains = [
        math.fsum(now) - math.fsum(then) for now, then in zip(logprobs, reference, strict=True)
    ]
    return [chosen - rejected for chosen, rejected in zip(gains[::2], gains[1::2], strict=True)]
