"""The Tinker backend: batches out, weights published, on top of `TinkerClient`.

- A batch is one optimizer step, however many requests carry it: gradients add up on the service.
- A native loss is one pass, with the optimizer step submitted behind it. Any other costs a forward
  pass more and goes back as cross_entropy with the weights -dL/dlogp: the service then minimises
  sum(dL/dlogp x logp), which has the gradient of our loss.
- The loss and how far the learner drifted are computed here, from the log-probs that the service
  returns, so that they mean the same on every backend.
- `publish` swaps the sampler's session; what is in flight ends on the weights it began with.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
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
from retrain.adapters.remote.transport import RemoteError
from retrain.adapters.tinker.client import DEFAULT_URL, TinkerClient
from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.tinker.rows import (
    grad_norm,
    has_logprobs,
    loss_config,
    own_metrics,
    row,
    service_metrics,
    weighted,
)
from retrain.adapters.tinker.sampling import SamplingClient
from retrain.adapters.tinker.serving import ServedWeights
from retrain.adapters.tinker.training import AdamParams, LoraConfig, plain_model_name
from retrain.batching import as_shared
from retrain.config import RunConfig
from retrain.engine.models import load_tokenizer
from retrain.errors import AdapterError, CheckpointError, ConfigError
from retrain.sampler import Tokenizer
from retrain.types import Batch, Metrics

if TYPE_CHECKING:
    import httpx

UNLIMITED = 10**8
"""Tokens; what a tokenizer says above it means that it doesn't know."""


