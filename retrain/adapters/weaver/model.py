"""A model in training: passes, optimizer steps, checkpoints.

- The service runs a model's calls in the order of their `seq_id`. An id is taken under a lock, for
  a complete and checked body, and calls are submitted one after another. Their results may be
  awaited later, so a pass and its optimizer step overlap (`_submit`).
- A rejected call returns its `seq_id`. A call that the service may have executed does not, and is
  sent again only to a service that recognises a repeated id (`WeaverConnection.resend`).
- Checkpoints have no `seq_id`: they wait until every earlier call is done (`_alone`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import asdict
from typing import Any, Literal, TypeVar

from retrain.adapters.weaver import wire
from retrain.adapters.weaver.connection import Operation, WeaverConnection
from retrain.wire.refusals import RemoteError, ignored
from retrain.wire.training import AdamParams

T = TypeVar("T")


class WeaverModel:
    """Made by `WeaverClient`. Every method raises RemoteError when the service refuses or fails."""

    def __init__(self, connection: WeaverConnection, id: str, *, base_model: str) -> None:
        self.id = id
        self.base_model = base_model
        self._connection = connection
        self._seq_id = 0
        self._order = asyncio.Lock()
        self._unsettled: list[Operation[Any]] = []

    # Training. A call returns once it is submitted; its Operation's `result()` waits for it.

    async def forward(self, rows: Sequence[wire.TrainingRow]) -> Operation[list[list[float]]]:
        """The log-probs of the targets, row by row, without gradients."""
        return await self._pass("forward", rows, "forward_logprob")

    async def forward_backward(
        self, rows: Sequence[wire.TrainingRow], loss_fn: str
    ) -> Operation[list[list[float]]]:
        """Log-probs, and gradients that accumulate until the next `optim_step`.

        Raises ValueError on NaN or infinity, before a seq_id is taken.
        """
        return await self._pass("forward_backward", rows, loss_fn)

    async def optim_step(self, adam: AdamParams) -> Operation[dict[str, float]]:
        """Apply the gradients and zero them; the result is the service's metrics."""
        payload = {"adam_params": asdict(adam)}
        return await self._train("optimizer-steps", payload, wire.metrics, what="optim_step")

    async def save_for_sampler(self, name: str, *, ttl_seconds: int = 3600) -> Operation[str]:
        """Export the present weights; the result is the path for a sampling session."""
        return await self._submit(
            "export-sampler",
            lambda seq_id: {"seq_id": seq_id, "path": name, "ttl_seconds": ttl_seconds},
            wire.checkpoint_path,
            what="save_for_sampler",
        )

    async def _pass(
        self,
        kind: Literal["forward", "forward_backward"],
        rows: Sequence[wire.TrainingRow],
        loss_fn: str,
    ) -> Operation[list[list[float]]]:
        return await self._train(
            f"{kind.replace('_', '-')}-passes",
            wire.training_payload(rows, loss_fn, f"{kind}_input"),
            wire.target_logprobs,
            what=f"{kind}({loss_fn})",
        )

    async def _train(
        self, path: str, payload: Mapping[str, Any], parse: Callable[[Any], T], *, what: str
    ) -> Operation[T]:
        def body(seq_id: int) -> dict[str, Any]:
            return {"payload": {"model_id": self.id, "seq_id": seq_id, **payload}}

        return await self._submit(path, body, parse, what=what)

    async def _submit(
        self,
        path: str,
        body: Callable[[int], Mapping[str, Any]],
        parse: Callable[[Any], T],
        *,
        what: str,
    ) -> Operation[T]:
        async with self._order:
            self._seq_id += 1  # used up, unless the call can't be sent or the service rejects it
            try:
                operation = await self._connection.submit(
                    f"models/{self.id}/{path}",
                    body(self._seq_id),
                    parse,
                    what=f"{what} of {self.base_model}",
                    idempotent=self._connection.resend,
                )
            except (RemoteError, ValueError) as error:
                if not getattr(error, "may_have_acted", False):
                    self._seq_id -= 1
                raise
            self._unsettled = [open_ for open_ in self._unsettled if not open_.settled]
            self._unsettled.append(operation)
            return operation

    # Checkpoints

    async def save_state(self, name: str) -> str:
        """Save weights and optimizer; returns the path.

        A save whose reply was lost is sent again. If the service then refuses because the name is
        taken, the first request took it, and its checkpoint is the result.
        """
        body = {"type": "weight_and_optimizer", "name": name}
        path, what = f"models/{self.id}/checkpoints", f"save_state({name!r})"
        budget, lost = self._connection.http.retry_budget(), False
        async with self._alone():
            while True:
                operation = None
                try:
                    operation = await self._connection.submit(
                        path, body, wire.checkpoint_path, what=what, idempotent=False
                    )
                    return await operation.result()
                except RemoteError as error:
                    if lost and (error.status == 409 or error.code == "conflict"):
                        return await self._listed(name, error)
                    if operation is not None:
                        raise
                    lost = lost or error.may_have_acted
                    await asyncio.sleep(budget.pause(error))

    async def _listed(self, name: str, refusal: RemoteError) -> str:
        """The path of the checkpoint `name`, which the service may still be writing.

        Raises `refusal` if it isn't listed within the deadline.
        """
        path, pace = f"models/{self.id}/checkpoints", self._connection.pace
        ends, looks = time.monotonic() + self._connection.deadline, 0
        while time.monotonic() < ends:
            found = await self._connection.call("GET", path, parse=wire.checkpoint_paths)
            if name in found:
                return found[name]
            await asyncio.sleep(pace.pause(looks))
            looks += 1
        raise refusal

    async def load_state(self, path: str) -> None:
        """Continue from a checkpoint of this model, or of another model of the same shape."""
        async with self._alone():
            operation = await self._connection.submit(
                f"models/{self.id}/load",
                {"path": path, "include_optimizer": True},
                lambda _: None,
                what=f"load_state({path!r})",
            )
            await operation.result()

    async def expire(self, path: str, model_id: str | None = None) -> None:
        """Delete a checkpoint after a second: Weaver has no immediate delete.

        `model_id` is the model that wrote it, if that was another one.
        """
        payload = {"path": path, "ttl_seconds": 1}
        where = f"models/{model_id or self.id}/checkpoints/ttl"
        with ignored(404):
            await self._connection.call("PATCH", where, payload)

    async def close(self) -> None:
        """Terminate the model on the service; no error if it no longer exists."""
        with ignored(404, 409):
            await self._connection.call("POST", f"models/{self.id}/terminate", {})

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """Wait until no call of this model is running, and block new ones."""
        async with self._order:
            for operation in self._unsettled:
                with suppress(RemoteError):  # raised to the caller that awaits its result
                    await operation.settle()
            self._unsettled.clear()
            yield
