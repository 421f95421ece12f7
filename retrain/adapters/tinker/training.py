"""One model in training: its operations run in order, each exactly once.

- Operations have seq ids 1, 2, 3, ... in the order of the calls. Each is sent after the one before
  was accepted: the service waits indefinitely for a missing id, and servers without ids use the
  order of arrival.
- An id is used up when the service accepts its request; a rejected request uses none. If it is
  unknown whether a request was accepted, the model can't be used any more.
- A call returns when the service has accepted the operation; await the returned value for the
  result. Submit forward_backward and optim_step first, then await both: the service works in
  cycles, and waiting in between costs two more.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, TypeVar

from retrain.adapters.remote.datums import chunks
from retrain.adapters.tinker.connection import Future, JobKind, TinkerConnection
from retrain.adapters.tinker.data import check_data, merge
from retrain.errors import AdapterError, ConfigError, install_command
from retrain.wire.client import Call
from retrain.wire.refusals import RemoteError
from retrain.wire.tinker import messages, payloads
from retrain.wire.tinker.messages import PROTOBUF
from retrain.wire.tinker.values import (
    Datum,
    ForwardBackward,
    ForwardBackwardOutput,
    LossConfig,
)
from retrain.wire.training import AdamParams

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class SamplerWeights:
    """Weights to sample from: a path, or the session that serves them already."""

    path: str | None
    sampling_session_id: str | None


@dataclass(frozen=True, slots=True)
class Chunked:
    """The jobs of one batch, awaited as one."""

    futures: Sequence[Future[ForwardBackwardOutput]]

    def __await__(self) -> Generator[Any, None, ForwardBackwardOutput]:
        return self.result().__await__()

    async def result(self, timeout: float | None = None) -> ForwardBackwardOutput:
        """The outputs in the order of the data. Raises what `Future.result` raises."""
        return merge([await future.result(timeout) for future in self.futures])


class TrainingClient:
    """Made by `TinkerClient.create_model` and `load_model`."""

    def __init__(self, connection: TinkerConnection, model_id: str) -> None:
        self.model_id = model_id
        self._connection = connection
        self._next = 1
        self._turn = asyncio.Lock()  # fair: operations keep the order of the calls
        self._broken = ""

    async def forward_backward(
        self,
        data: Sequence[Datum],
        loss: str,
        config: LossConfig | None = None,
        *,
        most_rows: int = sys.maxsize,
    ) -> Chunked:
        """Accumulate the gradients of the loss, summed over the data.

        They are sent in requests of at most `most_rows`.
        """
        empty = ForwardBackward(self.model_id, 0, (), loss, config or {})
        return await self._pass(data, empty, most_rows)

    async def forward(self, data: Sequence[Datum]) -> Chunked:
        """The log-probs and the loss of cross_entropy, without gradients."""
        empty = ForwardBackward(self.model_id, 0, (), "cross_entropy", forward_only=True)
        return await self._pass(data, empty)

    async def optim_step(self, adam: AdamParams) -> Future[Mapping[str, float]]:
        """Apply the gradients and clear them; the result holds the step's metrics."""
        return await self._operation("optim_step", {"adam_params": asdict(adam)}, OPTIM_STEP)

    async def save_weights(self, name: str, *, ttl_seconds: int | None = None) -> Future[str]:
        """Save weights and optimizer under `name`; the result is the path to load.

        `ttl_seconds` None keeps them until they are deleted.
        """
        payload = {"path": name, "ttl_seconds": ttl_seconds}
        return await self._operation("save_weights", payload, SAVE_WEIGHTS)

    async def save_weights_for_sampler(
        self,
        name: str | None = None,
        *,
        sampling_session_seq_id: int | None = None,
        ttl_seconds: int | None = None,
    ) -> Future[SamplerWeights]:
        """Save a snapshot to sample from, under `name` or for one sampling session."""
        payload = {
            "path": name,
            "sampling_session_seq_id": sampling_session_seq_id,
            "ttl_seconds": ttl_seconds,
            "kind": "snapshot",
        }
        return await self._operation("save_weights_for_sampler", payload, SAVE_FOR_SAMPLER)

    async def load_weights(self, path: str, *, optimizer: bool) -> Future[None]:
        """Load into this model; services allow that only as its first operation."""
        payload = {"path": path, "optimizer": optimizer}
        return await self._operation("load_weights", payload, LOAD_WEIGHTS)

    async def unload(self) -> None:
        """Free the model on the service; some services do not support it."""
        payload = {"model_id": self.model_id, "type": "unload_model"}
        await (await self._connection.submit_json("unload_model", payload, LOAD_WEIGHTS))

    def requests(
        self, data: Sequence[T], size: Callable[[T], int], most_rows: int = sys.maxsize
    ) -> list[list[T]]:
        """How data of these sizes in bytes are shared out over requests."""
        flags = self._connection.flags
        most_rows = min(flags.fwdbwd_max_chunk_len, most_rows)
        return chunks(data, size, flags.fwdbwd_max_chunk_bytes_count, most_rows)

    async def _pass(
        self, data: Sequence[Datum], empty: ForwardBackward, most_rows: int = sys.maxsize
    ) -> Chunked:
        check_data(data)
        kind = FORWARD if empty.forward_only else FORWARD_BACKWARD
        async with self._turn:
            futures: list[Future[ForwardBackwardOutput]] = []
            parts = self.requests(data, lambda datum: datum.size, most_rows)
            try:
                for part in parts:
                    call = self._pass_call(replace(empty, data=part))
                    futures.append(await self._submit(kind, call))
            finally:
                if 0 < len(futures) < len(parts) and not empty.forward_only:
                    self._broken = self._broken or "only part of a batch was accepted"
            return Chunked(futures)

    def _pass_call(self, request: ForwardBackward) -> Callable[[int], Call]:
        if self._connection.wire == "json":
            # A JSON forward_backward ignores forward_only and would add gradients.
            endpoint = "forward" if request.forward_only else "forward_backward"
            return lambda seq_id: Call.json(
                "POST",
                f"api/v1/{endpoint}",
                payloads.request_to_json(replace(request, seq_id=seq_id)),
            )

        def call(seq_id: int) -> Call:
            body = messages.encode_request(replace(request, seq_id=seq_id))
            headers = {"Content-Type": PROTOBUF}
            if self._connection.flags.proto_compress_fwdbwd:
                body = _zstd(body)
                headers["Content-Encoding"] = "zstd"
            return Call("POST", "api/v1/forward_backward", body, headers)

        return call

    async def _operation(
        self, endpoint: str, payload: Mapping[str, Any], kind: JobKind[T]
    ) -> Future[T]:
        given = {name: value for name, value in payload.items() if value is not None}
        fixed = {**given, "model_id": self.model_id, "type": endpoint}

        def call(seq_id: int) -> Call:
            return Call.json("POST", f"api/v1/{endpoint}", {**fixed, "seq_id": seq_id})

        async with self._turn:
            return await self._submit(kind, call)

    async def _submit(self, kind: JobKind[T], build: Callable[[int], Call]) -> Future[T]:
        """Send one operation; the caller holds `_turn`."""
        if self._broken:
            raise AdapterError(
                f"model {self.model_id} can't be used any more: {self._broken}. Continue from the "
                "last checkpoint."
            )
        call = build(self._next)  # an OverflowError takes no id
        self._broken = f"{kind.name} was interrupted while it was sent"
        try:
            future = await self._connection.submit(call, kind)
        except RemoteError as error:
            unknown = f"it is unknown whether {kind.name} was accepted ({error})"
            self._broken = unknown if error.may_have_acted else ""
            raise
        self._broken = ""
        self._next += 1
        return future


def _zstd(body: bytes) -> bytes:
    try:
        import zstandard
    except ImportError as error:
        raise ConfigError(
            "the service asks for zstd, but zstandard is not installed: "
            f"{install_command('remote')}"
        ) from error
    return zstandard.ZstdCompressor().compress(body)


def _metrics(body: Mapping[str, Any]) -> Mapping[str, float]:
    return {name: float(value) for name, value in (body.get("metrics") or {}).items()}


FORWARD_BACKWARD = JobKind("ForwardBackward", payloads.output_from_json, messages.decode_output)
FORWARD = JobKind("Forward", payloads.output_from_json, messages.decode_output)
OPTIM_STEP: JobKind[Mapping[str, float]] = JobKind("OptimStep", _metrics)
SAVE_WEIGHTS: JobKind[str] = JobKind("SaveWeights", lambda body: str(body["path"]))
SAVE_FOR_SAMPLER: JobKind[SamplerWeights] = JobKind(
    "SaveWeightsForSampler",
    lambda body: SamplerWeights(body.get("path"), body.get("sampling_session_id")),
)
LOAD_WEIGHTS: JobKind[None] = JobKind("LoadWeights", lambda body: None)
