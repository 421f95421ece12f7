"""Checkpoints and sampler snapshots on disk; they survive the server.

Each is a folder `FOLDER/MODEL/KIND/NAME/` with `manifest.json`, `weights.safetensors` and, for a
training state, `optimizer.pt`. A rename makes a complete folder visible, so that a server that
crashes leaves no incomplete checkpoint. Models and names are single words of a few safe
characters: no request can lead out of FOLDER.
"""

from __future__ import annotations

import glob
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
    """Where a checkpoint is; the paths of the protocols name it."""

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
    """Seconds since the epoch; None keeps it until it is deleted."""
    listed: bool = True
    """False for the unnamed snapshot of a sampling session."""
    metadata: Mapping[str, Any] = field(default_factory=dict)  # JSON of the client
    size_bytes: int = 0


class Store:
    """Reads and writes checkpoints in one folder. Its methods block: call them in a thread."""

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
        """Delete expired checkpoints, then write this one.

        Raises ServiceError (409) if the name exists and `overwrite` is false.
        """
        self.sweep()
        target = self._folder(saved.place)
        if target.exists() and not overwrite:
            raise conflict(
                f"{saved.place.kind}/{saved.place.name} already exists for this model; choose "
                "another name, or delete it first"
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
        """Raise ServiceError (400) unless model and name can be the names of folders."""
        self._folder(place)

    def find(self, place: Place) -> Saved:
        """The manifest; raises ServiceError (404) if there is none or it has expired."""
        try:
            saved = _read(self._folder(place) / _MANIFEST)
        except FileNotFoundError:
            raise missing(f"checkpoint {place.kind}/{place.name} of {place.model_id}") from None
        if _expired(saved):
            raise missing(f"checkpoint {place.kind}/{place.name} has expired and")
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
        """The listed checkpoints of one model or of all, newest first."""
        found = [saved for saved in self._all(model_id) if saved.listed and not _expired(saved)]
        return sorted(found, key=lambda saved: saved.created_at, reverse=True)

    def expire_at(self, place: Place, seconds: float | None) -> Saved:
        """Keep it for `seconds` from now; None keeps it until it is deleted."""
        expires = None if seconds is None else time.time() + seconds
        saved = replace(self.find(place), expires_at=expires)
        manifest = self._folder(place) / _MANIFEST
        draft = manifest.with_suffix(".draft")
        draft.write_text(json.dumps(asdict(saved)))
        draft.replace(manifest)
        return saved

    def delete(self, place: Place) -> None:
        """Delete it; raises ServiceError (404) if there is none."""
        self.find(place)
        shutil.rmtree(self._folder(place))

    def sweep(self, *, unlisted: bool = False) -> None:
        """Delete expired checkpoints, and with `unlisted` those that no session can know."""
        for saved in list(self._all(None)):
            if _expired(saved) or (unlisted and not saved.listed):
                shutil.rmtree(self._folder(saved.place), ignore_errors=True)

    def _all(self, model_id: str | None) -> Iterator[Saved]:
        """All manifests, without those that are deleted while this runs."""
        model = "*" if model_id is None else _model_folder(model_id)
        # Unlike Path.glob, this one passes over folders that are deleted meanwhile.
        for path in glob.iglob(f"{model}/*/*/{_MANIFEST}", root_dir=self.folder):
            with suppress(FileNotFoundError):
                yield _read(self.folder / path)

    def _folder(self, place: Place) -> Path:
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
