"""The run directory: the files of a run, and who may write them.

    config.yaml      the resolved configuration, without secrets
    events.jsonl     {"event": kind, "time": seconds since 1970, ...}: everything that happened
    metrics.jsonl    one object per step, and one per evaluation that no step follows
    rollouts.jsonl   one object per rollout, written when its group is trained or dropped
    checkpoints/     written by checkpoint.py
    voided/          lines of the last two that a resume voided

- Only one process may use it: `open` takes a lock that the kernel releases when the process ends.
- No line is changed. events.jsonl only grows: a resume adds `resumed{from_step}`, and `surviving`
  drops the events that it voids. From the other files it moves what it voids to `voided/`, so that
  they hold each step and each rollout once.
- `metrics` completes a step: all earlier lines have then reached the OS. `sync` brings them to the
  disk, before a checkpoint counts.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from retrain.config import RunConfig
from retrain.config.hints import is_hidden
from retrain.config.reading import BASE_DIR_NOTE
from retrain.config.variables import escaped
from retrain.errors import ConfigError, RunError
from retrain.observe import upkeep
from retrain.observe.causes import Causes
from retrain.observe.failure import ERROR
from retrain.observe.journal import Journal, encode, read_lines, repair
from retrain.observe.rollout_lines import with_fate
from retrain.observe.voided import cut
from retrain.supervision.disk import sync
from retrain.supervision.jsonable import plain
from retrain.supervision.locks import FolderLock, InUseError, holder
from retrain.types import Group

EVENTS, METRICS, ROLLOUTS, CONFIG = "events.jsonl", "metrics.jsonl", "rollouts.jsonl", "config.yaml"
REPORT = "report.html"
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Of the run's own config.yaml: in C where PyYAML has it, which is ten times as fast."""


@dataclass(slots=True)
class Tally:
    """Counts of rollouts and dropped groups since this process started."""

    unit: str = "rollouts"
    """What a group has: rollouts, or rows of the dataset (demonstrations, pairs)."""

    drops: Counter[str] = field(default_factory=Counter)
    """Groups, by the cause of their `dropped` event."""
    outcomes: Counter[str] = field(default_factory=Counter)
    """Rollouts, by outcome, without those of evaluations."""
    evaluated: Counter[str] = field(default_factory=Counter)
    """Rollouts of evaluations, by outcome."""
    errors: Causes = field(default_factory=Causes)
    """Failed rollouts, and what else failed, by the kind of the error."""
    seats: set[str] = field(default_factory=set)
    """Of rollouts with several."""
    memory: Mapping[str, int] = field(default_factory=dict)
    """The peaks, of `peak_memory`, measured at each checkpoint and at the end."""
    announce: Callable[[str], object] = lambda text: None
    """Called with the first error of each kind."""
    remark: Callable[[str], object] = lambda text: None
    """The same for errors in spite of which a rollout is scored."""

    def failed(self, error: str) -> None:
        """Count an error."""
        if (first := self.errors.add(error)) is not None:
            self.announce(first)

    def scored(self, error: str) -> None:
        """Count an error in spite of which a rollout is scored."""
        if (first := self.errors.add(error)) is not None:
            self.remark(first)


