"""The trainers' thread: the base model and all trainers belong to it, and calls run in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

import torch

from retrain.engine.models import choose_device, load_model, resolve_model
from retrain.errors import ConfigError
from retrain.service.state import ServiceSettings
from retrain.service.tuning import BaseModel

T = TypeVar("T")


class EngineThread:
    """Owns the base model and all trainers; run `load` before anything else."""

    base: BaseModel
    folder: str
    """Of the base model, or its Hugging Face id."""

    def __init__(self, settings: ServiceSettings) -> None:
        self._settings = settings
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="retrain-trainer")

    async def run(self, call: Callable[[], T]) -> T:
        """`call()` after all that was enqueued before."""
        return await asyncio.get_running_loop().run_in_executor(self._executor, call)

    def submit(self, call: Callable[[], None]) -> None:
        """Enqueue `call` and don't wait."""
        with suppress(RuntimeError):  # the service has ended
            self._executor.submit(call)

    async def close(self) -> None:
        """End the thread after the current call."""
        await asyncio.to_thread(self._executor.shutdown, cancel_futures=True)

    def load(self) -> None:
        """Load the base model; raises ConfigError if it, or the device, is not available."""
        torch.set_num_threads(self._settings.threads)
        device = self._settings.device or choose_device()
        try:
            torch.empty(1, device=device)
        except (RuntimeError, AssertionError) as error:  # the latter in a build without CUDA
            reason = str(error).splitlines()[0]
            raise ConfigError(f"--device {device} is not available: {reason}; use cpu") from error
        self.folder = resolve_model(self._settings.model, Path())
        self.base = BaseModel(load_model(self.folder, device).requires_grad_(False))
