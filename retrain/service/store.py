"""Checkpoints and sampler snapshots on disk; they survive the server.

One folder each, `FOLDER/MODEL/KIND/NAME/`, with `manifest.json`, `weights.safetensors` and, for a
training state, `optimizer.pt`. A folder appears by a rename when it's complete, so that a server
that dies in the middle leaves no half checkpoint. Models and names are single words of a few safe
characters: nothing that a client sends can lead out of FOLDER.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from retrain.service.errors import conflict, invalid, missing
from retrain.service.trainer import Tuning

Kind = Literal["weights", "sampler_weights"]
KINDS: tuple[Kind, ...] = ("weights", "sampler_weights")
_WORD = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_MODEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}(:train:[0-9]{1,9})?")
_DRAFT = ".draft-"
_MANIFEST, _WEIGHTS, _OPTIMIZER = "manifest.json", "weights.safetensors", "optimizer.pt"


class Place(NamedTuple):
    """Where a checkpoint is: what the protocols' paths name."""

    model_id: str
    kind: Kind
    name: str


@dataclass(frozen=True, slots=True)
class Saved:
    """A checkpoint's manifest."""

    place: Place
    base_model: str
    tuning: Tuning
    steps: int
    """Optimizer steps that the model had taken."""
    optimizer: bool
    created_at: float = field(default_factory=time.time)
    """Seconds since the epoch."""
    expires_at: float | None = None
    """The same; None keeps it until it's deleted."""
    listed: bool = True
    """False for a snapshot that only its sampling session knows."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # the client's own JSON
    size_bytes: int = 0


class Store:
    """Reads and writes checkpoints below one folder. Blocking: call it in a thread."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        for draft in folder.glob(f"{_DRAFT}*"):
            shutil.rmtree(draft, ignore_errors=True)

    def save(
        self,
        saved: Saved,
        weights: Mapping[str, Tensor],
        optimizer: Mapping[str, Any] | None = None,
        *,
        overwrite: bool = False,
    ) -> Saved:
        """Write it, when what has expired has made room.

        Raises ServiceError (409) when the name is taken and `overwrite` is false.
        """
        self.sweep()
        target = self._folder(saved.place)
        if target.exists() and not overwrite:
            raise conflict(
                f"{saved.place.kind}/{saved.place.name} of this model exists already: "
                "take another name, or delete it first"
            )
        draft = Path(tempfile.mkdtemp(prefix=_DRAFT, dir=self.folder))
        try:
            save_file(dict(weights), draft / _WEIGHTS)
            if optimizer is not None:
                torch.save(dict(optimizer), draft / _OPTIMIZER)
            size = sum(file.stat().st_size for file in draft.iterdir())
            saved = replace(saved, size_bytes=size, optimizer=optimizer is not None)
            (draft / _MANIFEST).write_text(json.dumps(asdict(saved)))
            for file in draft.iterdir():
                _sync(file)
            target.parent.mkdir(parents=True, exist_ok=True)
            if target.exists():
                target.rename(draft.with_name(f"{draft.name}-replaced"))
            draft.rename(target)
            _sync(target.parent)
        finally:
            for left in self.folder.glob(f"{draft.name}*"):
                shutil.rmtree(left, ignore_errors=True)
        return saved

    def check(self, place: Place) -> None:
        """Raises ServiceError (400) unless model and name are words that can name a folder."""
        self._folder(place)

    def find(self, place: Place) -> Saved:
        """The manifest; raises ServiceError (404) when there is none, or it has expired."""
        try:
            saved = _read(self._folder(place) / _MANIFEST)
        except FileNotFoundError:
            raise missing(f"the checkpoint {place.kind}/{place.name} of {place.model_id}") from None
        if _expired(saved):
            raise missing(f"the checkpoint {place.kind}/{place.name} has expired and")
        return saved

    def weights(self, place: Place) -> dict[str, Tensor]:
        """The trained weights, on the CPU; raises ServiceError (404)."""
        self.find(place)
        return load_file(self._folder(place) / _WEIGHTS)

    def optimizer(self, place: Place) -> dict[str, Any]:
        """AdamW's state, of a checkpoint that has one."""
        state: dict[str, Any] = torch.load(self._folder(place) / _OPTIMIZER, weights_only=True)
        return state

    def list(self, model_id: str | None = None) -> list[Saved]:
        """What a client may see, newest first; of one model or of all."""
        found = [saved for saved in self._all(model_id) if saved.listed and not _expired(saved)]
        return sorted(found, key=lambda saved: saved.created_at, reverse=True)

    def expire_at(self, place: Place, seconds: float | None) -> Saved:
        """Keep it for `seconds` from now; None keeps it until it's deleted."""
        expires = None if seconds is None else time.time() + seconds
        saved = replace(self.find(place), expires_at=expires)
        manifest = self._folder(place) / _MANIFEST
        draft = manifest.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(saved)))
        draft.replace(manifest)
        return saved

    def delete(self, place: Place) -> None:
        """Raises ServiceError (404) when it isn't there."""
        self.find(place)
        shutil.rmtree(self._folder(place))

    def sweep(self, *, unlisted: bool = False) -> None:
        """Delete what has expired, and with `unlisted` what no session knows any more."""
        for saved in list(self._all(None)):
            if _expired(saved) or (unlisted and not saved.listed):
                shutil.rmtree(self._folder(saved.place), ignore_errors=True)

    def _all(self, model_id: str | None) -> Iterator[Saved]:
        """Others save and delete meanwhile: what is gone when it is read is left out."""
        models = (
            _folders(self.folder) if model_id is None else [self.folder / _model_folder(model_id)]
        )
        for model in models:
            for folder in [folder for kind in KINDS for folder in _folders(model / kind)]:
                with suppress(FileNotFoundError):
                    yield _read(folder / _MANIFEST)

    def _folder(self, place: Place) -> Path:
        if place.kind not in KINDS or not _WORD.fullmatch(place.name):
            raise invalid(
                f"{place.kind}/{place.name!r} can't name a checkpoint: a name is one word of "
                "letters, digits, '.', '_' and '-', up to 128, that begins with a letter or digit"
            )
        return self.folder / _model_folder(place.model_id) / place.kind / place.name


def _model_folder(model_id: str) -> str:
    if not _MODEL.fullmatch(model_id):
        raise invalid(f"{model_id!r} can't be the id of a model")
    return model_id.replace(":", "+")  # no file system minds a plus


def _folders(path: Path) -> list[Path]:
    """The folders in `path`, drafts left out; none when it isn't there."""
    try:
        with os.scandir(path) as entries:
            return [Path(e) for e in entries if e.is_dir() and not e.name.startswith(_DRAFT)]
    except FileNotFoundError:
        return []


def _read(manifest: Path) -> Saved:
    values = json.loads(manifest.read_text())
    place, tuning = Place(*values.pop("place")), Tuning(**values.pop("tuning"))
    return Saved(place=place, tuning=tuning, **values)


def _expired(saved: Saved) -> bool:
    return saved.expires_at is not None and saved.expires_at <= time.time()


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
