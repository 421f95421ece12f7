"""The Weaver backend: trains batches and publishes weights by `WeaverClient`.

For a loss that the service lacks, dL/dlogp is sent as the weights of the loss `surrogate`.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import Any

from retrain.adapters.base import AdapterState
from retrain.adapters.remote.adapter import LossKeys, RemoteAdapter, grad_norm
from retrain.adapters.remote.datums import Shifted, chunks
from retrain.adapters.weaver.client import WeaverClient
from retrain.adapters.weaver.model import WeaverModel
from retrain.adapters.weaver.options import WeaverOptions
from retrain.adapters.weaver.sampling import WeaverSession
from retrain.adapters.weaver.wire import TrainingRow
from retrain.types import Metrics
from retrain.wire.training import AdamParams


class WeaverAdapter(RemoteAdapter):
    """Trains `config.model` on a Weaver service."""

    options: WeaverOptions
    _client: WeaverClient
    _model: WeaverModel

    async def forget(self, state: AdapterState) -> None:
        """Delete the checkpoint on the service; no error if it no longer exists."""
        await self._model.expire(str(state.data["path"]), str(state.data["model_id"]))

    async def _open(self, stack: AsyncExitStack) -> None:
        deadlines = self.config.deadlines
        client = WeaverClient(
            self.options.service_url,
            api_key="" if self.local else None,
            http=self._http,
            deadline=max(
                deadlines.sample, deadlines.update, deadlines.publish, deadlines.checkpoint
            ),
            resend=self.options.resend or self.local,
            metadata={"run": self.config.name} if self.config.name else None,
        )
        self._client = await stack.enter_async_context(client)
        self._model = await self._create()

    async def _create(self, *, throwaway: bool = False) -> WeaverModel:
        return await self._client.create_model(
            self.base_model,
            training_mode="lora" if throwaway else self.options.training_mode,
            lora=self._lora(),
        )

    async def _drop(self, model: WeaverModel) -> None:
        await self._client.terminate(model)

    async def _served_context(self) -> int | None:
        """The number in the model's name, `NAME:262144`."""
        suffix = self.base_model.rpartition(":")[2]
        return int(suffix) if suffix.isdigit() else None

    async def _snapshot(self, version: int) -> WeaverSession:
        name = f"version_{version:06d}_{uuid.uuid4().hex[:8]}"
        exporting = await self._model.save_for_sampler(name, ttl_seconds=self.options.sampler_ttl)
        path = await exporting.result()
        session = await self._client.sampling_session(path=path, model=self._model)
        session.after = partial(self._model.expire, path)
        return session

    async def _save(self, name: str) -> Mapping[str, Any]:  # JSON values
        path = await self._model.save_state(name)
        return {"path": path, "model_id": self._model.id}

    async def _restore(self, path: str) -> None:
        await self._model.load_state(path)

    async def _native(
        self, loss: str, config: LossKeys, datums: Sequence[Shifted], adam: AdamParams
    ) -> tuple[list[list[float]] | None, Metrics]:
        return await self._step_of(loss, datums, adam)

    async def _forward(self, datums: Sequence[Shifted]) -> list[list[float]]:
        looks = [
            await self._model.forward(list(map(_target, part)))
            for part in self._requests(datums, None)
        ]
        return [row for look in looks for row in await look.result()]

    async def _backward(self, datums: Sequence[Shifted], adam: AdamParams) -> Metrics:
        return (await self._step_of("surrogate", datums, adam))[1]

    async def _step_of(
        self, loss: str, datums: Sequence[Shifted], adam: AdamParams
    ) -> tuple[list[list[float]], Metrics]:
        """Log-probs and metrics of one step; optim_step is submitted before the passes end."""
        passes = [
            await self._model.forward_backward([_row(loss, datum) for datum in part], loss)
            for part in self._requests(datums, loss)
        ]
        stepping = await self._model.optim_step(adam)
        logprobs = [row for one in passes for row in await one.result()]
        return logprobs, grad_norm(await stepping.result())

    def _requests(self, datums: Sequence[Shifted], loss: str | None) -> list[list[Shifted]]:
        most = self.options.request_tokens, self._most_rows
        return chunks(datums, lambda datum: len(datum.inputs), *most)


def _row(loss: str, datum: Shifted) -> TrainingRow:
    """The row of a loss that the service computes; `surrogate` is minimised."""
    if loss == "surrogate":
        return _target(datum, surrogate_weights=[-weight for weight in datum.advantages])
    if loss == "cross_entropy":
        return _target(datum, weights=datum.advantages)
    return _target(
        datum, logprobs=datum.logprobs, advantages=datum.advantages, loss_mask=datum.mask
    )


def _target(datum: Shifted, **inputs: Sequence[float]) -> TrainingRow:
    return TrainingRow(datum.inputs, {"target_tokens": datum.targets, **inputs})
