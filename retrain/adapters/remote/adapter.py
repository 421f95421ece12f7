"""The part of a remote backend that doesn't depend on its protocol.

- A batch is one optimizer step, however many requests carry it: gradients add up on the service.
- A native loss takes one pass. Any other loss takes another forward pass and is sent as dL/dlogp:
  the service then minimises sum(dL/dlogp x logp), which has the gradient of our loss.
- Before its first step, a loss is measured on a throw-away model (`probe`). An average that the
  service takes is undone in the advantages.
- The loss and the learner's drift are computed here, from the log-probs that the service returns,
  so they mean the same on every backend.
- `publish` swaps the sampler's session; samples in flight end on the weights they began with.

A subclass speaks one protocol: it has the client and the model.
"""

from __future__ import annotations

import asyncio
import copy
import logging
import sys
import uuid
from abc import abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from string import printable
from typing import TYPE_CHECKING, Any, Self, cast

import anyio

from retrain.adapters.base import Adapter, AdapterState
from retrain.adapters.losses import run_loss
from retrain.adapters.remote.datums import SUM, Average, Shifted, shift
from retrain.adapters.remote.local import bring, in_process, keep, local_model
from retrain.adapters.remote.options import RemoteOptions
from retrain.adapters.remote.probe import Train, place_of
from retrain.adapters.remote.published import (
    PublishedSampler,
    ServingSession,
    logprobs_of,
    on_the_service,
)
from retrain.adapters.remote.schedule import learning_rate
from retrain.adapters.remote.surrogate import valued
from retrain.algorithms.batching import as_shared
from retrain.config import RunConfig
from retrain.engine.models import load_tokenizer
from retrain.errors import AdapterError, CheckpointError, ConfigError
from retrain.losses import row_of, shared_name
from retrain.sampler import Tokenizer
from retrain.types import Batch, Metrics
from retrain.wire.refusals import RemoteError
from retrain.wire.training import AdamParams, LoraConfig

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

LossKeys = Mapping[str, Any]  # a loss's own keys

CLEAN_UP = 10.0
"""Seconds that freeing a throw-away model may take."""
UNLIMITED = 10**8
"""Tokens; a tokenizer's limit above it means that there is none."""


