"""Weaver's JSON as pure functions: encode request bodies, decode replies into typed values.

- Services spell field names differently (`id`, `ID`, `model_path`, `ModelPath`); `read` accepts all
  spellings. Log-probs come as lists or as tensors, results at the top level or inside `result`.
- A malformed reply raises ValueError; `HttpClient` reports it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from retrain.adapters.remote.published import SampledTokens

Json = Mapping[str, Any]  # an object as received


@dataclass(frozen=True, slots=True)
class TrainingRow:
    """One sequence to train on: `tokens` (N,) and the loss's inputs for each position."""

    tokens: Sequence[int]
    loss_fn_inputs: Mapping[str, Sequence[float]]
    """`target_tokens` and, depending on the loss, `weights`, `logprobs`, ...; (N,) each."""


@dataclass(frozen=True, slots=True)
class OperationState:
    """The state of an operation at one poll."""

    id: str
    status: str
    """`pending`, `running`, `done` or `error`."""
    response: Any = None  # free-form, by the kind of operation
    error: Mapping[str, Any] = field(default_factory=dict)
    """Of a failed operation: code, message, retryable, details."""
    waiting_for: str = ""
    """Why it is still pending, if the service says so."""


def training_payload(rows: Sequence[TrainingRow], loss_fn: str, key: str) -> dict[str, Any]:
    """The data and the loss of a pass; `key` is the kind of pass."""
    data = [_row(row) for row in rows]
    return {"tensor_transport": "default", key: {"loss_fn": loss_fn, "data": data}}


def prompt(tokens: Sequence[int]) -> dict[str, Any]:
    return {"chunks": [{"type": "encoded_text", "tokens": list(tokens)}]}


def _row(row: TrainingRow) -> dict[str, Any]:
    return {
        "model_input": prompt(row.tokens),
        "loss_fn_inputs": {
            name: {
                "data": list(values),
                "dtype": "int64" if name == "target_tokens" else "float32",
            }
            for name, values in row.loss_fn_inputs.items()
        },
    }


def read(payload: Any, name: str, default: Any = None) -> Any:
    """`payload[name]`, in any spelling; `default` if it is missing or null."""
    if not isinstance(payload, Mapping):
        return default
    if payload.get(name) is not None:  # the usual spelling needs no search
        return payload[name]
    wanted = name.replace("_", "").lower()
    for key, value in payload.items():
        if value is not None and key.replace("_", "").lower() == wanted:
            return value
    return default


def identifier(payload: Any) -> str:
    """The `id` of a resource; raises ValueError when it has none."""
    found = read(payload, "id")
    if not isinstance(found, (str, int)) or not str(found):
        raise ValueError(f"expected an object with an id, got {brief(payload)}")
    return str(found)


def sampling_session(payload: Any) -> tuple[str, OperationState | None]:
    """The session's id, and the operation that loads its weights, if there is one."""
    loading = read(payload, "sync_operation")
    session = read(payload, "sampling_session", payload)
    return identifier(session), None if loading is None else operation(loading)


def operation(payload: Any) -> OperationState:
    """The state in an operation's reply; raises ValueError when it isn't one."""
    status = str(read(payload, "status", "")).lower()
    if status not in ("pending", "running", "done", "error"):
        raise ValueError(
            "expected an operation with status pending, running, done or error, "
            f"got {brief(payload)}"
        )
    pending = read(payload, "pending_info")
    waiting = read(pending, "message") or read(pending, "code") or ""
    return OperationState(
        id=identifier(payload),
        status=status,
        response=read(payload, "response"),
        error=_failure(payload) if status == "error" else {},
        waiting_for=str(waiting),
    )


def _failure(payload: Any) -> dict[str, Any]:
    details = read(payload, "error_details") or {}
    message = read(payload, "error_message") or read(details, "diagnostic_message")
    return {
        "code": str(read(payload, "error_code") or read(payload, "error") or ""),
        "message": str(message or read(payload, "error") or "no reason given"),
        "retryable": read(payload, "retryable") is True,
        "details": details,
    }


def target_logprobs(response: Any) -> list[list[float]]:
    """The log-probs of a pass's targets, row by row; raises ValueError when there are none."""
    inner = read(response, "result", response)
    outputs = read(inner, "loss_fn_outputs", read(response, "loss_fn_outputs"))
    if not isinstance(outputs, list):
        raise ValueError(f"expected loss_fn_outputs, got {brief(response)}")
    return [_numbers(read(output, "logprobs")) for output in outputs]


def metrics(response: Any) -> dict[str, float]:
    """The metrics of a result that are numbers."""
    found = read(read(response, "result", response), "metrics", {})
    return {
        str(name): float(value)
        for name, value in found.items()
        if isinstance(value, (int, float)) and not isinstance(value, bool)
    }


def sequences(response: Any) -> list[SampledTokens]:
    """Every sequence of a sample, including empty ones: `n` samples stay `n`."""
    found = read(response, "sequences", read(read(response, "result"), "sequences"))
    if not isinstance(found, list):
        raise ValueError(f"expected sequences, got {brief(response)}")
    return [_sequence(raw) for raw in found]


def _sequence(raw: Any) -> SampledTokens:
    tokens = [int(token) for token in read(raw, "tokens", [])]
    logprobs = _numbers(read(raw, "logprobs", []))
    if len(tokens) != len(logprobs):
        raise ValueError(f"a sequence has {len(tokens)} tokens but {len(logprobs)} logprobs")
    return SampledTokens(tokens, logprobs, str(read(raw, "stop_reason", "stop")))


def prompt_logprobs(response: Any) -> list[float | None]:
    """The log-prob of each prompt token given the tokens before it; None for the first."""
    found = read(response, "prompt_logprobs", read(read(response, "result"), "prompt_logprobs"))
    if not isinstance(found, list):
        raise ValueError(f"expected prompt_logprobs, got {brief(response)}")
    return [None if value is None else float(value) for value in found]


def checkpoint_path(payload: Any) -> str:
    """The path of a checkpoint; raises ValueError when the reply has none."""
    path = read(payload, "path") or read(payload, "model_path")
    if not path:
        raise ValueError(f"expected a checkpoint with a path, got {brief(payload)}")
    return str(path)


def checkpoint_paths(payload: Any) -> dict[str, str]:
    """The paths of a model's checkpoints by name; raises ValueError when the reply has no list."""
    items = read(payload, "items")
    if not isinstance(items, list):
        raise ValueError(f"expected a list of checkpoints, got {brief(payload)}")
    paths = map(checkpoint_path, items)
    return {path.rpartition("/")[2]: path for path in paths}


def brief(payload: Any) -> str:
    """The payload's shape for a message; its values may be huge."""
    if isinstance(payload, Mapping):
        return f"an object with the keys {sorted(payload)[:12]}"
    return f"a {type(payload).__name__}"


def _numbers(value: Any) -> list[float]:
    data = read(value, "data") if isinstance(value, Mapping) else value
    if not isinstance(data, list):
        raise ValueError(f"expected a list of numbers, got {brief(value)}")
    return [float(number) for number in data]
