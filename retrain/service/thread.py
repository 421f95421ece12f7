"""The trainers' thread: the base model and all trainers belong to it, and calls run in order.

Over several processes, it is rank 0 of a team. If a process is lost, or a call makes no progress
for too long, the thread has failed: all later calls raise ServiceError (503), and the service
should end.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

import torch
from transformers import PreTrainedModel

from retrain.engine.models import load_model
from retrain.engine.ranks.group import OutOfStepError
from retrain.errors import AdapterError
from retrain.service.errors import ServiceError
from retrain.service.state import Settings
from retrain.service.team import Team, Work, work_of
from retrain.service.trainable import ShardedBase, Tuning, untied
from retrain.service.trainer import Trainer

START_SECONDS = 600.0
"""The least time that the processes have to start and load the base model."""
LEAVE_SECONDS = 5.0
"""How long the current call may take to notice that a process was lost."""
T = TypeVar("T")


class TrainerThread:
    """Belongs to one event loop; `failed` is called there, once, if the thread fails."""

    plain: PreTrainedModel
    """The base model without tied weights, whole: samplers and merged weights are made from it."""
    tied: bool
    """Whether the model's output layer is its embedding."""
    work: Work
    size: int
    """Bytes of its weights."""

    def __init__(self, settings: Settings, failed: Callable[[AdapterError], None]) -> None:
        self._settings, self._failed = settings, failed
        self._executor = ThreadPoolExecutor(1, thread_name_prefix="retrain-trainer")
        self._team = Team(settings.processes, self._fail)
        self._base: PreTrainedModel | ShardedBase
        self._failure: AdapterError | None = None
        self._since: float | None = None  # when the current call began
        self._seconds = max(START_SECONDS, settings.rank_timeout)  # until the base model is loaded
        self._watch: asyncio.Task[None] | None = None
        self._ending: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Load the base model; raises ConfigError, or AdapterError if a process is lost."""
        try:
            self.work = await self.run(self._prepare)
            await self._team.start(self.work)
            if self._settings.processes > 1:
                self._watch = asyncio.create_task(self._limit(), name="service ranks")
            await self.run(self._load)
            self._seconds = self._settings.rank_timeout
        except ServiceError:
            assert self._failure is not None
            raise self._failure from None

    async def run(self, call: Callable[[], T]) -> T:
        """`call()` after all that was enqueued before; raises ServiceError if a process is lost."""
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._executor, partial(self._call, call))
        except OutOfStepError as error:
            if self._failure is None:
                self._fail(await self._team.loss() or error)
            raise self._gone() from error

    def submit(self, call: Callable[[], None]) -> None:
        """Enqueue `call` and don't wait; its ServiceError is dropped."""

        def suppressed() -> None:
            with suppress(ServiceError, OutOfStepError):  # the next call reports it
                self._call(call)

        with suppress(RuntimeError):  # the service has ended
            self._executor.submit(suppressed)

    def trainer(self, tuning: Tuning) -> Trainer:
        """A new trainer of the base model; call it in the thread."""
        return Trainer(self._base, tuning, self._team.ranks)

    async def close(self) -> None:
        """End the thread and the processes; waits for the current call unless it has failed."""
        if self._failure is None:
            with suppress(ServiceError):
                await self.run(self._team.stop)
        if self._watch is not None:
            self._watch.cancel()
        if self._ending is not None:
            await self._ending
            with suppress(TimeoutError):  # on CUDA, the current call may never return
                async with asyncio.timeout(LEAVE_SECONDS):
                    await asyncio.wrap_future(self._executor.submit(self._team.ranks.leave))
        await self._team.end(at_once=self._failure is not None)
        self._executor.shutdown(wait=self._failure is None, cancel_futures=True)

    def _prepare(self) -> Work:
        torch.set_num_threads(self._settings.threads)
        return work_of(self._settings)

    def _load(self) -> None:
        work = self.work
        self._team.meet(work, self._check)
        self._base = work.base(self._team.ranks)
        whole = self._base
        if isinstance(whole, ShardedBase):
            whole = load_model(work.folder, "cpu").requires_grad_(False)
        self.tied = bool(whole.config.tie_word_embeddings)
        self.plain = untied(whole)
        self.size = sum(p.numel() * p.element_size() for p in self.plain.parameters())

    def _call(self, call: Callable[[], T]) -> T:
        self._check()
        self._since = time.monotonic()
        try:
            return call()
        finally:
            self._since = None

    def _check(self) -> None:
        if self._failure is not None:
            raise self._gone()

    def _gone(self) -> ServiceError:
        return ServiceError(503, f"the service is ending: {self._failure}")

    def _fail(self, error: AdapterError) -> None:
        if self._failure is not None:
            return
        self._failure = error
        self._ending = asyncio.create_task(self._team.end(at_once=True))  # wakes a blocked call
        self._failed(error)

    async def _limit(self) -> None:
        """Fail if a call makes no progress: a process that hangs breaks no connection."""
        while True:
            limit = self._seconds
            await asyncio.sleep(min(1.0, self._settings.rank_timeout / 4))
            since = self._since
            if since is not None and time.monotonic() - max(since, self._team.ranks.met) > limit:
                self._fail(
                    AdapterError(
                        f"the {self._settings.processes} processes made no progress for {limit:g} "
                        "s: one of them hangs, or --rank-timeout is too short for a micro-batch"
                    )
                )