class TinkerAdapter(Adapter):
    """Trains `config.model` on a service that speaks Tinker's protocol."""

    sampler: PublishedSampler

    def __init__(
        self,
        options: TinkerOptions,
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
        self._reference: SamplingClient | None = None

    async def __aenter__(self) -> Self:
        """Open a session, create the model, and serve its first weights as version 0.

        Raises ConfigError when the tokenizer can't be loaded or the context's length is unknown,
        RemoteError when the service refuses.
        """
        async with AsyncExitStack() as stack:
            self._client = await stack.enter_async_context(await self._connect(stack))
            self._model = await self._client.create_model(
                self._base_model, self._lora(), timeout=self.config.deadlines.publish
            )
            self.tokenizer = cast(
                Tokenizer,
                load_tokenizer(self.options.tokenizer or plain_model_name(self.config.model)),
            )
            self.context_length = await self._context_length()
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
        """One optimizer step; raises NonFiniteError when the loss is NaN or infinite.

        `grad_norm` is reported where the service does.
        """
        batch = as_shared(batch, self.config.sampling.max_tokens)
        datums = [shift(sample) for sample in batch.samples if len(sample.token_ids) > 1]
        datums = [datum for datum in datums if datum.trained]
        if not datums:
            raise AdapterError("the batch has no token to train on")
        rate = self._adam().learning_rate
        train = self._native if batch.loss in self.options.native_losses else self._surrogate
        metrics, stepped = await train(batch, datums)
        self._step += 1
        return {**metrics, **grad_norm(stepped), "learning_rate": rate}

    async def publish(self) -> int:
        await self._serve(self._version + 1)
        return self._version

    async def save(self, folder: Path) -> AdapterState:
        """A checkpoint on the service; `folder` stays empty unless that is the local one."""
        name = f"step_{self._step:06d}_{uuid.uuid4().hex[:8]}"
        saving = await self._model.save_weights(name, ttl_seconds=self.options.checkpoint_ttl)
        path = await saving.result(self.config.deadlines.checkpoint)
        if self.options.url == "local":
            await keep(self.config, path, folder)
        data = {"path": path, "step": self._step, "version": self._version}
        return AdapterState(folder, data)

    async def load(self, state: AdapterState) -> None:
        """Continue from `state`; raises CheckpointError when the service has it no more.

        Services load only into a fresh model, so the one before is given up.
        """
        path = str(state.data["path"])
        if self.options.url == "local":
            await bring(self.config, state.folder)
        try:
            model = await self._client.load_model(path, timeout=self.config.deadlines.checkpoint)
        except RemoteError as error:
            if error.status != 404:
                raise
            raise CheckpointError(
                f"the service has no checkpoint {path} (any more): {error}; choose another "
                "checkpoint, or start a new run"
            ) from error
        self._model = model
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
        """Delete the checkpoint on the service; one that is gone already is well."""
        await self._client.delete(str(state.data["path"]))

    # Start-up

    async def _connect(self, stack: AsyncExitStack) -> TinkerClient:
        deadlines, local = self.config.deadlines, self.options.url == "local"
        transport = self._transport
        if local and transport is None:
            transport = await stack.enter_async_context(in_process(self.config))
        url = {"local": "http://local", "hosted": DEFAULT_URL}.get(self.options.url)
        return TinkerClient(
            url or self.options.url,
            api_key="" if local else None,
            wire=self.options.wire,
            tags=[*self.options.tags, *filter(None, [self.config.name])],
            project=self.options.project,
            result_timeout=max(deadlines.sample, deadlines.update, deadlines.publish),
            transport=transport,
        )

    def _lora(self) -> LoraConfig:
        wanted = self.options.lora
        seed = self.config.train.seed if wanted.seed is None else wanted.seed
        return LoraConfig(
            wanted.rank, seed, wanted.train_mlp, wanted.train_attn, wanted.train_unembed
        )

    async def _context_length(self) -> int:
        if self.options.context_length is not None:
            return self.options.context_length
        known = {m.name: m.context_length for m in await self._client.supported_models()}
        found = known.get(self._base_model) or getattr(self.tokenizer, "model_max_length", None)
        if not found or found > UNLIMITED:
            raise ConfigError(
                f"backend.context_length: neither the service nor the tokenizer says how many "
                f"tokens {self._base_model!r} takes: set it"
            )
        return int(found)

    async def _serve(self, version: int) -> None:
        """Let the sampler serve the present weights as `version`."""
        deadlines = self.config.deadlines
        sampler = await self._client.sampler_of(self._model, timeout=deadlines.publish)
        weights = ServedWeights(self._client, sampler, self.tokenizer, deadlines.sample)
        self.sampler.swap(weights, version)
        self._version = version

    # One optimizer step

    async def _native(
        self, batch: Batch, datums: Sequence[Datum]
    ) -> tuple[Metrics, Mapping[str, float]]:
        """The service computes the loss; its optimizer step is submitted before the pass ends."""
        rows = [row(batch.loss, datum) for datum in datums]
        passing = await self._model.forward_backward(rows, batch.loss, loss_config(batch))
        stepping = await self._model.optim_step(self._adam())
        limit = self.config.deadlines.update
        output, stepped = await passing.result(limit), await stepping.result(limit)
        if not has_logprobs(output):
            return service_metrics(output, needed=True), stepped
        trained = await valued(batch, output.logprobs, datums, self.config)
        return {**service_metrics(output), **own_metrics(trained)}, stepped

    async def _surrogate(
        self, batch: Batch, datums: Sequence[Datum]
    ) -> tuple[Metrics, Mapping[str, float]]:
        """The loss is computed here, between a forward pass and the backward pass of dL/dlogp."""
        if batch.loss == "dpo":
            datums = await self._with_reference(datums)
        limit = self.config.deadlines.update
        looking = await self._model.forward([weighted(datum, datum.mask) for datum in datums])
        learner = await looking.result(limit)
        if not has_logprobs(learner):
            raise AdapterError(
                f"the service returns no log-probs, so the loss {batch.loss} can't be computed "
                f"here: choose one of {', '.join(sorted(self.options.native_losses))}"
            )
        trained = await valued(batch, learner.logprobs, datums, self.config)
        rows = [
            weighted(datum, [-slope for slope in slopes])
            for datum, slopes in zip(datums, trained.gradients, strict=True)
        ]
        passing = await self._model.forward_backward(rows, "cross_entropy")
        stepping = await self._model.optim_step(self._adam())
        await passing.result(limit)
        return own_metrics(trained), await stepping.result(limit)

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

    def _adam(self) -> AdamParams:
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