class RemoteAdapter(Adapter):
    """Trains `config.model` on a service."""

    options: RemoteOptions
    """May be replaced between steps: each step reads it again."""
    sampler: PublishedSampler
    _client: Any  # the protocol's session
    _model: Any  # its model in training
    _most_rows = sys.maxsize
    """Rows of a training request; the service's own limits come on top."""

    def __init__(
        self,
        options: RemoteOptions,
        config: RunConfig,
        *,
        http: httpx.AsyncClient | httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`http` is an httpx client or transport to send requests with; see `HttpClient`."""
        self.options = options
        self.config = config
        self.capabilities = options.capabilities()
        self.exact = self.local  # that service computes in float32
        self._http = http
        self._version = 0
        self._step = 0
        self._saved: str | None = None
        self._reference: Any = None  # a session that samples the untrained model
        self._places: dict[str, tuple[bool, Average]] = {}

    async def __aenter__(self) -> Self:
        """Open a session, create the model, and serve its first weights as version 0.

        Raises ConfigError when the tokenizer can't be loaded or the context's length is unknown,
        RemoteError when the service refuses, AdapterError when it can't train the run's loss.
        """
        async with AsyncExitStack() as stack:
            if self.local and self._http is None:
                self._http = await stack.enter_async_context(in_process(self.config))
            await self._open(stack)
            self.tokenizer = await asyncio.to_thread(self._load_tokenizer)
            self.context_length = await self._context_length()
            await self._place(shared_name(run_loss(self.config)))
            self.sampler = PublishedSampler(self.tokenizer, self.context_length)
            stack.push_async_callback(self.sampler.close)
            await self._serve(0)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def update(self, batch: Batch) -> Metrics:
        """One optimizer step; raises NonFiniteError when the loss is NaN or infinite.

        `grad_norm` is reported if the service reports it.
        """
        batch = as_shared(batch, self.config.sampling.max_tokens)
        datums = [datum for datum in map(shift, batch.samples) if any(datum.mask)]
        if not datums:
            raise AdapterError("the batch has no token to train on")
        rate = self._adam().learning_rate
        native, average = await self._place(batch.loss)
        with on_the_service():
            metrics = await (self._theirs if native else self._ours)(batch, datums, average)
        self._step += 1
        return {**metrics, "learning_rate": rate}

    async def publish(self) -> int:
        with on_the_service():
            await self._serve(self._version + 1)
        return self._version

    def pinned(self) -> AbstractContextManager[PublishedSampler]:
        return self.sampler.pinned()

    async def save(self, folder: Path) -> AdapterState:
        """Save a checkpoint on the service; only the local service writes into `folder` too."""
        with on_the_service():
            saved = await self._save(f"step_{self._step:06d}_{uuid.uuid4().hex[:8]}")
        self._saved = str(saved["path"])
        if self.local:
            await keep(self.config, self._saved, folder)
        return AdapterState(folder, {**saved, "step": self._step, "version": self._version})

    async def load(self, state: AdapterState) -> None:
        """Continue from `state`; raises CheckpointError when the service no longer has it."""
        path = str(state.data["path"])
        if self.local:
            await bring(self.config, state.folder)
        try:
            await self._restore(path)
        except RemoteError as error:
            if error.status != 404:
                raise
            raise CheckpointError(
                f"the service has no checkpoint {path}: {error}. Choose another checkpoint, or "
                "start a new run."
            ) from error
        self._saved = path
        self._step = int(state.data["step"])
        await self._serve(int(state.data["version"]))

    async def export(self, folder: Path) -> str | None:
        """The service's path of the last checkpoint; the weights stay there."""
        return self._saved

    async def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """The reference is the untrained model, which every run here starts from."""
        if not reference:
            return await logprobs_of(self.sampler.compute_logprobs, sequences)
        if self._reference is None:
            self._reference = await self._client.sampling_session(base_model=self.base_model)
        return await logprobs_of(self._reference.compute_logprobs, sequences)

    async def own_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """By a forward pass of the model in training."""
        datums = []
        for row in sequences:
            zeros = [0.0] * (len(row) - 1)
            datums.append(Shifted(row[:-1], row[1:], [1.0] * len(zeros), zeros, zeros))
        with on_the_service():
            return [[0.0, *row] for row in await self._forward(datums)]

    def stop_retrying(self) -> None:
        self._client.stop_retrying()

    # Implemented by each protocol

    @abstractmethod
    async def _open(self, stack: AsyncExitStack) -> None:
        """Enter a client on the stack, and create the model."""

    @abstractmethod
    async def _create(self, *, throwaway: bool = False) -> Any:
        """A new model on the service; a throw-away one may be smaller than the run's own."""

    @abstractmethod
    async def _drop(self, model: Any) -> None:
        """Free a model on the service."""

    @abstractmethod
    async def _served_context(self) -> int | None:
        """The model's context length on the service; None if the service doesn't report it."""

    @abstractmethod
    async def _snapshot(self, version: int) -> ServingSession:
        """A session that samples the present weights; later steps don't change them."""

    @abstractmethod
    async def _save(self, name: str) -> Mapping[str, Any]:  # JSON values
        """Save weights and optimizer; returns the `path` and other data that `forget` needs."""

    @abstractmethod
    async def _restore(self, path: str) -> None:
        """Continue from saved weights and optimizer; RemoteError 404 if they no longer exist."""

    @abstractmethod
    async def _native(
        self, loss: str, config: LossKeys, datums: Sequence[Shifted], adam: AdamParams
    ) -> tuple[list[list[float]] | None, Metrics]:
        """One step of a native loss; optim_step is submitted before the pass ends.

        Returns the learner's log-probs (None if the service omits them) and the service's metrics.
        """

    @abstractmethod
    async def _forward(self, datums: Sequence[Shifted]) -> list[list[float]]:
        """The learner's log-prob of each target; raises AdapterError if the service omits them."""

    @abstractmethod
    async def _backward(self, datums: Sequence[Shifted], adam: AdamParams) -> Metrics:
        """One step up the gradient of sum(advantages x logprobs); returns the service's metrics."""

    @abstractmethod
    def _requests(self, datums: Sequence[Shifted], loss: str | None) -> Sequence[Sequence[Shifted]]:
        """The datums by the requests of a step, of a native loss or of `_backward` (None)."""

    # One optimizer step

    async def _place(self, loss: str) -> tuple[bool, Average]:
        """Whether the service computes `loss`, and the average to undo; measured once per loss."""
        # With `mismatch`, the learner's log-probs weigh the tokens.
        native = loss in self.options.native_losses and self.config.algorithm.mismatch is None
        if self.options.sums:
            return native, SUM
        if loss not in self._places:
            unlikely = sorted(set(self.tokenizer.encode(printable)), reverse=True)
            seconds = self.config.deadlines.update
            self._places[loss] = await place_of(
                loss, self._throwaway, unlikely, seconds, native=native
            )
        return self._places[loss]

    def _undone(
        self, average: Average, datums: Sequence[Shifted], loss: str | None
    ) -> Sequence[Shifted]:
        """The datums to send, so that the service trains their sum."""
        return datums if average == SUM else average.undone(self._requests(datums, loss))

    async def _theirs(self, batch: Batch, datums: Sequence[Shifted], average: Average) -> Metrics:
        """The service computes the loss."""
        sent = self._undone(average, datums, batch.loss)
        try:
            logprobs, metrics = await self._native(
                batch.loss, batch.loss_config, sent, self._adam()
            )
        except RemoteError as error:
            raise _with_way_out(error, batch.loss) from error
        if logprobs is None:
            return metrics
        trained = await valued(batch, logprobs, datums, self.config)
        return {**metrics, **trained.metrics, "loss": trained.loss}

    async def _ours(self, batch: Batch, datums: Sequence[Shifted], average: Average) -> Metrics:
        """The loss is computed here, between a forward pass and the backward pass of dL/dlogp."""
        if row_of(batch.loss).reads == "pairs":
            datums = await self._with_reference(datums)
        learner = await self._forward(datums)
        trained = await valued(batch, learner, datums, self.config)
        slopes = zip(datums, trained.gradients, strict=True)
        downhill = [replace(one, advantages=[-slope for slope in own]) for one, own in slopes]
        metrics = await self._backward(self._undone(average, downhill, None), self._adam())
        return {**metrics, **trained.metrics, "loss": trained.loss}

    async def _with_reference(self, datums: Sequence[Shifted]) -> Sequence[Shifted]:
        """The datums with log-probs under the untrained model added, unless all have them."""
        if all("reference_logprobs" in datum.streams for datum in datums):
            return datums
        sequences = [[*datum.inputs, datum.targets[-1]] for datum in datums]
        scored = await self.logprobs(sequences, reference=True)
        return [
            replace(datum, streams={"reference_logprobs": logprobs[1:], **datum.streams})
            for datum, logprobs in zip(datums, scored, strict=True)
        ]

    @asynccontextmanager
    async def _throwaway(self, loss: str | None) -> AsyncIterator[Train]:
        """A model of its own, which is freed in the end, also when the block is cancelled."""
        other = copy.copy(self)
        other._model = await self._create(throwaway=True)

        async def train(
            look: Shifted, rows: Sequence[Shifted], adam: AdamParams, apart: bool
        ) -> Sequence[float]:
            other._most_rows = 1 if apart else sys.maxsize
            if rows and loss is not None:
                await other._native(loss, {}, rows, adam)
            elif rows:
                await other._backward(rows, adam)
            [logprobs] = await other._forward([look])
            return logprobs

        try:
            yield train
        finally:
            with anyio.move_on_after(CLEAN_UP, shield=True):
                try:
                    await self._drop(other._model)
                except AdapterError as error:
                    log.debug("a model could not be freed: %s", error)

    def _adam(self) -> AdamParams:
        """AdamW's settings of the next step."""
        options = self.options
        rate = learning_rate(
            self._step,
            peak=options.learning_rate,
            schedule=options.lr_scheduler,
            warmup_steps=options.warmup_steps,
            total_steps=self.config.train.total_train_steps,
        )
        return AdamParams(
            rate,
            options.beta1,
            options.beta2,
            options.eps,
            options.weight_decay,
            options.max_grad_norm,
        )

    # Start-up

    @property
    def local(self) -> bool:
        """Whether the service runs inside this process."""
        return self.options.url == "local"

    @property
    def base_model(self) -> str:
        """The model's name on the service."""
        own = local_model(self.config) if self.local else self.config.model
        return self.options.base_model or own

    def _lora(self) -> LoraConfig:
        wanted = self.options.lora
        seed = self.config.train.seed if wanted.seed is None else wanted.seed
        return wanted.model_copy(update={"seed": seed})

    def _load_tokenizer(self) -> Tokenizer:
        """That of the options, or else the model's: a folder or a Hugging Face id, which may be
        part of a longer name (`org/model/variant`, `org/model:262144`)."""
        name = self.options.tokenizer or local_model(self.config)
        if not self.options.tokenizer and not Path(name).is_dir():
            name = "/".join(name.partition(":")[0].split("/")[:2])
        return cast(Tokenizer, load_tokenizer(name))

    async def _context_length(self) -> int:
        known = self.options.context_length or await self._served_context()
        found = known or getattr(self.tokenizer, "model_max_length", None)
        if not found or found > UNLIMITED:
            raise ConfigError(
                "backend.context_length is not set, and neither the service nor the tokenizer "
                f"reports the context length of {self.base_model!r}. Set it."
            )
        return int(found)

    async def _serve(self, version: int) -> None:
        """Let the sampler serve the present weights as `version`."""
        self.sampler.swap(await self._snapshot(version), version)
        self._version = version


def _with_way_out(error: RemoteError, loss: str) -> RemoteError:
    """The error, with advice if the service may lack the loss."""
    if error.status not in (400, 422, 501) and error.code != "job_failed":
        return error
    if "loss" not in str(error) and loss not in str(error):
        return error
    return RemoteError(
        f"{error.args[0]}. If the service lacks the loss {loss}, remove {loss} from "
        "backend.native_losses: it is then computed here",
        status=error.status,
        code=error.code,
        request_id=error.request_id,
    )


def grad_norm(stepped: Mapping[str, float]) -> Metrics:
    """The gradient's norm from the service's metrics, under any of its names."""
    for name, value in stepped.items():
        if name.partition(":")[0].rpartition("/")[2] == "grad_norm":
            return {"grad_norm": value}
    return {}