class RunDirectory:
    """An open run directory, for the only process that may write it."""

    def __init__(self, path: Path, lock: FolderLock, *, resumed: bool, fresh: bool) -> None:
        """`fresh`: the directory was made for this run, or was empty."""
        self.path = path
        self.checkpoints = path / "checkpoints"
        self.resumed = resumed
        self.begun = resumed
        """Whether training has begun. If the run fails before, `__exit__` removes its files."""
        self._fresh = fresh
        self.changed: list[str] = []
        """Config keys that differ from those of the checkpoint that the run resumes from."""
        self.tally = Tally()
        self._lock = lock
        self._events = Journal(path / EVENTS)
        self._metrics = Journal(path / METRICS)
        self._rollouts = Journal(path / ROLLOUTS)
        self._journals = (self._rollouts, self._events, self._metrics)

    @classmethod
    def open(cls, path: Path, config: RunConfig, *, resume: bool = False) -> RunDirectory:
        """Create or, with `resume`, continue the run directory at `path`.

        Raises ConfigError if it already has a run (without `resume`), has none (with it), can't be
        written, or is in use by another process.
        """
        path = path.absolute()
        fresh = not path.exists() or (path.is_dir() and not any(path.iterdir()))
        if resume:
            _check_run(path, resume=True)
        try:
            (path / "checkpoints").mkdir(parents=True, exist_ok=True)
            lock = FolderLock(path)
        except InUseError as error:
            raise _in_use_by(str(error), path) from None
        except OSError as error:
            raise unwritable(path, error) from error
        with ExitStack() as unlock:
            unlock.callback(lock.release)
            if not resume:
                _check_run(path, resume=False)
            upkeep.sweep(path)
            for name in (EVENTS, METRICS, ROLLOUTS):
                repair(path / name)
            write_whole(path / CONFIG, as_yaml(config))
            run_dir = cls(path, lock, resumed=resume, fresh=fresh)
            unlock.pop_all()
        return run_dir

    def event(self, kind: str, /, **fields: object) -> None:
        """Append one event; times in `fields` are seconds since 1970, tickets are strings."""
        if kind == "dropped":
            self.tally.drops[str(fields.get("cause", "unknown"))] += 1
        self._events.write(encode({"event": kind, "time": time.time(), **fields}))

    def rollouts(self, lines: Iterable[bytes], step: int | None = None, dropped: str = "") -> None:
        """Append the `encoded` rollouts of a group, with their fate (see `with_fate`)."""
        self._rollouts.write(*with_fate(lines, step, dropped))

    def count(self, group: Group, *, evaluated: bool = False) -> None:
        """Add a group to the tally only."""
        outcomes = self.tally.evaluated if evaluated else self.tally.outcomes
        for trajectory in group.trajectories:
            outcomes[trajectory.outcome] += 1
            if trajectory.seat:
                self.tally.seats.add(trajectory.seat)
            prefix = "eval: " if evaluated else ""
            if trajectory.outcome != "ok":
                self.tally.failed(f"{prefix}{trajectory.info.get('error') or trajectory.outcome}")
            elif error := trajectory.agent_error:
                self.tally.scored(f"{prefix}scored, although {error}")

    def metrics(self, row: Mapping[str, float]) -> None:
        """Append one step's metrics, and flush all files."""
        self._metrics.write(encode(row))
        self.flush()

    def sizes(self) -> dict[str, int]:
        """How many bytes of the files hold what happened so far, for `cut`."""
        self.flush()
        return {name: (self.path / name).stat().st_size for name in (METRICS, ROLLOUTS)}

    def cut(self, sizes: Mapping[str, int]) -> None:
        """Move what follows these sizes to `voided/`; all lines by default."""
        for name in (METRICS, ROLLOUTS):
            cut(self.path / name, sizes.get(name, 0))

    def flush(self) -> None:
        """Pass all lines so far to the OS: they survive a kill -9.

        Raises RunError if a file of the run was deleted: what it writes would be lost.
        """
        for journal in self._journals:
            journal.flush()
        if missing := self.missing():
            raise RunError(
                f"{missing} was deleted during the run, so the run can neither continue nor be "
                "resumed. Start a new run."
            )

    def missing(self) -> Path | None:
        """The run directory or a file of it that was deleted."""
        paths = (self.path, *(journal.path for journal in self._journals))
        return next((path for path in paths if not path.exists()), None)

    def sync(self) -> None:
        """Write all lines so far to the disk: they survive a power cut. Blocks."""
        for journal in self._journals:
            journal.sync()
        for folder in (self.path, self.path.parent):
            sync(folder)

    def close(self) -> None:
        """Flush, close and unlock, whatever fails; then raise that RunError."""
        with ExitStack() as closing:
            closing.callback(self._lock.release)
            for journal in self._journals:
                closing.callback(journal.close)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        with suppress(*([] if kind is None else [RunError])):  # not to hide the current error
            if kind is not None and not self.begun:
                self._discard()
            self.close()

    def _discard(self) -> None:
        """Remove the files of a start that failed; the whole directory if it is fresh."""
        if self._fresh:
            shutil.rmtree(self.path, ignore_errors=True)
        else:
            upkeep.sweep(self.path, (EVENTS, METRICS, ROLLOUTS, CONFIG, REPORT, ERROR))


def check_usable(path: Path, *, resume: bool) -> None:
    """Raise the ConfigError of `RunDirectory.open` before a model loads; writes nothing."""
    path = path.absolute()
    try:
        process = holder(path)
    except OSError as error:
        raise unwritable(path, error) from error
    if process:
        raise _in_use_by(process, path)
    if path.exists() and not path.is_dir():
        raise unwritable(path, NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR)))
    _check_run(path, resume=resume)


