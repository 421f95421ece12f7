"""Further sinks of the metrics, such as `loggers: [{type: wandb, project: maths}]`.

metrics.jsonl stays the truth; these are views of it.

- A library is imported only when its logger is asked for; a missing one is a ConfigError before
  any model loads.
- Each logger lives in a thread of its own behind a bounded queue, so that a slow service never
  holds a step up, and a hung one can't keep the process from ending.
- A logger that raises is disabled with one warning; the run goes on.
"""

from __future__ import annotations

import asyncio
import importlib.util
import logging
import math
import queue
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress

from retrain.errors import ConfigError, install_command
from retrain.observe.callbacks import Callback, RunFace, TrainingResult
from retrain.types import Metrics

QUEUE_ROWS = 1000
"""Rows that may wait for a slow service; further ones are counted in `lost` and left out."""

_log = logging.getLogger(__name__)
_Row = tuple[int, Metrics]


class Logger(Callback, ABC):
    """Override `open`, `log` and `close`: plain calls, made in the logger's own thread.

    A constructor of one's own needn't call this one, which only looks whether `library` is there.
    """

    library: str | None = None
    """The module that it needs."""
    install: str = ""
    """The name of the library's package, if it differs from the module's."""
    extra: str = ""
    """The extra of `retrain` that installs the library."""
    close_seconds: float = 60.0
    """What it has at the end to hand over what still waits."""
    failure: Exception | None = None
    """What disabled it."""
    lost: int = 0
    """Rows that found the queue full."""
    _thread: threading.Thread | None = None
    _rows: queue.Queue[_Row | None]

    def __init__(self) -> None:
        if self.library and importlib.util.find_spec(self.library) is None:
            command = f"pip install {self.install or self.library}"
            raise ConfigError(
                f"the logger {type(self).__name__} needs {self.library}, which is not installed: "
                f"{install_command(self.extra) if self.extra and not self.install else command}"
            )

    @abstractmethod
    def open(self, trainer: RunFace) -> None:
        """Connect, or make the files; `trainer.config` and `trainer.run_dir.path` say for what."""

    @abstractmethod
    def log(self, step: int, metrics: Metrics) -> None:
        """Write one row; only finite numbers."""

    def close(self) -> None:
        """Hand over what is left."""

    def on_train_begin(self, trainer: RunFace) -> None:
        self._rows = queue.Queue(QUEUE_ROWS)
        self._thread = threading.Thread(
            target=self._work, args=(trainer,), name=f"retrain-{type(self).__name__}", daemon=True
        )
        self._thread.start()

    def on_step_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        self._put(step, metrics)

    def on_eval_end(self, trainer: RunFace, step: int, metrics: Metrics) -> None:
        self._put(step, {f"eval/{key.removeprefix('eval/')}": metrics[key] for key in metrics})

    async def on_train_end(self, trainer: RunFace, result: TrainingResult) -> None:
        if self._thread is None:
            return
        ended = await asyncio.to_thread(self._end)
        if not ended:
            _log.warning(
                "%s did not stop within %.0f s; continuing without it",
                self._name,
                self.close_seconds,
            )
        if self.lost:
            _log.warning(
                "%s dropped %d rows because its service is slow; metrics.jsonl contains them",
                self._name,
                self.lost,
            )

    @property
    def _name(self) -> str:
        return f"the logger {type(self).__name__}"

    def _put(self, step: int, metrics: Mapping[str, float]) -> None:
        finite = {
            key: value for key, value in metrics.items() if key != "step" and math.isfinite(value)
        }
        try:
            self._rows.put_nowait((step, finite))
        except queue.Full:
            self.lost += 1

    def _end(self) -> bool:
        """Ask the thread to end; whether it did so in time."""
        assert self._thread is not None
        with suppress(queue.Full):
            self._rows.put(None, timeout=self.close_seconds)
            self._thread.join(self.close_seconds)
        return not self._thread.is_alive()

    def _work(self, trainer: RunFace) -> None:
        row: _Row | None = (0, {})
        try:
            self.open(trainer)
            while (row := self._rows.get()) is not None:
                self.log(*row)
            self.close()
        except Exception as error:  # noqa: BLE001 - a logger's fault is never the run's
            self.failure = error
            _log.warning(
                "%s is disabled: %s: %s; the run continues, and metrics.jsonl contains every row",
                self._name,
                type(error).__name__,
                error,
            )
            while row is not None:  # the run goes on putting rows, up to the None of its end
                row = self._rows.get()
