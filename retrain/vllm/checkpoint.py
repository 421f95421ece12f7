"""Weights as servers load them: names and shapes, and files of whole models and LoRA adapters.

vLLM loads files with gaps without complaint, so a `Manifest` says what must be there. A folder
is written under a temporary name, synced and renamed, so that a server never sees a part of it.
Files in memory (/dev/shm) outlive a killed process, so the next one removes them.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from retrain.engine.models import PROCESS_STATE
from retrain.engine.weights import LoraWeights, misfit, tied_names
from retrain.errors import AdapterError
from retrain.supervision.disk import sync
from retrain.supervision.locks import FolderLock, in_use
from retrain.supervision.threads import DaemonPool

MEMORY = Path("/dev/shm")
COPIES = 3
"""How many copies of the weights must fit into memory: two versions, and some room."""
SHARD_BYTES = 4 << 30
PREFIX = "retrain-weights-"


@dataclass(frozen=True)
class Manifest:
    """The weights of a model, without their values."""

    shapes: Mapping[str, tuple[int, ...]]
    tied: Mapping[str, str]  # as `tied_names`
    config: Mapping[str, Any]  # the content of config.json
    skeleton: Any  # a transformers model on the meta device

    @classmethod
    def of(cls, model: str) -> Self:
        """The manifest of a model's folder (or Hub id); builds the model without memory."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model)
        with PROCESS_STATE, torch.device("meta"):
            skeleton = AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
        shapes = {name: tuple(value.shape) for name, value in skeleton.state_dict().items()}
        return cls(shapes, tied_names(skeleton), config.to_dict(), skeleton)

    def complete(self, weights: Mapping[str, Tensor], *, heads: bool) -> dict[str, Tensor]:
        """The weights to send, under a checkpoint's names: a tied one once, or with `heads` under
        each of its names.

        Raises AdapterError if a weight is missing, unknown, or has another shape, or if tied
        weights differ (as after a LoRA on one of them) and the servers tie them.
        """
        from transformers.core_model_loading import revert_weight_conversion

        if found := misfit(weights, self.shapes, self.tied, untied=heads):
            raise AdapterError(
                f"the trained weights don't fit the servers' model ({found}). The servers must "
                "serve the `model` that is trained"
            )
        sent = {name: tensor for name, tensor in weights.items() if name not in self.tied}
        again = self.tied if heads else {}
        sent |= {name: weights.get(name, weights[original]) for name, original in again.items()}
        # Split what transformers fuses when it loads a model, such as the experts of a layer.
        return dict(revert_weight_conversion(self.skeleton, sent))


class WeightStore:
    """A private folder with the published versions; `folder` None is the memory or `scratch`.

    Its thread is a daemon, so that a disk that hangs does not keep the process alive.
    """

    def __init__(self, folder: Path | None, scratch: Path) -> None:
        self._given = folder
        self._scratch = scratch
        self._lock: FolderLock | None = None
        self._path: Path | None = None
        self._written = 0
        self._thread = DaemonPool(1, "retrain-publish")

    async def write(self, name: str, size: int, fill: Callable[[Path], None]) -> Path:
        """The new folder that `fill`, called in a thread, writes about `size` bytes to.

        Raises AdapterError if it can't be written.
        """
        return await self._thread.run(lambda: self._write(name, size, fill))

    async def drop(self, folder: Path) -> None:
        """Remove a version."""
        await self._thread.run(lambda: shutil.rmtree(folder, ignore_errors=True))

    def close(self) -> None:
        """Remove everything."""
        self._thread.close()
        if self._path is not None and self._lock is not None:
            shutil.rmtree(self._path, ignore_errors=True)
            self._lock.release()
            self._path = self._lock = None

    def _write(self, name: str, size: int, fill: Callable[[Path], None]) -> Path:
        self._written += 1
        try:
            home = self._home(size)
            draft = home / f"{name}-{self._written}.tmp"
            draft.mkdir()
            try:
                fill(draft)
                for path in (*draft.iterdir(), draft):
                    sync(path)
                done = draft.rename(draft.with_suffix(""))
            finally:
                shutil.rmtree(draft, ignore_errors=True)  # of an attempt that failed
            sync(home)
        except OSError as error:
            raise AdapterError(
                f"could not write the weights for the servers: {error}. Free some space, or set "
                "backend.sampler.folder to another folder"
            ) from error
        return done

    def _home(self, size: int) -> Path:
        if self._path is None:
            place = self._given or _roomy(size) or self._scratch
            _remove_abandoned(place)
            self._path = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
            self._path.chmod(0o755)  # a server may be another user's
            self._lock = FolderLock(self._path)
        return self._path


def _roomy(size: int) -> Path | None:
    with suppress(OSError):
        if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free >= COPIES * size:
            return MEMORY
    return None


def _remove_abandoned(place: Path) -> None:
    """Remove what killed processes left."""
    for folder in place.glob(f"{PREFIX}*"):
        with suppress(OSError):
            if not in_use(folder) and (folder / ".lock").exists():
                shutil.rmtree(folder, ignore_errors=True)


def write_adapter(folder: Path, weights: LoraWeights) -> None:
    """An adapter's folder, as PEFT saves it."""
    from safetensors.torch import save_file

    tensors = {name: _on_cpu(tensor, None) for name, tensor in weights.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    text = json.dumps(dict(weights.config), default=str)
    (folder / "adapter_config.json").write_text(text, encoding="utf-8")


def write_model(
    folder: Path,
    weights: Mapping[str, Tensor],
    config: Mapping[str, Any],
    *,
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """A model's folder: sharded safetensors and config.json; floats are converted to `dtype`.

    Each name gets its own copy, also of tied weights.
    """
    from safetensors.torch import save_file

    shards = list(parts(weights, shard_bytes, dtype))
    index: dict[str, str] = {}
    for number, names in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        tensors = {name: _on_cpu(weights[name], dtype).clone() for name in names}
        save_file(tensors, folder / file, metadata={"format": "pt"})
        index |= dict.fromkeys(names, file)
    total = sum(nbytes(tensor, dtype) for tensor in weights.values())
    listing = {"metadata": {"total_size": total}, "weight_map": index}
    (folder / "model.safetensors.index.json").write_text(json.dumps(listing), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(dict(config)), encoding="utf-8")


def parts(
    weights: Mapping[str, Tensor], limit: int, dtype: torch.dtype | None
) -> Iterator[list[str]]:
    """Names in order, in parts of at most `limit` bytes, or of one larger weight."""
    part: list[str] = []
    size = 0
    for name, tensor in weights.items():
        more = nbytes(tensor, dtype)
        if part and size + more > limit:
            yield part
            part, size = [], 0
        part.append(name)
        size += more
    if part:
        yield part


def nbytes(tensor: Tensor, dtype: torch.dtype | None) -> int:
    """Bytes of a weight once its type is `sent_type`."""
    return tensor.numel() * sent_type(tensor, dtype).itemsize


def sent_type(tensor: Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """`dtype` for floats, if it is given; the weight's own type otherwise."""
    return dtype if dtype is not None and tensor.is_floating_point() else tensor.dtype


def _on_cpu(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor.detach().to("cpu", sent_type(tensor, dtype)).contiguous()
