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
import logging
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar, cast

from torch import Tensor

from retrain.engine.models import load_tokenizer
from retrain.engine.sampler import LocalSampler
from retrain.sampler import Tokenizer
from retrain.service.errors import ServiceError, conflict, diverged, invalid, missing
from retrain.service.fields import all_finite
from retrain.service.jobs import Jobs, Lane
from retrain.service.memory import check_memory, give_back, has_room
from retrain.service.passes import Passed, TargetRow
from retrain.service.samplers import SamplerPool
from retrain.service.sampling import SampleFindings, SampleRequest
from retrain.service.snapshots import Snapshots
from retrain.service.state import (
    Model,
    RequestLimits,
    SamplerSession,
    ServiceSession,
    ServiceSettings,
)
from retrain.service.store import CheckpointPlace, CheckpointStore, Saved
from retrain.service.thread import EngineThread
from retrain.service.trainer import Trainer
from retrain.wire.training import AdamParams

if TYPE_CHECKING:
    from retrain.service.fleet import FleetPool
    from retrain.service.fleet_sampler import FleetSampler

T = TypeVar("T")
log = logging.getLogger(__name__)


class Service:
    """An async context manager: entering loads the base model, leaving ends all threads."""

    limits: RequestLimits
    store: CheckpointStore

    def __init__(self, settings: ServiceSettings) -> None:
        self.settings = settings
        self.jobs = Jobs()
        self.sessions: dict[str, ServiceSession] = {}
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, SamplerSession] = {}
        self._engine = EngineThread(settings)

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:  # at the end, each is closed even if another fails
            self.store = CheckpointStore(self.settings.folder).open()
            stack.callback(self.store.close)
            self.store.sweep(unlisted=True)
            stack.push_async_callback(self._engine.close)
            await self._engine.run(self._engine.load)
            self._read_model()
            stack.push_async_callback(asyncio.to_thread, self.store.sweep)
            self._pool = await self._open_pool(stack)
            stack.push_async_callback(self.jobs.close)
            sweeper = asyncio.create_task(self._sweep(), name="service sweeper")
            stack.push_async_callback(asyncio.wait, [sweeper])
            stack.callback(sweeper.cancel)
            self._resources = stack.pop_all()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._resources.aclose()

    # Sessions

    def create_session(self) -> ServiceSession:
        session = ServiceSession(str(uuid.uuid4()), self.lane(), time.monotonic())
        self.sessions[session.id] = session
        return session

    def session(self, session_id: str) -> ServiceSession:
        """Find a session and keep it alive; raises ServiceError: 404, or 410 if it is over."""
        if session_id not in self.sessions:
            raise missing(f"session {session_id}")
        session = self.sessions[session_id]
        if session.finished:
            raise ServiceError(410, f"session {session_id} has ended")
        session.seen = time.monotonic()
        return session

    async def finish(self, session: ServiceSession) -> None:
        """End a session: drop its models and sampling sessions, keep checkpoints."""
        session.finished = True
        for model in [one for one in self.models.values() if one.session is session]:
            self.drop_model(model)
        await self.drop_samplers([one for one in self.samplers.values() if one.session is session])
        self.jobs.forget(session)
        self._engine.submit(give_back)

    # Models

    def lane(self) -> Lane:
        return Lane(self.jobs, self.settings.gap_timeout)

    async def build_model(
        self, model: Model, source: tuple[CheckpointPlace, bool] | None = None
    ) -> None:
        """Give a model fresh weights, or those of `source`: (checkpoint, with optimizer)."""

        def build() -> None:
            check_memory(self._engine.base, model.tuning, len(self.models))
            trainer = Trainer(self._engine.base, model.tuning)
            if source is not None:
                self._restore(trainer, *source)
            model.trainer = trainer

        with ExitStack() as failed:
            failed.callback(self.drop_model, model)
            await self._engine.run(build)
            failed.pop_all()

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
        model.lane.close()
        self.models.pop(model.id, None)
        self._engine.submit(partial(setattr, model, "trainer", None))

    async def retire(self, model: Model) -> None:
        """Drop a model once all requests before this one are done."""
        await self._engine.run(lambda: None)
        self.drop_model(model)

    async def run_pass(
        self,
        model: Model,
        rows: Sequence[TargetRow],
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
        place: CheckpointPlace,
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

    async def load(self, model: Model, place: CheckpointPlace, *, optimizer: bool) -> None:
        """Continue `model` from a checkpoint, with or without the optimizer's state."""
        await self.on_trainer(model, lambda trainer: self._restore(trainer, place, optimizer))

    async def on_trainer(self, model: Model, run: Callable[[Trainer], T]) -> T:
        """Call `run` in the trainers' thread; raises ServiceError if the model was never built."""

        def call() -> T:
            if model.trainer is None:
                raise conflict(f"model {model.id} could not be built, or has ended")
            return run(model.trainer)

        return await self._engine.run(call)

    # Sampling

    def open_sampler(
        self,
        session: ServiceSession,
        sampler_id: str,
        place: CheckpointPlace | None,
        path: str | None = None,
    ) -> SamplerSession:
        """The sampling session of this id; made of a snapshot or the base model if it is new.

        Raises ServiceError: 404 if there is no such snapshot, 409 if the id has other weights.
        """
        if sampler_id not in self.samplers:
            if place is not None:
                self.check_base(self.store.find(place).base_model)
            made = SamplerSession(sampler_id, session, self.lane(), place, path)
            self.samplers[sampler_id] = made
        elif self.samplers[sampler_id].place != place:
            raise conflict(f"sampling session {sampler_id} already exists for other weights")
        return self.samplers[sampler_id]

    def sampler(self, sampler_id: str) -> SamplerSession:
        """Find a sampling session and keep its session alive; raises ServiceError (404)."""
        if sampler_id not in self.samplers:
            raise missing(f"sampling session {sampler_id}")
        found = self.samplers[sampler_id]
        found.session.seen = time.monotonic()
        return found

    async def drop_samplers(self, samplers: Sequence[SamplerSession]) -> None:
        """Forget sampling sessions at once, then delete those of their snapshots without a name."""

        def delete(places: Sequence[CheckpointPlace]) -> None:
            for place in places:
                with suppress(ServiceError):
                    if not self.store.find(place).listed:
                        self.store.delete(place)

        for sampler in samplers:
            self.samplers.pop(sampler.id, None)
        needed = {one.place for one in self.samplers.values()}
        await self._pool.forget({one.place for one in samplers} - needed)
        await asyncio.to_thread(delete, [one.place for one in samplers if one.place])

    async def sample(self, sampler: SamplerSession, request: SampleRequest) -> SampleFindings:
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
        found = SampleFindings(drawn, prompt_logprobs, alternatives)
        if not all_finite(lp for completion, _ in drawn for lp in completion.logprobs):
            raise diverged()
        return found

    async def logprobs(self, sampler: SamplerSession, tokens: list[int]) -> list[float | None]:
        """The log-prob of each token given those before it; None for the first."""
        async with self._serving(sampler) as one:
            return _scores(await one.logprobs(tokens), 1)

    def check_base(self, name: str) -> None:
        """Raise ServiceError unless `name` is the base model."""
        plain = name.split(":")[0]
        if plain not in (self.settings.model, self.model_folder, Path(self.settings.model).name):
            raise invalid(f"base model {name!r} is not served, expected {self.settings.model!r}")

    async def checkpoint(self, place: CheckpointPlace, *, optimizer: bool) -> Saved:
        """The manifest; raises ServiceError if a model can't be loaded from the checkpoint."""
        saved = await asyncio.to_thread(self.store.find, place)
        self.check_base(saved.base_model)
        if optimizer and not saved.optimizer:
            raise invalid(f"{place.name} has weights only; load it without the optimizer")
        return saved

    def _read_model(self) -> None:
        self.model_folder = self._engine.folder
        self.tokenizer = cast(Tokenizer, load_tokenizer(self.model_folder))
        base, ours = self._engine.base, self.settings
        self.limits = RequestLimits(
            int(base.config.vocab_size),
            base.context,
            *(ours.max_values, ours.max_samples, ours.max_top),
        )

    # In the trainers' thread

    def _restore(self, trainer: Trainer, place: CheckpointPlace, optimizer: bool) -> None:
        trainer.load(*self.store.load(place, optimizer=optimizer))

    @asynccontextmanager
    async def _serving(self, sampler: SamplerSession) -> AsyncIterator[LocalSampler | FleetSampler]:
        sampler.used = time.monotonic()
        async with self._pool.use(sampler.place) as serving:
            try:
                yield serving
            except ValueError as error:
                raise invalid(str(error)) from None

    # In other threads

    async def _open_pool(
        self, stack: AsyncExitStack
    ) -> SamplerPool[CheckpointPlace | None, LocalSampler] | FleetPool:
        """What serves snapshots until `stack` is closed."""
        settings, base = self.settings, self._engine.base
        snapshots = Snapshots(base, self.store)
        if settings.vllm is not None:
            from retrain.service.fleet import open_fleet

            fleet = await stack.enter_async_context(
                open_fleet(settings.vllm, settings, self.model_folder, self.tokenizer, snapshots)
            )
            self.limits = replace(self.limits, context=fleet.context_length)
            return fleet
        pool: SamplerPool[CheckpointPlace | None, LocalSampler] = SamplerPool(
            lambda: LocalSampler(base.untied, self.tokenizer, threads=settings.threads),
            snapshots.merged,
            settings.max_live_samplers,
            partial(has_room, base),
        )
        stack.push_async_callback(pool.close)
        return pool

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


def _scores(logprobs: Sequence[float], first: int) -> list[float | None]:
    """None before position `first`."""
    if not all_finite(logprobs):
        raise diverged()
    return [None] * first + [*logprobs[first:]]
