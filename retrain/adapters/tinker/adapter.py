"""The Tinker backend: trains batches and publishes weights by `TinkerClient`.

For a loss that the service lacks, dL/dlogp is sent as cross_entropy with the weights -dL/dlogp.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from retrain.adapters.base import AdapterState
from retrain.adapters.remote.adapter import LossKeys, RemoteAdapter, grad_norm
from retrain.adapters.remote.datums import Shifted
from retrain.adapters.tinker.client import TinkerClient
from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.tinker.sampling import ServedWeights
from retrain.adapters.tinker.training import TrainingClient
from retrain.errors import AdapterError, NonFiniteError
from retrain.losses import clip_bounds, settings
from retrain.types import Metrics
from retrain.wire.tinker import values as wire
from retrain.wire.training import AdamParams


class TinkerAdapter(RemoteAdapter):
    """Trains `config.model` on a service that speaks Tinker's protocol."""

    options: TinkerOptions
    _client: TinkerClient
    _model: TrainingClient

    async def forget(self, state: AdapterState) -> None:
        """Delete the checkpoint on the service; no error if it no longer exists."""
        await self._client.delete(str(state.data["path"]))

    async def _open(self, stack: AsyncExitStack) -> None:
        deadlines = self.config.deadlines
        client = TinkerClient(
            self.options.service_url,
            api_key="" if self.local else None,
            wire=self.options.wire,
            tags=[*self.options.tags, *filter(None, [self.config.name])],
            project=self.options.project,
            result_timeout=max(deadlines.sample, deadlines.update, deadlines.publish),
            http=self._http,
        )
        self._client = await stack.enter_async_context(client)
        self._model = await self._create()

    async def _create(self, *, throwaway: bool = False) -> TrainingClient:
        return await self._client.create_model(
            self.base_model, self._lora(), timeout=self.config.deadlines.publish
        )

    async def _drop(self, model: TrainingClient) -> None:
        await self._client.unload(model)

    async def _served_context(self) -> int | None:
        return (await self._client.context_lengths()).get(self.base_model)

    async def _snapshot(self, version: int) -> ServedWeights:
        deadlines = self.config.deadlines
        sampler = await self._client.sampler_of(self._model, timeout=deadlines.publish)
        return ServedWeights(sampler, self.tokenizer, deadlines.sample, self._client.delete)

    async def _save(self, name: str) -> Mapping[str, Any]:  # JSON values
        saving = await self._model.save_weights(name, ttl_seconds=self.options.checkpoint_ttl)
        return {"path": await saving.result(self.config.deadlines.checkpoint)}

    async def _restore(self, path: str) -> None:
        """Services load only into a new model, so the present one is dropped."""
        self._model = await self._client.load_model(path, timeout=self.config.deadlines.checkpoint)

    async def _native(
        self, loss: str, config: LossKeys, datums: Sequence[Shifted], adam: AdamParams
    ) -> tuple[list[list[float]] | None, Metrics]:
        rows = [row(loss, datum) for datum in datums]
        output, stepped = await self._step_of(loss, loss_config(loss, config), rows, adam)
        complete = has_logprobs(output)
        metrics = {**service_metrics(output, needed=not complete), **stepped}
        return output.logprobs if complete else None, metrics

    async def _forward(self, datums: Sequence[Shifted]) -> list[list[float]]:
        looking = await self._model.forward([weighted(datum, datum.mask) for datum in datums])
        output = await looking.result(self.config.deadlines.update)
        if not has_logprobs(output):
            raise AdapterError(
                "the service returns no log-probs, which a loss that is computed here needs; only "
                f"{', '.join(sorted(self.options.native_losses))} can be trained"
            )
        return output.logprobs

    async def _backward(self, datums: Sequence[Shifted], adam: AdamParams) -> Metrics:
        rows = [weighted(datum, datum.advantages) for datum in datums]
        return (await self._step_of("cross_entropy", {}, rows, adam))[1]

    def _requests(self, datums: Sequence[Shifted], loss: str | None) -> Sequence[Sequence[Shifted]]:
        return self._model.requests(datums, lambda one: row(loss or "cross_entropy", one).size)

    async def _step_of(
        self, loss: str, config: wire.LossConfig, rows: Sequence[wire.Datum], adam: AdamParams
    ) -> tuple[wire.ForwardBackwardOutput, Metrics]:
        """The output and the metrics of one step; optim_step is submitted before the pass ends."""
        limit = self.config.deadlines.update
        passing = await self._model.forward_backward(rows, loss, config, most_rows=self._most_rows)
        stepping = await self._model.optim_step(adam)
        return await passing.result(limit), grad_norm(await stepping.result(limit))


def row(loss: str, datum: Shifted) -> wire.Datum:
    """The datum of a loss that the service computes; zero advantages take the place of a mask."""
    if loss == "cross_entropy":
        return weighted(datum, datum.advantages)
    inputs = {
        "target_tokens": wire.Tensor(datum.targets, "int64"),
        "logprobs": wire.Tensor(datum.logprobs),
        "advantages": wire.Tensor(datum.advantages),
    }
    return wire.Datum(datum.inputs, inputs)


def weighted(datum: Shifted, weights: Sequence[float]) -> wire.Datum:
    inputs = {
        "target_tokens": wire.Tensor(datum.targets, "int64"),
        "weights": wire.Tensor(weights),
    }
    return wire.Datum(datum.inputs, inputs)


def loss_config(loss: str, config: LossKeys) -> dict[str, float | str]:
    """The loss's settings in the protocol's keys: clip bounds are ratios, not distances from 1."""
    keys = settings(loss, config)
    bounds = clip_bounds(keys)
    if bounds is None:
        return dict(keys)
    return {"clip_low_threshold": bounds[0], "clip_high_threshold": bounds[1]}


def service_metrics(output: wire.ForwardBackwardOutput, *, needed: bool = False) -> Metrics:
    """The service's metrics under `service/`; with `needed`, its loss as the step's loss too."""
    named = {f"service/{name}": value for name, value in output.metrics.items()}
    if not needed:
        return named
    loss = output.metrics.get("loss:sum", output.metrics.get("loss", math.nan))
    if not math.isfinite(loss):
        raise NonFiniteError(f"the service returned no log-probs, and the loss {loss}")
    return {**named, "loss": loss}


def has_logprobs(output: wire.ForwardBackwardOutput) -> bool:
    return all("logprobs" in one for one in output.outputs)
