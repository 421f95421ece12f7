"""The training service without a protocol: sessions, models, sampling sessions, checkpoints.

- There is one base model, and every model in training is made from it. All work on trainers runs in
  one thread, in the order in which it was enqueued; the event loop only enqueues.
- A job enqueues its part for that thread before it awaits anything, so that jobs run in the order
  in which they were started.
- A session without requests for `session_ttl` seconds is over: its models leave the memory,
  checkpoints stay. An unnamed snapshot is deleted with its session.
"""

from __future__ import annotations

import asyncio
import copy
import ctypes
import gc
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from retrain.engine.available import ram
from retrain.engine.models import load_tokenizer
from retrain.engine.sampler import LocalSampler
from retrain.engine.weights import LoraWeights
from retrain.errors import AdapterError
from retrain.protocols.training import AdamParams
from retrain.sampler import Tokenizer
from retrain.service.errors import ServiceError, conflict, invalid, missing
from retrain.service.jobs import Jobs, Lane
from retrain.service.passes import Passed, Row
from retrain.service.samplers import SamplerPool
from retrain.service.sampling import Sampled, SampleRequest
from retrain.service.served import ServedSampler, lora_weights
from retrain.service.state import Limits, Model, SamplingSession, Session, Settings
from retrain.service.store import Place, Saved, Store
from retrain.service.thread import TrainerThread
from retrain.service.trainable import LORA_ALPHA, Tuning, merged_weights
from retrain.service.trainer import Trainer
from retrain.service.values import all_finite
from retrain.service.vllm import Snapshots, VllmPool, open_pool

T = TypeVar("T")
log = logging.getLogger(__name__)


