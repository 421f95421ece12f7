"""Checkpoints and sampler snapshots on disk; they survive the server.

Each is a folder `FOLDER/MODEL/KIND/NAME/` with `manifest.json`, `weights.safetensors` and, for a
training state, `optimizer.pt`. Models and names are single words of a few safe characters: no
request can lead out of FOLDER.

- One `CheckpointStore` at a time may be open on a folder.
- A rename makes a complete folder visible, so that a server that crashes leaves no incomplete
  checkpoint. A replaced checkpoint is kept beside its place until the new one is there, and `open`
  puts it back if it never came.
- Files and folders are on the disk before a save returns.
- Time to live is measured on a clock that the system's clock can't move while the process lives.
"""

from __future__ import annotations

import glob
import json
import logging
import re
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self, cast

import torch
from pydantic import TypeAdapter
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from retrain.errors import ConfigError
from retrain.service.errors import ServiceError, conflict, invalid, missing
from retrain.service.tuning import Tuning
from retrain.supervision.disk import sync
from retrain.supervision.locks import FolderLock, InUseError

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(:train:[0-9]{1,9})?")
_DRAFT, _REPLACED = ".draft-", ".replaced"
_MANIFEST, _WEIGHTS, _OPTIMIZER = "manifest.json", "weights.safetensors", "optimizer.pt"


