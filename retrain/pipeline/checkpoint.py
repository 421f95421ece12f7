"""Checkpoints: one folder each, written whole or not at all (guarantee P2).

`write` fills a temporary folder, writes the manifest (size and digest of each file) last, syncs
every file and renames the folder. `newest` skips and lists folders whose manifest is missing or
doesn't match. `best` is a link to the checkpoint with the best evaluation, which is never pruned;
on a disk without links it is a text file that holds the name.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from retrain.assembly.defaults import with_defaults
from retrain.config import RunConfig
from retrain.errors import CheckpointError, first_of, shown
from retrain.supervision.disk import sync
from retrain.supervision.jsonable import plain
from retrain.supervision.threads import DaemonPool
from retrain.types import Completion, Group, Prompt, Ticket, Trajectory, Turn

MANIFEST = "manifest.json"
RUN_STATE = "run.json"
FORMAT = 5
_STEP = re.compile("step_[0-9]{1,18}")


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """What a run needs to continue, beside the adapter's files in `folder / "adapter"`."""

    step: int
    version: int
    ledger: Mapping[str, Any]
    """Ledger.state()."""
    groups: list[dict[str, Any]]
    """Finished groups that were not trained yet (`group_to_json`)."""
    adapter: Mapping[str, Any]
    """AdapterState.data."""
    counters: Mapping[str, Any]
    """The learner's own state: streaks, the highest reward, the best evaluation, callbacks."""
    config: Mapping[str, Any]


class Checkpoints:
    """The `checkpoints/` folder of a run, with one `step_N` folder per checkpoint."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._disk = DaemonPool(1, "retrain-disk")
        self.incomplete: list[str] = []
        """Incomplete checkpoints that `newest` skipped, with the reason."""
        self.saved: int | None = None
        """The step whose checkpoint was written last, or loaded."""
        self.spared: set[int] = set()
        """Steps whose checkpoints `prune` keeps."""

    async def write(
        self,
        step: int,
        fill: Callable[[Path], Awaitable[Checkpoint]],
        before: Callable[[], object] = lambda: None,
    ) -> Path:
        """Write a checkpoint: `fill` writes the adapter's files and returns the rest.

        `before` is called in the thread that writes, before the checkpoint counts. Raises
        CheckpointError when the disk fails; older checkpoints stay as they are.
        """
        target = self.path(step)
        with _partial(target) as temporary:
            # not with its parents: a run directory that was deleted stays deleted
            self.folder.mkdir(exist_ok=True)
            temporary.mkdir()
            checkpoint = await fill(temporary)
            await self._disk.run(partial(_seal, checkpoint, temporary, target, before))
        self.saved = step
        return target

    def close(self) -> None:
        self._disk.close()

    def newest(self) -> tuple[Path, Checkpoint] | None:
        """The newest complete checkpoint; incomplete ones are skipped and listed in `incomplete`.

        Raises CheckpointError for one of another format: an older one is no substitute for it.
        """
        for step in sorted(self.steps(), reverse=True):
            path = self.path(step)
            problem = _problem(path)
            if problem is None:
                try:
                    return path, read(path)
                except CheckpointError as error:
                    problem = str(error)
            self.incomplete.append(f"{path.name}: {problem}")
        return None

    def last_config(self) -> Mapping[str, Any] | None:
        """The config of the newest readable checkpoint, for a check before any model loads.

        It skips the digests, which `newest` compares: that takes long for large weights.
        """
        for step in sorted(self.steps(), reverse=True):
            with suppress(CheckpointError):
                return read(self.path(step)).config
        return None

    def steps(self) -> list[int]:
        """The steps that have a folder, complete or not."""
        found = self.folder.glob("step_*") if self.folder.is_dir() else ()
        names = [path.name for path in found if path.is_dir()]
        return [int(name[5:]) for name in names if _STEP.fullmatch(name)]

    def path(self, step: int) -> Path:
        return self.folder / f"step_{step}"

    def prune(self, keep: int) -> list[Path]:
        """All but the newest `keep` checkpoints, the last written, the best and `spared` ones.

        The folders still exist: the caller first informs the backend, then calls `remove`.
        """
        kept = {*sorted(self.steps())[-keep:], self.saved, *self.spared}
        best = self.best()
        return [self.path(s) for s in self.steps() if s not in kept and self.path(s) != best]

    def remove(self, path: Path) -> None:
        """Delete a checkpoint: its manifest first, so that what is left counts as incomplete."""
        (path / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(path, ignore_errors=True)

    def best(self) -> Path | None:
        """The checkpoint with the best evaluation so far."""
        mark = self.folder / "best"
        if mark.is_symlink():
            return self.folder / os.readlink(mark)
        return self.folder / mark.read_text() if mark.is_file() else None

    def mark_best(self, step: int, fault: Callable[[str], None]) -> None:
        """Make `best` point to this step's checkpoint, atomically; report a disk that fails."""
        temporary, name = self.folder / ".best", self.path(step).name
        try:
            temporary.unlink(missing_ok=True)
            try:
                temporary.symlink_to(name)
            except OSError:  # FAT and some network disks have no links
                temporary.write_text(name)
            temporary.replace(self.folder / "best")
        except OSError as error:
            fault(f"can't mark step {step} as the best checkpoint: {error}")