def _check_run(path: Path, *, resume: bool) -> None:
    has_run = (path / EVENTS).exists()
    if resume and not has_run:
        raise ConfigError(f"no run to resume in {path}; drop --resume, or pass --run-dir")
    if has_run and not resume:
        raise ConfigError(
            f"{path} already has a run; continue it with --resume, choose another directory with "
            "--run-dir, or delete it"
        )


def unwritable(path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"can't write the run directory {path}: {error.strerror or error}; choose another with "
        "--run-dir"
    )


def _in_use_by(process: str, path: Path) -> ConfigError:
    return ConfigError(
        f"the run directory {path} is in use by {process}; end that run first, or choose another "
        "directory with --run-dir"
    )


def read_config(path: Path) -> tuple[dict[str, Any], str]:  # any: YAML values
    """The config of a run, and its text without the comment at its top; empty if it is damaged."""
    text = ""
    try:
        text = (path / CONFIG).read_text(encoding="utf-8")
        loaded = yaml.load(text, Loader=LOADER)
    except (OSError, ValueError, yaml.YAMLError):
        loaded = None
    text = text.partition("\n")[2] if text.startswith("#") else text
    return (loaded if isinstance(loaded, dict) else {}), text


def read_events(path: Path) -> Iterator[dict[str, Any]]:  # any: JSON values
    """All events of a run directory in order, void ones included."""
    return read_lines(path / EVENTS)


def surviving(events: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The events that count: those that no later `resumed{from_step}` voids.

    A checkpoint has the state of its `snapshot{step}` event, which is on the disk before the
    checkpoint exists. A resume voids all later events: whatever was issued or sampled while the
    checkpoint was written is done again. `anew` voids all: the run was killed while it wrote its
    first checkpoint, or before.
    """
    kept: list[dict[str, Any]] = []
    for event in events:
        if event["event"] == "resumed":
            snapshot = None if event.get("anew") else event["from_step"]
            while kept and (kept[-1]["event"], kept[-1].get("step")) != ("snapshot", snapshot):
                kept.pop()
        kept.append(event)
    return kept


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The steps of a run directory; the row of an evaluation is merged into that of its step."""
    rows: list[dict[str, Any]] = []
    for row in read_lines(path / METRICS):
        if rows and "eval/step" in row and "loss" not in row:
            rows[-1] |= row
        else:
            rows.append(row)
    return rows


def read_evaluations(path: Path) -> list[dict[str, Any]]:
    """The results of the evaluations of a run directory, from its metrics."""
    return [
        {key: value for key, value in row.items() if key.startswith("eval/")}
        for row in read_lines(path / METRICS)
        if "eval/step" in row
    ]


_URL_LOGIN = re.compile(r"(?<=://)(?![^/@\s]*\$\{)[^/@\s]+@")


def resolved(config: RunConfig) -> dict[str, Any]:  # any: plain YAML values
    """All keys of `config`, including defaults, without values that look like secrets."""
    shown: dict[str, Any] = _without_secrets(plain(config.model_dump()))
    return shown


def as_yaml(config: RunConfig) -> str:
    """`resolved` as a config file, which works in any folder."""
    values = _without_secrets(plain(escaped(config.model_dump())))
    text = yaml.safe_dump(values, sort_keys=False, allow_unicode=True)
    return f"{BASE_DIR_NOTE}{config.base_dir.absolute()}\n{text}"


def write_whole(path: Path, text: str) -> None:
    """Write a file completely or not at all; raises ConfigError."""
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8", errors="replace")
        temporary.replace(path)
    except OSError as error:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise ConfigError(
            f"can't write {path}: {error.strerror or error}; choose another --run-dir"
        ) from error


def _without_secrets(value: Any) -> Any:  # any: JSON values
    """`value` without secrets that a user wrote into it; `${NAME}` is none."""
    if isinstance(value, dict):
        return {
            key: "(hidden)"
            if isinstance(item, str) and is_hidden(key) and "${" not in item
            else _without_secrets(item)
            for key, item in value.items()
        }
    if isinstance(value, list):
        return [_without_secrets(item) for item in value]
    return _URL_LOGIN.sub("(hidden)@", value) if isinstance(value, str) else value