class CheckpointPlace(NamedTuple):
    """Where a checkpoint is; the paths of the protocols name it."""

    model_id: str
    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint's manifest."""

    place: CheckpointPlace
    base_model: str
    tuning: Tuning
    steps: int
    """Optimizer steps that the model had taken."""
    optimizer: bool
    created_at: float = 0.0
    """Seconds since the epoch; set by `CheckpointStore.save`."""
    expires_at: float | None = None
    """Seconds since the epoch; None keeps it until it is deleted."""
    listed: bool = True
    """False for the unnamed snapshot of a sampling session."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON of the client
    size_bytes: int = 0


_OTHER = "choose another folder: --folder of `retrain serve`, --run-dir of a run"
_SAVED = TypeAdapter(Saved)
log = logging.getLogger(__name__)


class CheckpointStore:
    """Reads and writes checkpoints in one folder. Its methods block: call them in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._epoch = time.time() - time.monotonic()
        self._moving = threading.RLock()
        """Held while a folder changes its place, and while files in it are opened."""
        self._lock: FolderLock | None = None
        self._reported: set[Path] = set()

    def open(self) -> Self:
        """Take the folder for this process, and clean up what a killed one left.

        Raises ConfigError if another service uses the folder, or if it can't be written.
        """
        try:
            self._lock = FolderLock(self.folder)
        except InUseError as error:
            raise ConfigError(
                f"the service folder {self.folder} is in use by {error}; end that service or run "
                f"first, or {_OTHER}"
            ) from None
        except OSError as error:
            raise ConfigError(
                f"can't write the service folder {self.folder}: {error.strerror}; {_OTHER}"
            ) from error
        for draft in self.folder.glob(f"{_DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)
        for old in self.folder.glob(f"*/*/{_replaced('*')}"):
            target = old.with_name(old.name[1 : -len(_REPLACED)])
            if target.exists():
                shutil.rmtree(old, ignore_errors=True)
            else:
                old.rename(target)
        return self

    def close(self) -> None:
        """Let another process use the folder."""
        if self._lock is not None:
            self._lock.release()

    def now(self) -> float:
        """Seconds since the epoch, as of this process's start: it passes at an even rate."""
        return self._epoch + time.monotonic()

    def save(
        self,
        saved: Saved,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> Saved:
        """Delete expired checkpoints, then write this one.

        Raises ServiceError (409) if the name exists and `overwrite` is false.
        """
        self.sweep()
        target = self._folder(saved.place)
        self._check_free(target, overwrite)
        with self._draft() as draft:
            save_file(dict(weights), draft / _WEIGHTS)
            if optimizer is not None:
                torch.save(dict(optimizer), draft / _OPTIMIZER)
            saved = replace(
                saved,
                size_bytes=sum(file.stat().st_size for file in draft.iterdir()),
                created_at=self.now(),
            )
            (draft / _MANIFEST).write_text(json.dumps(asdict(saved)))
            for path in (*draft.iterdir(), draft):
                sync(path)
            with self._moving:
                self._check_free(target, overwrite)  # another save may have been faster
                _swap(draft, target)
            for folder in (target.parent, target.parent.parent, self.folder):
                sync(folder)
        return saved

    def check(self, place: CheckpointPlace) -> None:
        """Raise ServiceError (400) unless model and name can be the names of folders."""
        self._folder(place)

    def find(self, place: CheckpointPlace) -> Saved:
        """The manifest; raises ServiceError (404) if there is none or it has expired."""
        with self._moving:
            saved = self._read(place)
        if saved is None:
            raise missing(f"checkpoint {place.kind}/{place.name} of {place.model_id}")
        if self._expired(saved):
            raise missing(f"checkpoint {place.kind}/{place.name} has expired and")
        return saved

    def load(
        self, place: CheckpointPlace, *, optimizer: bool = False
    ) -> tuple[dict[str, Tensor], dict[str, Any] | None]:
        """The weights on the CPU and, with `optimizer`, AdamW's state, of the same save.

        Raises ServiceError (404).
        """
        self.find(place)
        with ExitStack() as files:
            with self._moving:  # open files stay whole, whatever becomes of their folder
                folder = self._folder(place)
                tensors = files.enter_context(safe_open(folder / _WEIGHTS, "pt"))
                state = files.enter_context((folder / _OPTIMIZER).open("rb")) if optimizer else None
            return (
                {name: tensors.get_tensor(name) for name in tensors.keys()},  # noqa: SIM118
                torch.load(state, weights_only=True) if state else None,
            )

    def list(self, model_id: str | None = None) -> list[Saved]:
        """The listed checkpoints of one model or of all, newest first."""
        found = [one for one in self._all(model_id) if one.listed and not self._expired(one)]
        return sorted(found, key=lambda saved: saved.created_at, reverse=True)

    def expire_at(self, place: CheckpointPlace, seconds: float | None) -> Saved:
        """Keep it for `seconds` from now; None keeps it until it is deleted."""
        expires = None if seconds is None else self.now() + seconds
        with self._draft() as draft, self._moving:
            saved = replace(self.find(place), expires_at=expires)
            (draft / _MANIFEST).write_text(json.dumps(asdict(saved)))
            sync(draft / _MANIFEST)
            (draft / _MANIFEST).replace(self._folder(place) / _MANIFEST)
            sync(self._folder(place))
        return saved

    def delete(self, place: CheckpointPlace) -> None:
        """Delete it, readable or not; raises ServiceError (404) if there is none."""
        if not self._folder(place).exists():
            raise missing(f"checkpoint {place.kind}/{place.name} of {place.model_id}")
        self._discard(place)

    def sweep(self, *, unlisted: bool = False) -> None:
        """Delete expired checkpoints, and with `unlisted` those that no session can know."""
        for saved in list(self._all(None)):
            if self._expired(saved) or (unlisted and not saved.listed):
                with suppress(OSError):
                    self._discard(saved.place, saved)

    def _all(self, model_id: str | None) -> Iterator[Saved]:
        """All readable manifests, without those that are deleted while this runs."""
        model = "*" if model_id is None else _model_folder(model_id)
        # Unlike Path.glob, this one passes over folders that are deleted meanwhile.
        for path in glob.iglob(f"{model}/*/*/{_MANIFEST}", root_dir=self.folder):
            folder, kind, name, _ = Path(path).parts
            with suppress(ServiceError):  # the folder of something else
                saved = self._read(
                    CheckpointPlace(folder.replace("+", ":"), cast(Kind, kind), name)
                )
                if saved is not None:
                    yield saved

    def _read(self, place: CheckpointPlace) -> Saved | None:
        """The manifest, or None if it is missing or, after one warning, if it can't be read."""
        path = self._folder(place) / _MANIFEST
        try:
            saved = _SAVED.validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except (OSError, ValueError) as error:
            if path not in self._reported:
                self._reported.add(path)
                reason = " ".join(str(error).split())  # pydantic's has several lines
                log.warning("skipping a checkpoint: %s can't be read: %s", path, reason)
            return None
        return replace(saved, place=place)

    def _expired(self, saved: Saved) -> bool:
        return saved.expires_at is not None and saved.expires_at <= self.now()

    def _check_free(self, target: Path, overwrite: bool) -> None:
        """Raise ServiceError (409) if there is a checkpoint that must not be replaced."""
        if (target / _MANIFEST).exists() and not overwrite:
            raise conflict(
                f"{target.parent.name}/{target.name} already exists for this model; choose another "
                "name, or delete it first"
            )

    def _discard(self, place: CheckpointPlace, seen: Saved | None = None) -> None:
        """Delete a checkpoint, or only the one `seen`. A kill leaves all of it, or a draft."""
        # FileNotFoundError: another thread was faster
        with self._draft() as draft, self._moving, suppress(FileNotFoundError):
            if seen is None or seen == self._read(place):
                self._folder(place).rename(draft)

    @contextmanager
    def _draft(self) -> Iterator[Path]:
        """A temporary folder, deleted with what is left in it."""
        draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self.folder))
        try:
            yield draft
        finally:
            shutil.rmtree(draft, ignore_errors=True)

    def _folder(self, place: CheckpointPlace) -> Path:
        if place.kind not in KINDS or not _WORD.fullmatch(place.name):
            raise invalid(
                f"{place.kind}/{place.name!r} can't name a checkpoint, expected at most 128 "
                "letters, digits, '.', '_' and '-' that begin with a letter or digit"
            )
        return self.folder / _model_folder(place.model_id) / place.kind / place.name


def _model_folder(model_id: str) -> str:
    if not _MODEL.fullmatch(model_id):
        raise invalid(f"{model_id!r} is not the id of a model")
    return model_id.replace(":", "+")  # every file system allows a plus


def _swap(draft: Path, target: Path) -> None:
    """Make a complete draft visible; what it replaces becomes the draft."""
    target.parent.mkdir(parents=True, exist_ok=True)
    old = target.with_name(_replaced(target.name))
    replaces = target.exists()
    if replaces:
        target.rename(old)
    draft.rename(target)
    if replaces:
        old.rename(draft)


def _replaced(name: str) -> str:
    """Where a checkpoint of this name waits until it is replaced: no name starts with a dot."""
    return f".{name}{_REPLACED}"
