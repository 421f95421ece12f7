"""A model in training: passes, optimizer steps, checkpoints.

- The service runs a model's calls in the order of their `seq_id`. One is taken under a lock, for a
  body that is complete and checked, and the calls go out one after another; their results may be
  awaited later, so that a pass and its optimizer step overlap on the wire (`_train`).
- A call that the service turned away gives its `seq_id` back; one that it may have acted on does
  not, and is only sent again to a service that recognises a repeated one (`Connection.resend`).
- Checkpoints carry no `seq_id`: they wait until every earlier call has settled (`_alone`).
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Literal, TypeVar

from retrain.adapters.weaver import wire
from retrain.adapters.weaver.connection import Connection, Operation
from retrain.protocols.training import AdamParams
from retrain.transport.refusals import RemoteError, ignored

T = TypeVar("T")

EXPORT_TTL = 3600
"""Seconds that an export for sampling is kept, unless told otherwise."""


class WeaverModel:
    """Made by `WeaverClient`. Every method raises RemoteError when the service refuses or fails."""

    def __init__(
        self,
        connection: Connection,
        id: str,
        *,
        base_model: str,
        forget: Callable[[str], object] = lambda _: None,
    ) -> None:
        """`forget` is told the id when the model is terminated."""
        self.id = id
        self.base_model = base_model
        self._connection = connection
        self._forget = forget
        self._seq_id = 0
        self._order = asyncio.Lock()
        self._unsettled: list[Operation[Any]] = []

    def __repr__(self) -> str:
        return f"WeaverModel({self.id!r}, {self.base_model!r})"

    # Training. A call returns once it is submitted; its Operation's `result()` waits for it.

    async def forward(
        self,
        rows: Sequence[wire.TrainingRow],
        loss_fn: str = "forward_logprob",
        loss_fn_config: Mapping[str, Any] | None = None,
    ) -> Operation[wire.ForwardResult]:
        """Log-probs without gradients. Raises ValueError or NonFiniteError on bad rows."""
        return await self._pass("forward", rows, loss_fn, loss_fn_config)

    async def forward_backward(
        self,
        rows: Sequence[wire.TrainingRow],
        loss_fn: str,
        loss_fn_config: Mapping[str, Any] | None = None,
    ) -> Operation[wire.ForwardResult]:
        """Log-probs, and gradients that add up until the next `optim_step`.

        Raises ValueError or NonFiniteError on bad rows, before a seq_id is taken.
        """
        return await self._pass("forward_backward", rows, loss_fn, loss_fn_config)

    async def optim_step(self, adam: AdamParams) -> Operation[dict[str, float]]:
        """Apply the gradients and zero them; the result is the service's metrics."""
        return await self._train(
            "optimizer-steps",
            lambda seq_id: wire.optimizer_body(self.id, seq_id, adam),
            wire.metrics,
            what="optim_step",
        )

    async def save_for_sampler(
        self, name: str | None = None, *, ttl_seconds: int | None = EXPORT_TTL
    ) -> Operation[str]:
        """Export the present weights; the result is the path a sampling session takes.

        None keeps the export for ever.
        """
        wanted = {"path": name, "ttl_seconds": ttl_seconds}
        wanted = {key: value for key, value in wanted.items() if value is not None}
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
        loss_fn_config: Mapping[str, Any] | None,
    ) -> Operation[wire.ForwardResult]:
        value = wire.training_input(rows, loss_fn, loss_fn_config)
        lengths = [len(row.tokens) for row in rows]
        return await self._train(
            f"{kind.replace('_', '-')}-passes",
            lambda seq_id: wire.training_body(self.id, seq_id, f"{kind}_input", value),
            lambda response: _of_lengths(wire.forward_result(response), lengths),
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
            self._seq_id += 1  # spent, unless the service says that it did nothing
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

    async def save_state(
        self, name: str, *, optimizer: bool = True, ttl_seconds: int | None = None
    ) -> str:
        """The path of a checkpoint, with the optimizer's state or without; None keeps it."""
        payload: dict[str, Any] = {
            "type": "weight_and_optimizer" if optimizer else "weight",
            "name": name,
        }
        if ttl_seconds is not None:
            payload["ttl_seconds"] = ttl_seconds
        async with self._alone():
            operation = await self._connection.submit(
                f"models/{self.id}/checkpoints",
                wire.dumps(payload),
                wire.checkpoint_path,
                what=f"save_state({name!r})",
            )
            return await operation.result()

    async def load_state(self, path: str, *, optimizer: bool = True) -> None:
        """Go on from a checkpoint, of this model or of another one of the same shape."""
        async with self._alone():
            operation = await self._connection.submit(
                f"models/{self.id}/load",
                wire.dumps({"path": path, "include_optimizer": optimizer}),
                lambda _: None,
                what=f"load_state({path!r})",
            )
            await operation.result()

    async def expire(
        self, path: str, model_id: str | None = None, *, ttl_seconds: int | None = 1
    ) -> None:
        """Let a checkpoint go after `ttl_seconds`, or never (None). Weaver has no delete.

        `model_id` names the model that wrote it, where that was another one.
        """
        payload = {"path": path, "ttl_seconds": ttl_seconds}
        where = f"models/{model_id or self.id}/checkpoints/ttl"
        with ignored(404):
            await self._connection.call("PATCH", where, payload)

    async def close(self) -> None:
        """Terminate the model on the service; one that's gone already is well."""
        self._forget(self.id)
        with ignored(404, 409):
            await self._connection.call("POST", f"models/{self.id}/terminate", {})

    @asynccontextmanager
    async def _alone(self) -> AsyncIterator[None]:
        """No call of this model is under way, and none is sent meanwhile."""
        async with self._order:
            for operation in self._unsettled:
                with suppress(RemoteError):  # whoever awaits its result is told
                    await operation.settle()
            self._unsettled.clear()
            yield


def _of_lengths(result: wire.ForwardResult, lengths: Sequence[int]) -> wire.ForwardResult:
    got = [len(row) for row in result.logprobs]
    if got != list(lengths):
        raise ValueError(f"expected log-probs of lengths {lengths}, got {got}")
    return result
