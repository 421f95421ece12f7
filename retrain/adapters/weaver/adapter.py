"""The Weaver backend: batches out, weights published, on top of `WeaverClient`.

- A batch is one optimizer step, however many requests carry it: gradients add up on the service.
- A native loss is one pass, with the optimizer step submitted behind it; any other costs a forward
  pass more and goes back as `surrogate`, whose weights are dL/dlogp (the service then trains
  sum(weights x logprobs), the gradient of our loss).
- The loss and how far the learner drifted are computed here, from the log-probs that the service
  returns, so that they mean the same on every backend.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Iterator, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

from retrain.adapters.base import Adapter, AdapterState
from retrain.adapters.remote.datums import Datum, shift
from retrain.adapters.remote.local import bring, in_process, keep, local_model
from retrain.adapters.remote.losses import valued
from retrain.adapters.remote.published import PublishedSampler, logprobs_of
from retrain.adapters.remote.schedule import learning_rate
from retrain.adapters.remote.surrogate import Surrogate
from retrain.adapters.remote.transport import RemoteError
from retrain.adapters.weaver.client import DEFAULT_URL, WeaverClient
from retrain.adapters.weaver.options import WeaverOptions
from retrain.adapters.weaver.sampling import SamplingSession
from retrain.adapters.weaver.wire import AdamParams, ForwardResult, LoraConfig, TrainingRow
from retrain.batching import as_shared
from retrain.config import RunConfig
from retrain.engine.models import load_tokenizer
from retrain.errors import AdapterError, CheckpointError, ConfigError
from retrain.sampler import Tokenizer
from retrain.types import Batch, Metrics

if TYPE_CHECKING:
    import httpx


class WeaverAdapter(Adapter):
    """Trains `config.model` on a Weaver service."""

    sampler: PublishedSampler

    def __init__(
        self,
        options: WeaverOptions,
        config: RunConfig,
        *,
        transport: httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """`transport` carries the requests in place of the network."""
        self.options = options
        self.config = config
        self.capabilities = options.capabilities()
        own_name = local_model(config) if options.url == "local" else config.model
        self._base_model = options.base_model or own_name
        self._transport = transport
        self._version = 0
        self._step = 0
        self._reference: SamplingSession | None = None

    async def __aenter__(self) -> Self:
        """Open a session, create the model, and serve its first weights as version 0.

        Raises ConfigError when the tokenizer can't be loaded, RemoteError when the service refuses.
        """
        async with AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(await self._connect(stack))
            self._model = await self._client.create_model(
                self._base_model,
                training_mode=self.options.training_mode,
                lora=self._lora(),
            )
            self.tokenizer = await asyncio.to_thread(self._load_tokenizer)
            self.context_length = self._context_length()
            self.sampler = PublishedSampler(self.tokenizer, self.context_length)
            stack.push_async_callback(self.sampler.close)
            await self._serve(0)
            self._stack = stack.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    async def update(self, batch: Batch) -> Metrics:
        """One optimizer step; raises NonFiniteError when the loss is NaN or infinite."""
        batch = as_shared(batch, self.config.sampling.max_tokens)
        datums = [shift(sample) for sample in batch.samples if len(sample.token_ids) > 1]
        datums = [datum for datum in datums if datum.trained]
        if not datums:
            raise AdapterError("the batch has no token to train on")
        if batch.loss in self.options.native_losses:
            trained, stepped = await self._native(batch, datums)
        else:
            trained, stepped = await self._surrogate(batch, datums)
        rate = self._learning_rate()
        self._step += 1
        return {**trained.metrics, "loss": trained.loss, "learning_rate": rate, **stepped}

    async def publish(self) -> int:
        await self._serve(self._version + 1)
        return self._version

    async def save(self, folder: Path) -> AdapterState:
        """A checkpoint on the service; `folder` stays empty unless that is the local one."""
        name = f"step_{self._step:06d}_{uuid.uuid4().hex[:8]}"
        saved = await self._model.save_state(name, optimizer=True)
        if self.options.url == "local":
            await keep(self.config, saved.path, folder)
        return AdapterState(
            folder,
            {
                "path": saved.path,
                "model_id": self._model.id,
                "step": self._step,
                "version": self._version,
            },
        )

    async def load(self, state: AdapterState) -> None:
        """Continue from `state`; raises CheckpointError when the service has it no more."""
        path = str(state.data["path"])
        if self.options.url == "local":
            await bring(self.config, state.folder)
        try:
            await self._model.load_state(path, optimizer=True)
        except RemoteError as error:
            if error.status != 404:
                raise
            raise CheckpointError(
                f"the service at {self.options.url} has no checkpoint {path} (any more): {error}; "
                "choose another checkpoint, or start a new run"
            ) from error
        self._step = int(state.data["step"])
        await self._serve(int(state.data["version"]))

    async def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """The reference is the untrained model, which is what every run here starts from."""
        if not reference:
            return await logprobs_of(self.sampler, sequences)
        if self._reference is None:
            self._reference = await self._client.sampling_session(base_model=self._base_model)
        return await logprobs_of(self._reference, sequences)

    async def forget(self, state: AdapterState) -> None:
        """Let the service drop the checkpoint; one that's gone already is well."""
        try:
            await self._model.expire(str(state.data["path"]), str(state.data["model_id"]))
        except RemoteError as error:
            if error.status != 404:
                raise

    async def _connect(self, stack: AsyncExitStack) -> WeaverClient:
        deadlines, local = self.config.deadlines, self.options.url == "local"
        transport = self._transport
        if local and transport is None:
            transport = await stack.enter_async_context(in_process(self.config))
        url = {"local": "http://local", "hosted": DEFAULT_URL}.get(self.options.url)
        return WeaverClient(
            url or self.options.url,
            api_key="" if local else None,
            transport=transport,
            deadline=max(
                deadlines.sample, deadlines.update, deadlines.publish, deadlines.checkpoint
            ),
            resend=self.options.resend or local,
            metadata={"run": self.config.name} if self.config.name else None,
        )

    def _lora(self) -> LoraConfig:
        wanted = self.options.lora
        seed = self.config.train.seed if wanted.seed is None else wanted.seed
        return LoraConfig(
            wanted.rank, seed, wanted.train_unembed, wanted.train_mlp, wanted.train_attn
        )

    def _load_tokenizer(self) -> Tokenizer:
        """The option's, or the model's: a folder beside the config, or a Hugging Face id."""
        name = self.options.tokenizer or local_model(self.config).partition(":")[0]
        return cast(Tokenizer, load_tokenizer(name))

    def _context_length(self) -> int:
        """The option's, or that of the model's name (`NAME:262144`), or the tokenizer's."""
        _, _, suffix = self._base_model.rpartition(":")
        known = self.options.context_length or (int(suffix) if suffix.isdigit() else None)
        found: int = known or int(getattr(self.tokenizer, "model_max_length", 10**9))
        if found > 10**8:  # transformers' way to say that it doesn't know
            raise ConfigError(
                f"backend.context_length: the tokenizer of {self.config.model!r} does not say how "
                "many tokens the model takes: set it"
            )
        return found

    async def _serve(self, version: int) -> None:
        """Let the sampler serve the present weights as `version`."""
        exported = await self._model.save_for_sampler(
            f"version_{version:06d}_{uuid.uuid4().hex[:8]}", ttl_seconds=self.options.sampler_ttl
        )
        session = await self._client.sampling_session(
            path=await exported.result(), model=self._model
        )
        self.sampler.swap(session, version)
        self._version = version

    # One optimizer step

    async def _native(self, batch: Batch, datums: Sequence[Datum]) -> tuple[Surrogate, Metrics]:
        """The service computes the loss; its optimizer step is submitted before the pass ends."""
        rows = [_row(batch.loss, datum) for datum in datums]
        passes = [
            await self._model.forward_backward(part, batch.loss) for part in self._requests(rows)
        ]
        stepping = await self._model.optim_step(self._adam())
        results = [await one.result() for one in passes]
        stepped = await stepping.result()
        return await valued(batch, _joined(results), datums, self.config), stepped

    async def _surrogate(self, batch: Batch, datums: Sequence[Datum]) -> tuple[Surrogate, Metrics]:
        """The loss is computed here, between a forward pass and the backward pass of dL/dlogp."""
        if batch.loss == "dpo":
            datums = await self._with_reference(datums)
        looks = [
            await self._model.forward(part) for part in self._requests(list(map(_target, datums)))
        ]
        learner = _joined([await look.result() for look in looks])
        trained = await valued(batch, learner, datums, self.config)
        rows = [
            _target(datum, surrogate_weights=slopes)
            for datum, slopes in zip(datums, trained.gradients, strict=True)
        ]
        passes = [
            await self._model.forward_backward(part, "surrogate") for part in self._requests(rows)
        ]
        stepping = await self._model.optim_step(self._adam())
        for one in passes:
            await one.result()
        return trained, await stepping.result()

    async def _with_reference(self, datums: Sequence[Datum]) -> Sequence[Datum]:
        """The datums with log-probs under the untrained model, unless all have them."""
        if all("reference_logprobs" in datum.streams for datum in datums):
            return datums
        sequences = [[*datum.inputs, datum.targets[-1]] for datum in datums]
        scored = await self.logprobs(sequences, reference=True)
        return [
            replace(datum, streams={"reference_logprobs": logprobs[1:], **datum.streams})
            for datum, logprobs in zip(datums, scored, strict=True)
        ]

    def _requests(self, rows: Sequence[TrainingRow]) -> Iterator[Sequence[TrainingRow]]:
        """Runs of rows with at most `request_tokens` tokens; a longer row goes alone."""
        start, tokens = 0, 0
        for index, row in enumerate(rows):
            if index > start and tokens + len(row.tokens) > self.options.request_tokens:
                yield rows[start:index]
                start, tokens = index, 0
            tokens += len(row.tokens)
        yield rows[start:]

    def _learning_rate(self) -> float:
        return learning_rate(
            self._step,
            peak=self.options.learning_rate,
            schedule=self.options.lr_scheduler,
            warmup_steps=self.options.warmup_steps,
            total_steps=self.config.train.total_train_steps,
        )

    def _adam(self) -> AdamParams:
        options = self.options
        return AdamParams(
            learning_rate=self._learning_rate(),
            beta1=options.beta1,
            beta2=options.beta2,
            eps=options.eps,
            weight_decay=options.weight_decay,
            grad_clip_norm=options.max_grad_norm,
        )


def _row(loss: str, datum: Datum) -> TrainingRow:
    """The row of a loss that the service computes."""
    if loss == "cross_entropy":
        return _target(datum, weights=datum.advantages)
    return _target(
        datum, logprobs=datum.logprobs, advantages=datum.advantages, loss_mask=datum.mask
    )


def _target(datum: Datum, **inputs: Sequence[float]) -> TrainingRow:
    return TrainingRow(datum.inputs, {"target_tokens": datum.targets, **inputs})


def _joined(results: Sequence[ForwardResult]) -> list[Sequence[float]]:
    return [row for result in results for row in result.logprobs]