def read(path: Path) -> Checkpoint:
    """The run state in a checkpoint folder; raises CheckpointError if it can't be read."""
    try:
        return Checkpoint(**json.loads((path / RUN_STATE).read_text()))
    except (OSError, ValueError, TypeError, RecursionError) as error:
        problem = f"{path} is not a checkpoint that this version of retrain can read: {error}"
        raise CheckpointError(problem) from error


def verified(path: Path) -> Checkpoint:
    """The run state of a complete checkpoint; raises CheckpointError for an incomplete one."""
    problem = _problem(path)
    if problem is not None:
        raise CheckpointError(f"{path} is not a complete checkpoint: {problem}")
    return read(path)


def check_free(target: Path) -> None:
    """Raises FileExistsError if `target` is a file, or a folder with other contents."""
    filled = target.is_dir() and any(target.iterdir()) and not (target / MANIFEST).exists()
    if filled or target.is_file():
        raise FileExistsError(f"{target} exists and is not a checkpoint. Choose another folder.")


def copy(source: Path, target: Path) -> None:
    """Copy a checkpoint to `target`, replacing an older one there; blocks.

    Raises FileExistsError as `check_free` does, CheckpointError when `source` is incomplete or the
    disk fails.
    """
    verified(source)
    check_free(target)
    with _partial(target) as temporary:
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copytree(source, temporary)
        _put(temporary, target)


MODEL = ("model", "backend.type", "backend.lora", "backend.sharding")
"""Keys that a checkpoint's weights, and the form of their files, depend on."""
CONVERTED = ("backend.sharding", "full", "none")
"""A change of them that a backend makes itself: (key, old, new)."""
DATA = ("prompts", "train.seed", "train.shuffle")
"""Keys that the order of the prompts depends on."""
TURN = ("seat", "parent", "reward", "answer", "reasoning")
"""The plain values of a turn."""
SCORING = ("environment", "opponents", "rewards", "algorithm", "chat")
"""Keys that the rewards of finished groups depend on."""


def changes(saved: Mapping[str, Any], config: RunConfig, keys: Sequence[str]) -> list[str]:
    """The differences below `keys` between a saved config and this one, one line per key."""
    return [
        f"{path}: was {_written(old)}, is {_written(new)}"
        for path, old, new in _all_changes(saved, config)
        if (path, old, new) != CONVERTED and any(f"{path}.".startswith(f"{key}.") for key in keys)
    ]


def changed_keys(saved: Mapping[str, Any], config: RunConfig) -> list[str]:
    """The dotted keys whose values differ, except `run_dir`."""
    return [path for path, *_ in _all_changes(saved, config) if path != "run_dir"]


def _all_changes(saved: Mapping[str, Any], config: RunConfig) -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) of what differs, whether or not a default was written out."""
    old, new = (
        with_defaults(values, config.base_dir) for values in (saved, plain(config.model_dump()))
    )
    return _differences(old, new)


def _written(value: Any) -> str:
    """A value as YAML has it."""
    if value is None:
        return "unset"
    return str(value).lower() if isinstance(value, bool) else shown(value)


def changed_run(saved: Mapping[str, Any], config: RunConfig) -> str:
    """Why a run with the config `saved` can't resume with `config`; empty when it can."""
    scoring = ("environment", "algorithm", "chat")
    changed = changes(saved, config, (*MODEL, *DATA, *scoring, "train.groups_per_step"))
    if not changed:
        return ""
    return (
        "this run can't be resumed with another configuration; changed: "
        + first_of(changed, "; ")
        + ". Undo the changes, or start a new run with --run-dir."
    )


PARTS = ("turn_rewards", "token_rewards")


