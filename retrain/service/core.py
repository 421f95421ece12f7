"""The training service without a protocol: sessions, models, sampling sessions, checkpoints.

- One base model; every model in training is made of it. Whatever touches a trainer runs in one
  thread, in the order in which it was enqueued; the event loop only enqueues.
- A job enqueues its part for that thread before it awaits anything, so that jobs which were started
  in order run in order.
- A session that is silent for `session_ttl` seconds is over, and its models leave the memory;
  checkpoints stay. Snapshots that only a sampling session knows go with the session.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractAsyncContextManager, suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar, cast

import torch
from torch import Tensor

from retrain.engine.models import choose_device, load_model, load_tokenizer, resolve_model
from retrain.engine.sampler import LocalSampler
from retrain.protocols.training import AdamParams
from retrain.sampler import SamplingParams, Tokenizer
from retrain.service.errors import ServiceError, conflict, invalid, missing
from retrain.service.jobs import Jobs, Lane
from retrain.service.samplers import SamplerPool
from retrain.service.state import Model, SamplingSession, Session, Settings
from retrain.service.store import Place, Saved, Store
from retrain.service.trainer import Passed, Row, Trainer, Tuning, merged_weights, untied
from retrain.service.validation import Limits
from retrain.types import Completion

T = TypeVar("T")
log = logging.getLogger(__name__)


class Service:
    """An async context manager: entering loads the base model, leaving frees all threads."""

    limits: Limits
    store: Store

    def __init__(self, settings: Settings | None = None) -> None:
        self.settings = settings or Settings()
        self.jobs = Jobs()
        self.sessions: dict[str, Session] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, SamplingSession] = {}
        self._engine = ThreadPoolExecutor(1, thread_name_prefix="retrain-trainer")
        self._temporary: tempfile.TemporaryDirectory[str] | None = None
        self._sweeper: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        settings = self.settings
        folder = settings.folder
        if folder is None:
            self._temporary = tempfile.TemporaryDirectory(prefix="retrain-service-")
            folder = Path(self._temporary.name)
        try:
            self.store = Store(folder)
            self.store.sweep(unlisted=True)
            await self.on_engine(self._load)
        except BaseException:
            self._free()
            raise
        self._pool = SamplerPool(self._make_sampler, settings.max_live_samplers)
        self._sweeper = asyncio.create_task(self._sweep(), name="service sweeper")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._sweeper is not None:
            self._sweeper.cancel()
            await asyncio.wait([self._sweeper])
        for model in self.models.values():
            model.lane.close()
        await self.jobs.close()
        await self._pool.close()
        await asyncio.to_thread(self.store.sweep)
        await asyncio.to_thread(self._free)

    def _free(self) -> None:
        self._engine.shutdown(cancel_futures=True)
        if self._temporary is not None:
            self._temporary.cleanup()

    # Sessions

    def create_session(self) -> Session:
        session = Session(str(uuid.uuid4()), self._lane(), time.monotonic())
        self.sessions[session.id] = session
        return session

    def session(self, session_id: str) -> Session:
        """Marks it as alive; raises ServiceError: 404, or 410 when it's over."""
        if session_id not in self.sessions:
            raise missing(f"the session {session_id}")
        session = self.sessions[session_id]
        if session.finished:
            raise ServiceError(410, "gone", f"the session {session_id} is over")
        session.seen = time.monotonic()
        return session

    def finish(self, session: Session) -> None:
        """End it: its models and sampling sessions are dropped, checkpoints stay."""
        session.finished = True
        for owned in list(session.owned.values()):
            if isinstance(owned, Model):
                self.drop_model(owned)
            else:
                self.drop_sampler(owned)

    # Models

    def add_model(
        self, session: Session, model_id: str, tuning: Tuning, metadata: Mapping[str, Any]
    ) -> Model:
        """A model that can be addressed at once; what is asked of it waits for `build_model`."""
        model = Model(model_id, session, self._lane(), tuning, metadata)
        self.models[model_id] = session.owned[model_id] = model
        return model

    async def build_model(self, model: Model, source: tuple[Place, bool] | None = None) -> None:
        """Give it weights: fresh ones, or of `source`, a checkpoint (with its optimizer?)."""

        def build() -> None:
            trainer = Trainer(self._base, model.tuning)
            if source is not None:
                self._restore(trainer, *source)
            model.trainer = trainer

        try:
            await self.on_engine(build)
        except BaseException:
            self.drop_model(model)
            raise

    def model(self, model_id: str) -> Model:
        """Marks its session as alive; raises ServiceError (404)."""
        if model_id not in self.models:
            raise ServiceError(
                404,
                "not_found",
                f"the model {model_id} is not on this service. A service that was restarted has "
                "its checkpoints and no models: make one from a checkpoint",
            )
        model = self.models[model_id]
        model.session.seen = time.monotonic()
        return model

    def drop_model(self, model: Model) -> None:
        """Forget it; what was enqueued before still runs."""
        model.lane.close()
        self.models.pop(model.id, None)
        model.session.owned.pop(model.id, None)

    async def run_pass(
        self,
        model: Model,
        rows: Sequence[Row],
        loss: str,
        config: Mapping[str, float],
        *,
        backward: bool,
    ) -> Passed:
        """The targets' log-probs and the loss; with `backward` its gradients are kept."""

        def call(trainer: Trainer) -> Passed:
            run = trainer.forward_backward if backward else trainer.forward
            return run(rows, loss, config)

        return await self.on_trainer(model, call)

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
        """Write the model's present state; `seconds` is how long it's kept, None for ever."""

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
            expires_at=None if seconds is None else time.time() + seconds,
            listed=listed,
            metadata=metadata or {},
        )
        return await asyncio.to_thread(self.store.save, saved, weights, state, overwrite=overwrite)

    async def load(self, model: Model, place: Place, *, optimizer: bool) -> None:
        """Continue `model` from a checkpoint, with or without the optimizer's state."""
        await self.on_trainer(model, lambda trainer: self._restore(trainer, place, optimizer))

    async def on_trainer(self, model: Model, run: Callable[[Trainer], T]) -> T:
        """`run` in the trainers' thread; raises ServiceError when the model was never built."""

        def call() -> T:
            if model.trainer is None:
                raise conflict(f"the model {model.id} could not be made")
            return run(model.trainer)

        return await self.on_engine(call)

    async def on_engine(self, run: Callable[[], T]) -> T:
        """`run` in the trainers' thread, after all that was enqueued before."""
        return await asyncio.get_running_loop().run_in_executor(self._engine, run)

    # Sampling

    def create_sampler(
        self, session: Session, sampler_id: str, place: Place | None, path: str | None = None
    ) -> SamplingSession:
        """A session that samples a snapshot; raises ServiceError (404) when there is none."""
        if place is not None:
            self.check_saved(self.store.find(place))
        made = SamplingSession(sampler_id, session, self._lane(), place, path)
        self.samplers[sampler_id] = session.owned[sampler_id] = made
        return made

    def sampler(self, sampler_id: str) -> SamplingSession:
        """Marks its session as alive; raises ServiceError (404)."""
        if sampler_id not in self.samplers:
            raise missing(f"the sampling session {sampler_id}")
        found = self.samplers[sampler_id]
        found.session.seen = time.monotonic()
        return found

    def drop_sampler(self, sampler: SamplingSession) -> None:
        """Forget it, and its snapshot if nothing else names that."""
        self.samplers.pop(sampler.id, None)
        sampler.session.owned.pop(sampler.id, None)
        if sampler.place is not None:
            with suppress(ServiceError):
                if not self.store.find(sampler.place).listed:
                    self.store.delete(sampler.place)

    async def sample(
        self, sampler: SamplingSession, prompt: list[int], params: SamplingParams, n: int
    ) -> list[Completion]:
        """`n` completions; raises ServiceError on a prompt or params that can't be served."""
        async with self._serving(sampler) as one:
            try:
                return await one.sample(prompt, params, n)
            except ValueError as error:
                raise invalid(str(error)) from None

    async def logprobs(self, sampler: SamplingSession, tokens: list[int]) -> list[float | None]:
        """The log-prob of each token given those before it; the first has none."""
        async with self._serving(sampler) as one:
            try:
                found = await one.logprobs(tokens)
            except ValueError as error:
                raise invalid(str(error)) from None
        return [None, *found[1:]]

    def check_base(self, name: str) -> None:
        """Raises ServiceError unless `name` is the base model that is served."""
        plain = name.split(":")[0]
        if plain not in (self.settings.model, self.model_folder, Path(self.settings.model).name):
            raise invalid(f"the base model {name!r} is not served: this is {self.settings.model!r}")

    def check_saved(self, saved: Saved, *, optimizer: bool = False) -> None:
        """Raises ServiceError unless the checkpoint is of our base model, and has what is asked."""
        self.check_base(saved.base_model)
        if optimizer and not saved.optimizer:
            raise invalid(f"{saved.place.name} holds weights alone: load it without the optimizer")

    # In the trainers' thread

    def _load(self) -> None:
        torch.set_num_threads(self.settings.threads)
        self.model_folder = resolve_model(self.settings.model, Path())
        device = self.settings.device or choose_device()
        self._base = load_model(self.model_folder, device).requires_grad_(False)
        self._plain = untied(self._base)
        self.tokenizer = cast(Tokenizer, load_tokenizer(self.model_folder))
        config = self._base.config.get_text_config()
        context = getattr(config, "max_position_embeddings", None)
        self.limits = Limits(int(config.vocab_size), context)

    def _restore(self, trainer: Trainer, place: Place, optimizer: bool) -> None:
        state = self.store.optimizer(place) if optimizer else None
        trainer.load(self.store.weights(place), state)

    def _serving(self, sampler: SamplingSession) -> AbstractAsyncContextManager[LocalSampler]:
        sampler.used = time.monotonic()
        place = sampler.place
        key = "" if place is None else "/".join(place)
        return self._pool.use(key, lambda: self._weights(place))

    # In other threads

    def _make_sampler(self) -> LocalSampler:
        settings = self.settings
        return LocalSampler(
            self._plain, self.tokenizer, max_rows=settings.max_rows, threads=settings.threads
        )

    def _weights(self, place: Place | None) -> dict[str, Tensor]:
        if place is None:
            return merged_weights(self._plain, {}, rank=1)
        saved = self.store.find(place)
        return merged_weights(self._plain, self.store.weights(place), saved.tuning.rank)

    def _lane(self) -> Lane:
        return Lane(self.jobs, self.settings.gap_timeout)

    async def _sweep(self) -> None:
        """Now and then, end what has fallen silent and delete what has expired."""
        while True:
            await asyncio.sleep(min(60.0, self.settings.session_ttl / 4))
            for session in list(self.sessions.values()):
                if time.monotonic() - session.seen <= self.settings.session_ttl:
                    continue
                if session.finished:
                    del self.sessions[session.id]
                else:
                    log.warning("the session %s fell silent: its models are dropped", session.id)
                    self.finish(session)
            self.drop_unused()
            try:
                await asyncio.to_thread(self.store.sweep)
            except OSError as error:
                log.warning("expired checkpoints could not be deleted: %s", error)

    def drop_unused(self) -> None:
        """Drop snapshots that their sessions alone know, but for each model's newest, once nobody
        has sampled them for `snapshot_ttl`: Tinker's clients have no way to say that they are done.
        """
        unnamed = [one for one in self.samplers.values() if one.place and one.path is None]
        newest = {one.place.model_id: one for one in unnamed if one.place}
        for sampler in unnamed:
            idle = time.monotonic() - sampler.used > self.settings.snapshot_ttl
            if idle and sampler not in newest.values():
                self.drop_sampler(sampler)
