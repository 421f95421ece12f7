"""The only writer of the events, rows and counters of a run.

Each method writes one kind of event to events.jsonl, together with its row of metrics.jsonl or
rollouts.jsonl and its counters. `event` writes the kinds that have nothing but the event.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from retrain.algorithms.base import Algorithm
from retrain.config import RunConfig
from retrain.errors import ConfigError, RunError, StallError
from retrain.observe.card import model_card
from retrain.observe.failure import ERROR, described, write_error
from retrain.observe.peak import peak_memory
from retrain.observe.rollout_lines import encoded, names_of
from retrain.observe.run_dir import RunDirectory, read_evaluations, read_metrics
from retrain.pipeline.meter import Meter
from retrain.report.page import write_report
from retrain.types import Batch, Group, Metrics, Ticket

LONELY = (
    "all but one rollout of a group: the one that is left has nothing to be compared with, so its "
    "advantage is 0 and the group teaches nothing"
)
"""Counted as errors are: it is shown once, and at the end with its number."""
MAX_RENDERED = 16
"""Maximum number of `rendered` events: one for each set of tools."""


class Recorder:
    """Writes to `run_dir` what a run with `algorithm` does.

    `mixed` are the names of the sources of a mixture. `tokens` is the config's `records.tokens`.
    """

    def __init__(
        self,
        run_dir: RunDirectory,
        algorithm: Algorithm,
        mixed: Collection[str] = (),
        *,
        tokens: bool = False,
    ) -> None:
        self.run_dir = run_dir
        self.event = run_dir.event
        self._encoded = partial(encoded, tokens=tokens)
        self.history: list[Metrics] = []
        """The rows of all steps, in order."""
        self.evaluations: list[Metrics] = []
        """The results of all evaluations, in order."""
        self._sampled = algorithm.source == "rollouts"
        self._by_group = algorithm.compares == "group"
        self.meter = Meter(sampled=self._sampled, by_group=self._by_group, mixed=mixed)
        if not self._sampled:
            run_dir.tally.unit = algorithm.source
        self.progress: Callable[[], None] = lambda: None
        """Called for every group that was played."""
        self.decode: Callable[[Sequence[int]], str] = lambda ids: ""
        """The text of token ids, with special tokens."""
        self._failure: BaseException | None = None
        self._open: dict[str, list[bytes]] = {}
        """Lines of rollouts.jsonl by ticket: groups that were played, and no more yet."""
        self._rendered: set[tuple[str, ...]] = set()
        """The sets of tools that a `rendered` event has shown."""

    # --- groups

    def played(self, group: Group, started: float) -> None:
        """A group was played and scored. For an example, only the outcome is written."""
        trajectories = group.trajectories
        rewards = {"rewards": [t.reward for t in trajectories]} if self._sampled else {}
        self.event(
            "rollout" if self._sampled else "example",
            ticket=group.prompt.id,
            started=started,
            ended=time.time(),
            outcomes=[t.outcome for t in trajectories],
            versions=sorted(group.versions),
            tokens=sum([t.sampled_tokens for t in trajectories]),
            **rewards,
        )
        self.progress()
        self.run_dir.count(group)
        if self._sampled:
            alone = [len(alike.scored) == 1 < len(alike.trajectories) for alike in group.by_seat]
            if self._by_group and any(alone):
                self.run_dir.tally.failed(LONELY)
            self._render(group)
        self.keep(group)

    def keep(self, group: Group) -> None:
        """A finished group waits for its fate: a step, a drop, or the end of the run."""
        if self._sampled:
            self._open[group.prompt.id] = self._encoded(group)

    def dropped(self, group: Group, cause: str, again: Ticket | None) -> None:
        """A group is not trained; `again` is the new ticket of its prompt if it is reissued."""
        self.meter.group(group, cause)
        reissued = {} if again is None else {"again": str(again)}
        self.event("dropped", ticket=group.prompt.id, cause=cause, **reissued)
        self.run_dir.rollouts(self._open.pop(group.prompt.id, ()), dropped=cause)

    # --- steps

    def batch(self, step: int, tickets: Sequence[str], batch: Batch) -> None:
        samples, tokens = len(batch.samples), batch.denominators.tokens
        self.event("batch", step=step, tickets=tickets, samples=samples, tokens=tokens)
        self.meter.lap("wait_for_batch")

    def update(
        self,
        step: int,
        tickets: Sequence[str],
        loss: float | None,
        started: float,
        *,
        skipped: bool = False,
    ) -> None:
        """The optimizer step is done, or `skipped`: no rollout had an advantage."""
        times = {"started": started, "ended": time.time()}
        why = {"skipped": True} if skipped else {}
        self.event("update", step=step, **times, tickets=tickets, loss=loss, **why)
        lines = [line for ticket in tickets for line in self._open.pop(ticket, ())]
        self.run_dir.rollouts(lines, step)
        self.meter.lap("update")

    def step(
        self,
        step: int,
        groups: Sequence[Group],
        metrics: Mapping[str, float],
        *,
        trained: int,
        version: int,
        evaluation: Metrics,
    ) -> Metrics:
        self.meter.lap("publish")
        row = self.meter.row(step, groups, metrics, trained, version) | evaluation
        self.history.append(row)
        self.run_dir.metrics(row)
        return row

    # --- evaluations

    def evaluated_group(self, group: Group) -> None:
        """A held-out group was played. It doesn't count for the reward of a step."""
        self.run_dir.count(group, evaluated=True)
        self.progress()

    def evaluated(self, groups: Sequence[Group], step: int) -> None:
        """All held-out groups were played: none of a cut off evaluation is in rollouts.jsonl."""
        for group in groups:
            self.run_dir.rollouts(self._encoded(group), step)

    def evaluation_row(self, metrics: Metrics) -> None:
        """A separate row for an evaluation that no step followed."""
        row = {"step": metrics["eval/step"], **metrics}
        if self.history:
            row["step"] = self.history[-1]["step"]
            self.history[-1] = self.history[-1] | row
        self.run_dir.metrics(row)

    # --- checkpoints

    def checkpoint(self, step: int, path: Path) -> None:
        self.event("checkpoint", step=step, path=str(path))
        self._measure()  # the other ranks and the servers have ended when the run ends
        self.run_dir.flush()

    def resumed(
        self, step: int, sizes: Mapping[str, int], changed: list[str], *, anew: bool = False
    ) -> None:
        """The run continues from `step`, when the files had these `sizes`.

        Later lines are moved away, and the history is read. `changed` are the changed config keys.
        `anew`: there is no checkpoint, so the run begins again.
        """
        self.run_dir.cut(sizes)
        self.history = read_metrics(self.run_dir.path)
        self.evaluations = read_evaluations(self.run_dir.path)
        self.run_dir.changed = changed
        self.event("resumed", from_step=step, changed=changed, **({"anew": True} if anew else {}))
        self.run_dir.flush()
        error = self.run_dir.path / ERROR
        if error.exists():
            os.truncate(error, 0)  # the watch has it open

    # --- the end, and what goes wrong

    def fault(self, error: str) -> None:
        """Something failed that affects no rollout, such as the `close` of an environment."""
        self.event("fault", error=error)
        self.run_dir.tally.failed(error)

    def outage(self, state: str, **fields: object) -> None:
        """What has worked before can't be reached (`began`), or works again (`over`)."""
        self.event("outage", state=state, **fields)
        self.run_dir.flush()
        self.progress()

    def server(self, state: str, **fields: object) -> None:
        """A server that samples is `lost`, `back` or `given up`."""
        self.event("server", state=state, **fields)
        self.run_dir.flush()

    def failed(self, error: BaseException) -> None:
        """The run fails, with this error unless another one came first."""
        self._failure = self._failure or error

    def end(self, status: str, step: int) -> None:
        """The run ends; of a failed one the cause is written too, also to error.txt.

        Groups that no step has trained are written without a step.
        """
        cause = {}
        if status == "failed" and self._failure is not None:
            write_error(self.run_dir.path, self._failure)
            cause = {"error": described(self._failure)}
        for ticket in list(self._open):
            self.run_dir.rollouts(self._open.pop(ticket))
        self._measure()
        self.event("end", status=status, step=step, **cause)
        self.run_dir.flush()

    def _measure(self) -> None:
        tally = self.run_dir.tally
        tally.memory = peak_memory(tally.memory)

    def report(self) -> None:
        """Write report.html from the files."""
        try:
            write_report(self.run_dir.path)
        except (ConfigError, RunError, OSError) as error:
            self.fault(f"report.html: {error}")

    def card(self, config: RunConfig, model: Path) -> None:
        """Write the model card of the exported model into its folder."""
        try:
            (model / "README.md").write_text(
                model_card(config, self.history, self.evaluations, model), "utf-8"
            )
        except OSError as error:
            self.fault(f"{model / 'README.md'}: {error}")

    def last_words(self, message: str) -> None:
        """The watch is about to end the process, and calls this in its thread."""
        self.event("stalled", message=message)
        if self._failure is None:
            self.failed(StallError(message))
        else:
            self._failure.add_note(message)
        with suppress(RunError):  # the disk is full, or the directory was deleted
            self.end("failed", int(self.history[-1]["step"]) if self.history else 0)
        sys.stderr.write(f"retrain: {message}. Continue {self.run_dir.path} with --resume.\n")
        sys.stderr.flush()
        self.report()

    def _render(self, group: Group) -> None:
        """Show the first prompt with each set of tools, as the model got it."""
        seen: Sequence[Mapping[str, Any]] | None = None
        for trajectory in group.trajectories:
            if not trajectory.turns or trajectory.tools is seen:  # equal openings share them
                continue
            seen = trajectory.tools
            names = names_of(seen)
            if names not in self._rendered and len(self._rendered) < MAX_RENDERED:
                self._rendered.add(names)
                text = self.decode(trajectory.turns[0].prompt_ids)
                self.event("rendered", ticket=group.prompt.id, tools=trajectory.tools, text=text)
