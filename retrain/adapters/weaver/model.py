"""A model in training: passes, optimizer steps, checkpoints.

- The service runs a model's calls in the order of their `seq_id`. An id is taken under a lock, for
  a complete and checked body, and calls are submitted one after another. Their results may be
  awaited later, so a pass and its optimizer step overlap (`_train`).
- A rejected call returns its `seq_id`. A call that the service may have executed does not, and is
  sent again only to a service that recognises a repeated id (`Connection.resend`).
- Checkpoints have no `seq_id`: they wait until every earlier call is done (`_alone`).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeVar

from retrain.adapters.weaver import wire
from retrain.adapters.weaver.connection import Connection, Operation
from retrain.protocols.training import AdamParams
from retrain.transport.refusals import RemoteError, ignored

T = TypeVar("T")

EXPORT_TTL = 3600
"""Seconds that an export for sampling is kept, by default."""


class WeaverModel:
    """Made by `WeaverClient`. Every method raises RemoteError when the service refuses or fails."""

    def __init__(
        self,
        connection: Connection,
        id: str,
        *,
        base_model: str,
    ) -> None:
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
        return await self._train(
            "optimizer-steps",
            lambda seq_id: wire.optimizer_body(self.id, seq_id, adam),
            wire.metrics,
            what="optim_step",
        )

    async def save_for_sampler(self, name: str, *, ttl_seconds: int = EXPORT_TTL) -> Operation[str]:
        """Export the present weights; the result is the path for a sampling session."""
        wanted = {"path": name, "ttl_seconds": ttl_seconds}
        return await self._train(
            "export-sampler",
            lambda seq_id: wire.dumps({"seq_id": seq_id, **wanted}),
            wire.checkpoint_path,
            what="save_for_sampler",
        )

    async def _pass(
        self,
        kind: Literal["forward", "forward_backward"],
        rows: Sequence[wire.TrainingRow],
        loss_fn: str,
    ) -> Operation[list[list[float]]]:
        value = wire.training_input(rows, loss_fn)
        return await self._train(
            f"{kind.replace('_', '-')}-passes",
            lambda seq_id: wire.training_body(self.id, seq_id, f"{kind}_input", value),
            lambda found: _of_lengths(wire.target_logprobs(found), rows),
            what=f"{kind}({loss_fn})",
        )

    async def _train(
        self,
        path: str,
        body: Callable[[int], bytes],
        parse: Callable[[Any], T],
        *,
        what: str,
    ) -> Operation[T]:
        async with self._order:
            self._seq_id += 1  # used up, unless the service rejects the call
            try:
                operation = await self._connection.submit(
                    f"models/{self.id}/{path}",
                    body(self._seq_id),
                    parse,
                    what=f"{what} of {self.base_model}",
                    idempotent=self._connection.resend,
                )
            except RemoteError as error:
                if not error.may_have_acted:
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
        body = wire.dumps({"type": "weight_and_optimizer", "name": name})
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
                wire.dumps({"path": path, "include_optimizer": True}),
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


def _of_lengths(found: list[list[float]], rows: Sequence[wire.TrainingRow]) -> list[list[float]]:
    """Log-probs with one value per target; raises ValueError, as for a malformed reply."""
    got, expected = [len(row) for row in found], [len(row.tokens) for row in rows]
    if got != expected:
        raise ValueError(f"got log-probs of lengths {got[:8]}, expected {expected[:8]}")
    return found
