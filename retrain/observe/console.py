"""The console: a live display on a terminal, plain lines elsewhere, and a summary at the end.

A display must never end a run: if the other end closes (a pipe or a terminal), the console stops
writing and the run continues.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

from rich.console import Console as Terminal
from rich.live import Live
from rich.text import Text

from retrain.errors import first_of, printable
from retrain.observe.callbacks import Callback, RunFace, TrainingResult
from retrain.observe.progress import RunProgress, closing, counted_steps, evaluation, near
from retrain.observe.streams import let_go
from retrain.types import Metrics

LABEL_WIDTH = 11
"""Of the summary; `interrupted` is the longest label."""


class Console(Callback):
    """Shows the run on `file` (default: the standard output).

    Without a terminal it prints one line every `every_seconds`, and for the first and last step.
    """

    def __init__(
        self,
        file: IO[str] | None = None,
        *,
        every_seconds: float = 5.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._stream = QuietStream(sys.stdout if file is None else file)
        # rich uses only write, flush, isatty, fileno and encoding of the file
        self._terminal = Terminal(
            file=cast(IO[str], self._stream), highlight=False, force_jupyter=False
        )
        self._every_seconds = every_seconds
        self._clock = clock
        self._progress = RunProgress(0, clock=clock)
        self._printed_step = -1
        self._printed_at = 0.0
        self._live: Live | None = None
        self._notebook = Notebook.here() if file is None else None
        self.training = False
        """Whether training has begun, so that an interrupted run writes a checkpoint."""
        self.summarised = False
        """Whether the summary has said how the run ended."""

    def opening(self, lines: Iterable[str]) -> None:
        """Print what is known before the model loads."""
        for line in lines:
            self._say(line)

    def announce(self, text: str) -> bool:
        """Show `text` below the live display; returns False if there is none.

        It only sets an attribute, so that a signal handler may call it.
        """
        self._progress.note = text
        return self._live is not None and self._live.is_started

    def on_train_begin(self, trainer: RunFace) -> None:
        self.training = True
        self._progress = RunProgress(
            trainer.total_steps,
            trainer.step,
            unicode=self._stream.encoding.lower().replace("-", "").startswith("utf"),
            clock=self._clock,
            tally=trainer.run_dir.tally,
        )
        config, unit = trainer.config, trainer.run_dir.tally.unit
        batch = f"{config.train.groups_per_step} {unit}"
        if unit == "rollouts":
            batch = f"{config.train.groups_per_step} groups x {config.algorithm.group_size} {unit}"
        self._say(
            f"{config.algorithm.type} on {config.backend.type}, model {config.model}: "
            f"{counted_steps(trainer.total_steps)} of {batch}" + _since(trainer)
        )
        if changed := trainer.run_dir.changed:
            self._say(f"changed since the checkpoint: {first_of(changed)}")
        for fault in trainer.run_dir.tally.errors:  # found by the resume
            self._say(fault)
        trainer.run_dir.tally.announce = partial(self._said, "failed")
        trainer.run_dir.tally.remark = partial(self._said, "note")
        self._say(f"run directory: {near(trainer.run_dir.path)}")
        if self._notebook is None and (
            self._terminal.is_terminal and not self._terminal.is_dumb_terminal
        ):
            self._live = Live(
                console=self._terminal, refresh_per_second=4, get_renderable=self._progress.panel
            )
            self._live.start()

    def on_step_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        self._progress.add(step, metrics)
        now = self._clock()
        wait = self._every_seconds if self._notebook is None else 0.0
        due = self._printed_step < 0 or now - self._printed_at >= wait
        if self._live is None and due:
            self._print_step(now)

    def on_eval_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        self._say(f"step {step}  evaluation: {evaluation(metrics)}")

    def on_checkpoint(self, trainer: RunFace, step: int, path: Path) -> None:
        if self._live is None and self._notebook is None:
            self._say(f"step {step}  checkpoint: {near(path)}")

    def on_train_end(self, trainer: RunFace, result: TrainingResult) -> None:
        if result.status == "failed" and not trainer.run_dir.begun:
            return  # the error says all, and the run directory is removed
        if self._live is not None:
            self._live.stop()
        elif self._progress.step != self._printed_step and self._progress.metrics:
            self._print_step(self._clock())
        folder, self.summarised = trainer.run_dir, True
        for label, text in closing(
            result, folder.tally, self._progress.seconds, resumed=folder.resumed
        ):
            self._say(f"{label:<{LABEL_WIDTH}} {text}", LABEL_WIDTH)

    def _said(self, label: str, error: str) -> None:
        """The first error of a kind, as soon as it happens; the summary has their number."""
        self._say(f"{label:<7} {error}", len(label))

    def _print_step(self, now: float) -> None:
        self._printed_step, self._printed_at = self._progress.step, now
        if self._notebook is None:
            self._say(self._progress.line())
        else:
            self._notebook.show(self._progress.line())

    def _say(self, line: str, label_width: int = 0) -> None:
        text = Text(printable(line))
        text.stylize("bold", 0, label_width)
        self._terminal.print(text, soft_wrap=True)


def _since(trainer: RunFace) -> str:
    if 0 < trainer.total_steps <= trainer.step:
        return f", already completed: step {trainer.step}"
    if trainer.step:
        return f", from step {trainer.step}"
    return ", from the start: no checkpoint found" if trainer.run_dir.resumed else ""


class Notebook:
    """The display of a notebook's cell, which shows the last line only."""

    def __init__(self, display: Callable[..., Any]) -> None:  # any: of IPython, which has no types
        self._display = display
        self._handle: Any = None

    @classmethod
    def here(cls) -> Notebook | None:
        """The display of the cell that runs this code; None outside of notebooks."""
        shell = sys.modules.get("IPython")  # a notebook has imported it
        found = None if shell is None else shell.get_ipython()
        if found is None or not hasattr(found, "kernel"):
            return None
        from importlib import import_module

        return cls(import_module("IPython.display").display)

    def show(self, line: str) -> None:
        """Show a line in place of the last one."""
        data = {"text/plain": line}
        if self._handle is None:
            self._handle = self._display(data, raw=True, display_id=True)
        else:
            self._handle.update(data, raw=True)


class QuietStream:
    """A text stream that discards text, instead of raising, after its other end closed."""

    def __init__(self, stream: IO[str]) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"
        self.gone = False

    def __getattr__(self, name: str) -> Any:  # any: what the stream has, such as isatty and fileno
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        shown = text.encode(self.encoding, "replace").decode(self.encoding)
        self._try(lambda: self._stream.write(shown))
        return len(text)

    def flush(self) -> None:
        self._try(self._stream.flush)

    def _try(self, action: Callable[[], object]) -> None:
        if self.gone:
            return
        try:
            action()
        except (OSError, ValueError):  # a broken pipe; a closed file
            self.gone = True
            let_go(self._stream)