def group_to_json(group: Group) -> dict[str, Any]:
    """A finished group as JSON values. Of the prompt it holds the ticket only."""
    names = ("rewards", "outcome", "reward", "seconds", "tools", "seat", "index", "result")
    trajectories = [
        {
            **{name: getattr(trajectory, name) for name in names},
            **{name: list(parts) for name in PARTS if (parts := getattr(trajectory, name))},
            "info": plain(trajectory.info),  # an environment may put anything there
            "messages": plain(list(trajectory.messages)),
            "turns": [
                {
                    **{name: getattr(t, name) for name in TURN},
                    "prompt_ids": list(t.prompt_ids),
                    "completion": asdict(t.completion),
                    "observation": plain(list(t.observation)),
                    "messages": plain(list(t.messages)),
                }
                for t in trajectory.turns
            ],
        }
        for trajectory in group.trajectories
    ]
    return {"ticket": group.prompt.id, "trajectories": trajectories}


def group_from_json(saved: Mapping[str, Any], prompt_of: Callable[[Ticket], Prompt]) -> Group:
    prompt = prompt_of(Ticket.parse(saved["ticket"]))
    trajectories = []
    for row in saved["trajectories"]:
        own = replace(prompt, index=row["index"])
        turns = []
        for turn in row["turns"]:
            said = turn["completion"]
            completion = Completion(**{**said, "versions": tuple(said["versions"])})
            messages = tuple(turn["messages"])
            turns.append(Turn(**{**turn, "completion": completion, "messages": messages}))
        kept = {**row, "turns": turns, "tools": tuple(row.get("tools", ()))}
        trajectories.append(Trajectory(own, **kept))
    return Group(prompt, trajectories)


@contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """The temporary folder of `target`; raises CheckpointError when the disk fails."""
    temporary = target.with_name(f".{target.name}.partial")
    try:
        shutil.rmtree(temporary, ignore_errors=True)
        yield temporary
    except Exception as error:
        shutil.rmtree(temporary, ignore_errors=True)
        if isinstance(error, OSError):
            raise CheckpointError(f"can't write the checkpoint {target}: {error}") from error
        raise


def _seal(checkpoint: Checkpoint, folder: Path, target: Path, before: Callable[[], object]) -> None:
    """Write the run state, then the manifest over all files, and put the folder into place."""
    state = {field.name: getattr(checkpoint, field.name) for field in fields(checkpoint)}
    (folder / RUN_STATE).write_text(json.dumps(state, default=repr))
    entries = {
        path.relative_to(folder).as_posix(): [path.stat().st_size, _digest(path)]
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    (folder / MANIFEST).write_text(json.dumps({"format": FORMAT, "files": entries}))
    before()
    _put(folder, target)


def _put(folder: Path, target: Path) -> None:
    """Sync all that `folder` holds, then rename it to `target`, which is replaced."""
    for path in [*folder.rglob("*"), folder]:
        sync(path)
    shutil.rmtree(target, ignore_errors=True)  # an incomplete one of a run that was killed
    folder.rename(target)
    sync(target.parent)


def _problem(folder: Path) -> str | None:
    """What is wrong with a checkpoint; None when it is complete.

    Raises CheckpointError when another version of `retrain` wrote it in another format.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text())
        if manifest["format"] != FORMAT:
            raise CheckpointError(
                f"{folder} has the checkpoint format {manifest['format']}, expected {FORMAT}. "
                "Resume with the version of retrain that wrote it, or start a new run with "
                "--run-dir."
            )
        entries = manifest["files"].items()
        if not entries or any(_leaves(name) for name, _ in entries):
            return "its manifest doesn't name files of its own folder"
        for name, (size, digest) in entries:
            path = folder / name
            if path.stat().st_size != size or _digest(path) != digest:
                return f"{name} doesn't match the manifest"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        return f"can't read its manifest ({type(error).__name__}: {error})"
    return None


def _leaves(name: str) -> bool:
    """Whether a path leads out of its folder."""
    return Path(name).is_absolute() or ".." in Path(name).parts


def _differences(old: Any, new: Any, path: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(dotted key, old, new) for each difference, as deep as both have the same structure.

    Plug-ins of different types are compared by the keys that both have.
    """
    inner: Iterable[Any] = ()
    if isinstance(old, Mapping) and isinstance(new, Mapping):
        both = old.keys() & new.keys()
        other = "type" in both and old["type"] != new["type"]
        keys = [key for key in {**old, **new} if not other or key in both]
        inner = [(key, old.get(key), new.get(key)) for key in keys]
    elif isinstance(old, list) and isinstance(new, list) and len(old) == len(new):
        inner = zip(range(len(old)), old, new, strict=True)
    elif old != new:
        yield path, old, new
    for key, before, after in inner:
        yield from _differences(before, after, f"{path}.{key}".lstrip("."))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