class Service:
    """An async context manager: entering loads the base model, leaving ends all threads."""

    limits: Limits
    store: Store

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.jobs = Jobs()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self._engine = TrainerThread(settings, self._fail)
        self._sweeper: asyncio.Task[None] | None = None
        self._last_words: asyncio.Task[None] | None = None
        self.failure: AdapterError | None = None
        """Why the service must end."""
        self.failed = asyncio.Event()

    async def __aenter__(self) -> Self:
        settings = self.settings
        self.store = Store(settings.folder).open()
        try:
            self.store.sweep(unlisted=True)
            await self._engine.start()
            self._read_model()
            self._pool = await self._open_pool()
        except BaseException:
            await self._engine.close()
            self.store.close()
            raise
        self._sweeper = asyncio.create_task(self._sweep(), name="service sweeper")
        return self

    async def __aexit__(self, *_: object) -> None:
        async with AsyncExitStack() as stack:  # each ends, even if another fails
            stack.callback(self.store.close)
            stack.push_async_callback(self._engine.close)
            stack.push_async_callback(asyncio.to_thread, self.store.sweep)
            stack.push_async_callback(self._pool.close)
            stack.push_async_callback(self.jobs.close)
            for model in self.models.values():
                model.lane.close()
            if self._sweeper is not None:
                self._sweeper.cancel()
                await asyncio.wait([self._sweeper])

    # Sessions

    def create_session(self) -> Session:
        session = Session(str(uuid.uuid4()), self._lane(), time.monotonic())
        self.sessions[session.id] = session
        return session

    def session(self, session_id: str) -> Session:
        """Find a session and keep it alive; raises ServiceError: 404, or 410 if it is over."""
        if session_id not in self.sessions:
            raise missing(f"session {session_id}")
        session = self.sessions[session_id]
        if session.finished:
            raise ServiceError(410, f"session {session_id} has ended")
        session.seen = time.monotonic()
        return session

    async def finish(self, session: Session) -> None:
        """End a session: drop its models and sampling sessions, keep checkpoints."""
        session.finished = True
        for model in [one for one in self.models.values() if one.session is session]:
            self.drop_model(model)
        await self.drop_samplers([one for one in self.samplers.values() if one.session is session])
        self.jobs.forget(session)
        self._engine.submit(give_back)

    # Models

    def new_model(
        self, session: Session, model_id: str, tuning: Tuning, metadata: Mapping[str, Any]
    ) -> Model:
        """A model that is not in `models` yet; its requests wait for `build_model`."""
        return Model(model_id, session, self._lane(), tuning, metadata)

    async def build_model(self, model: Model, source: tuple[Place, bool] | None = None) -> None:
        """Give a model fresh weights, or those of `source`: (checkpoint, with optimizer)."""

        def build() -> None:
            self._check_memory(model.tuning)
            trainer = self._engine.trainer(model.tuning)
            try:
                if source is not None:
                    self._restore(trainer, *source)
            except BaseException:
                trainer.close()
                raise
            model.trainer = trainer

        try:
            await self.on_engine(build)
        except BaseException:
            self.drop_model(model)
            raise

    def model(self, model_id: str) -> Model:
        """Find a model and keep its session alive; raises ServiceError (404)."""
        if model_id not in self.models:
            raise ServiceError(
                404,
                f"model {model_id} is not on this service. A restarted service keeps its "
                "checkpoints but not its models: create a model from a checkpoint",
            )
        model = self.models[model_id]
        model.session.seen = time.monotonic()
        return model

    def drop_model(self, model: Model) -> None:
        """Forget a model; jobs that were enqueued before still run."""

        def close() -> None:
            trainer, model.trainer = model.trainer, None
            if trainer is not None:
                trainer.close()

        model.lane.close()
        self.models.pop(model.id, None)
        self._engine.submit(close)

    async def retire(self, model: Model) -> None:
        """Drop a model once all requests before this one are done."""
        await self.on_engine(lambda: None)
        self.drop_model(model)

    async def run_pass(
        self,
        model: Model,
        rows: Sequence[Row],
        loss: str,
        config: Mapping[str, float],
        *,
        backward: bool,
    ) -> Passed:
        """Log-probs of the targets and the loss; `backward` also accumulates gradients."""

        run = Trainer.forward_backward if backward else Trainer.forward
        return await self.on_trainer(model, lambda trainer: run(trainer, rows, loss, config))

    async def optim_step(self, model: Model, adam: AdamParams) -> dict[str, float]:
        return await self.on_trainer(model, lambda trainer: trainer.optim_step(adam))

    async def save(
        self,
        model: Model,
        place: Place,
        *,
        optimizer: bool = False,
        seconds: float | None = None,
        overwrite: bool = False,
        listed: bool = True,
        metadata: Mapping[str, Any] | None = None,
    ) -> Saved:
        """Write the model's current state and keep it for `seconds`; None keeps it forever."""

        def copied(trainer: Trainer) -> tuple[dict[str, Tensor], dict[str, Any] | None, int]:
            state = trainer.optimizer_state() if optimizer else None
            return trainer.weights(), state, trainer.steps

        weights, state, steps = await self.on_trainer(model, copied)
        saved = Saved(
            place,
            self.settings.model,
            model.tuning,
            steps,
            optimizer,
            expires_at=None if seconds is None else self.store.now() + seconds,
            listed=listed,
            metadata=metadata or {},
        )
        return await asyncio.to_thread(self.store.save, saved, weights, state, overwrite=overwrite)

    async def load(self, model: Model, place: Place, *, optimizer: bool) -> None:
        """Continue `model` from a checkpoint, with or without the optimizer's state."""
        await self.on_trainer(model, lambda trainer: self._restore(trainer, place, optimizer))

    async def on_trainer(self, model: Model, run: Callable[[Trainer], T]) -> T:
        """Call `run` in the trainers' thread; raises ServiceError if the model was never built."""

        def call() -> T:
            if model.trainer is None:
                raise conflict(f"model {model.id} could not be built, or has ended")
            return run(model.trainer)

        return await self.on_engine(call)

    async def on_engine(self, run: Callable[[], T]) -> T:
        """Call `run` in the trainers' thread, after everything that was enqueued before."""
        return await self._engine.run(run)

    # Sampling

    def open_sampler(
        self, session: Session, sampler_id: str, place: Place | None, path: str | None = None
    ) -> SamplingSession:
        """The sampling session of this id; made of a snapshot or the base model if it is new.

        Raises ServiceError: 404 if there is no such snapshot, 409 if the id has other weights.
        """
        if sampler_id not in self.samplers:
            if place is not None:
                self.check_base(self.store.find(place).base_model)
            made = SamplingSession(sampler_id, session, self._lane(), place, path)
            self.samplers[sampler_id] = made
        elif self.samplers[sampler_id].place != place:
            raise conflict(f"sampling session {sampler_id} already exists for other weights")
        return self.samplers[sampler_id]

    def sampler(self, sampler_id: str) -> SamplingSession:
        """Find a sampling session and keep its session alive; raises ServiceError (404)."""
        if sampler_id not in self.samplers:
            raise missing(f"sampling session {sampler_id}")
        found = self.samplers[sampler_id]
        found.session.seen = time.monotonic()
        return found

    async def drop_samplers(self, samplers: Sequence[SamplingSession]) -> None:
        """Forget sampling sessions at once, then delete those of their snapshots without a name."""

        def delete(places: Sequence[Place]) -> None:
            for place in places:
                with suppress(ServiceError):
                    if not self.store.find(place).listed:
                        self.store.delete(place)

        for sampler in samplers:
            self.samplers.pop(sampler.id, None)
        needed = {one.place for one in self.samplers.values()}
        await self._pool.forget({one.place for one in samplers} - needed)
        await asyncio.to_thread(delete, [one.place for one in samplers if one.place])

    async def sample(self, sampler: SamplingSession, request: SampleRequest) -> Sampled:
        """Completions, and what the request asks of the prompt.

        Raises ServiceError for a prompt or params that can't be sampled.
        """
        prompt_logprobs = alternatives = None
        async with self._serving(sampler) as one:
            drawn = await one.sample_with_top(
                request.prompt, request.params, request.count, top=request.top, eos=request.eos
            )
            if request.score:
                prompt_logprobs = _scores(await one.logprobs(request.prompt), request.scored)
            if request.prompt_top or request.targets:
                alternatives = await one.alternatives(
                    request.prompt, top=request.prompt_top, given=request.targets
                )
        found = Sampled(drawn, prompt_logprobs, alternatives)
        if not all_finite(lp for completion, _ in drawn for lp in completion.logprobs):
            raise _diverged()
        return found

    async def logprobs(self, sampler: SamplingSession, tokens: list[int]) -> list[float | None]:
        """The log-prob of each token given those before it; None for the first."""
        async with self._serving(sampler) as one:
            return _scores(await one.logprobs(tokens), 1)

    def check_base(self, name: str) -> None:
        """Raise ServiceError unless `name` is the base model."""
        plain = name.split(":")[0]
        if plain not in (self.settings.model, self.model_folder, Path(self.settings.model).name):
            raise invalid(f"base model {name!r} is not served, expected {self.settings.model!r}")

    async def checkpoint(self, place: Place, *, optimizer: bool) -> Saved:
        """The manifest; raises ServiceError if a model can't be loaded from the checkpoint."""
        saved = await asyncio.to_thread(self.store.find, place)
        self.check_base(saved.base_model)
        if optimizer and not saved.optimizer:
            raise invalid(f"{place.name} has weights only; load it without the optimizer")
        return saved

    def _fail(self, error: AdapterError) -> None:
        """End all requests: the trainer has lost a process."""
        log.error("the service is ending: %s", error)
        self.failure = error
        self.failed.set()
        reason = ServiceError(503, f"the service is ending: {error}")
        self._last_words = asyncio.create_task(self.jobs.close(reason))

    def _read_model(self) -> None:
        self.model_folder = self._engine.work.folder
        self.tokenizer = cast(Tokenizer, load_tokenizer(self.model_folder))
        config = self._engine.plain.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        ours = self.settings
        self.limits = Limits(
            int(config.vocab_size), context, ours.max_values, ours.max_samples, ours.max_top
        )

    # In the trainers' thread

    def _restore(self, trainer: Trainer, place: Place, optimizer: bool) -> None:
        trainer.load(*self.store.load(place, optimizer=optimizer))

    @asynccontextmanager
    async def _serving(
        self, sampler: SamplingSession
    ) -> AsyncIterator[LocalSampler | ServedSampler]:
        sampler.used = time.monotonic()
        async with self._pool.use(sampler.place) as serving:
            try:
                yield serving
            except ValueError as error:
                raise invalid(str(error)) from None

    # In other threads

    async def _open_pool(self) -> SamplerPool[Place | None, LocalSampler] | VllmPool:
        settings = self.settings
        if settings.vllm is None:
            limit = settings.max_live_samplers
            return SamplerPool(self._make_sampler, self._weights, limit, self._room)
        snapshots = Snapshots(self._weights, self._rank, self._adapter)
        pool = await open_pool(settings.vllm, settings, self._engine, self.tokenizer, snapshots)
        self.limits = replace(self.limits, context=pool.context_length)
        return pool

    def _make_sampler(self) -> LocalSampler:
        plain, device = self._engine.plain, torch.device(self._engine.work.device)
        if plain.device.type != device.type:  # sharded weights are whole only on the CPU
            plain = copy.deepcopy(plain).to(device)  # type: ignore[arg-type]  # transformers' own
        return LocalSampler(plain, self.tokenizer, threads=self.settings.threads)

    def _check_memory(self, tuning: Tuning) -> None:
        """Raise ServiceError unless another model fits: a process that is killed loses them all."""
        copies = 1.0 if tuning.rank else 4.0  # activations; weights, gradients and moments
        need, free = copies * self._engine.size, free_memory(self._engine.plain.device)
        if free is not None and need > free:
            raise conflict(
                f"{free / 1e9:.1f} GB of memory are free, but another model needs about "
                f"{need / 1e9:.1f} GB beside the {len(self.models)} in training: end a session "
                "that is done, or try again later"
            )

    def _room(self) -> bool:
        """Whether another sampler fits, with as much again for its requests."""
        free = free_memory(self._engine.plain.device)
        return free is None or free > 2 * self._engine.size

    def _weights(self, place: Place | None) -> dict[str, Tensor]:
        if place is None:
            return merged_weights(self._engine.plain, {}, rank=1)
        saved = self.store.find(place)
        if self.settings.vllm and self._engine.tied and saved.tuning.rank and saved.tuning.unembed:
            raise invalid(
                "the vLLM servers can't serve this snapshot: its LoRA trains the output layer of a "
                "model with tied embeddings, so it must be an adapter, and its rank is above the "
                "servers' --max-lora-rank or they take no adapters; use a lower rank or "
                "train_unembed: false"
            )
        return merged_weights(self._engine.plain, self.store.weights(place), saved.tuning.rank)

    def _rank(self, place: Place) -> int:
        return self.store.find(place).tuning.rank

    def _adapter(self, place: Place) -> LoraWeights:
        return lora_weights(self.store.weights(place), self._rank(place), LORA_ALPHA)

    def _lane(self) -> Lane:
        return Lane(self.jobs, self.settings.gap_timeout)

    async def _sweep(self) -> None:
        """Periodically end inactive sessions and delete expired checkpoints."""
        while True:
            await asyncio.sleep(min(60.0, self.settings.session_ttl / 4))
            try:
                await self._end_inactive()
                await self.drop_unused()
                await asyncio.to_thread(self.store.sweep)
            except OSError as error:
                log.warning("checkpoints could not be deleted: %s", error)

    async def _end_inactive(self) -> None:
        for session in list(self.sessions.values()):
            if time.monotonic() - session.seen <= self.settings.session_ttl:
                continue
            if session.finished:
                del self.sessions[session.id]
            else:
                log.warning("session %s had no requests: its models are dropped", session.id)
                await self.finish(session)

    async def drop_unused(self) -> None:
        """Drop unnamed snapshots that were not sampled for `snapshot_ttl`.

        Each model's newest one stays. Tinker's clients can't say that they are done with one.
        """
        unnamed = [one for one in self.samplers.values() if one.place and one.path is None]
        newest = {one.place.model_id: one for one in unnamed if one.place}
        earliest = time.monotonic() - self.settings.snapshot_ttl
        old = [one for one in unnamed if one.used < earliest and one not in newest.values()]
        await self.drop_samplers(old)


def give_back() -> None:
    """Give the memory of models that have ended back to the system."""
    gc.collect()  # a model is full of cycles
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc
    if trim is not None:
        trim(0)


def free_memory(device: torch.device) -> int | None:
    """Bytes that are free on the device; None if that is unknown."""
    if device.type != "cuda":
        return ram()
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return torch.cuda.mem_get_info(device)[0] + cached


def _scores(logprobs: Sequence[float], first: int) -> list[float | None]:
    """None before position `first`."""
    if not all_finite(logprobs):
        raise _diverged()
    return [None] * first + [*logprobs[first:]]


def _diverged() -> ServiceError:
    return invalid("the model's log-probs are not finite: its weights have diverged")
