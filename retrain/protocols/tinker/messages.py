"""The protobuf forms of the values (package tinker_public, proto3, field numbers as read).

Each message has its encoder and its decoder here, so that a server can be built on the same codec
and each side can test the other. A decoder ignores fields that it doesn't know, and raises
ValueError on bytes that are no such message.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, cast, get_args

from retrain.protocols.tinker import protobuf as pb
from retrain.protocols.tinker.values import (
    Datum,
    Dtype,
    ForwardBackward,
    ForwardBackwardOutput,
    SampledSequence,
    SampleResult,
    StopReason,
    Tensor,
    TopK,
)

EMPTY_CELL = -99999.0
"""The log-prob of a top-k cell that holds nothing."""
_DTYPE_NUMBERS = {"float32": 1, "int64": 2}
_DTYPES: Mapping[int, tuple[str, int, Dtype]] = {
    1: ("f", 4, "float32"),
    2: ("q", 8, "int64"),
    3: ("i", 4, "int64"),
    4: ("H", 2, "float32"),  # bfloat16: the upper half of a float32
}
_STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)  # in the order of their numbers


def encode_request(request: ForwardBackward) -> bytes:
    """The protobuf body; raises OverflowError when a token id is no int32."""
    numbers = {k: float(v) for k, v in request.config.items() if not isinstance(v, str)}
    return b"".join(
        [
            pb.text(1, request.model_id),
            pb.integer(2, request.seq_id),
            *(pb.message(3, _datum(datum)) for datum in request.data),
            pb.text(4, request.loss),
            *(pb.entry(5, k, _value(v)) for k, v in sorted(numbers.items())),
            pb.integer(6, request.forward_only),
            *(
                # A number is written to the old map and the new one; text is in the new one alone.
                pb.entry(7, k, pb.message(2, _text_value(v) if isinstance(v, str) else _number(v)))
                for k, v in sorted(request.config.items())
            ),
        ]
    )


def decode_request(body: bytes) -> ForwardBackward:
    """The inverse of `encode_request`."""
    found: dict[str, Any] = {"model_id": "", "seq_id": 0, "loss": ""}  # the fields, by name
    data, old, new = [], {}, {}
    for number, value in pb.fields(body):
        match number:
            case 1:
                found["model_id"] = pb.text_of(value)
            case 2:
                found["seq_id"] = pb.number_of(value)
            case 3:
                data.append(_read_datum(pb.bytes_of(value)))
            case 4:
                found["loss"] = pb.text_of(value)
            case 5:
                key, number_value = pb.entry_of(value)
                old[key] = 0.0 if number_value is None else pb.double_of(number_value)
            case 6:
                found["forward_only"] = bool(pb.number_of(value))
            case 7:
                key, config_value = pb.entry_of(value)
                new[key] = _read_config_value(config_value)
    return ForwardBackward(data=data, config={**old, **new}, **found)


def decode_output(body: bytes) -> ForwardBackwardOutput:
    """The inverse of `encode_output`, over any number of records."""
    outputs: list[dict[str, Tensor]] = []
    metrics, kind = {}, ""
    for number, value in pb.fields(body):
        if number == 1:
            kind = pb.text_of(value).rpartition(":")[2]
        elif number == 2:
            outputs += _read_record(pb.bytes_of(value))
        elif number == 3:
            name, metric = pb.entry_of(value)
            metrics[name] = 0.0 if metric is None else pb.double_of(metric)
    return ForwardBackwardOutput(outputs, metrics, kind)


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """One ArrayRecord that holds every datum; all of them must have the same fields."""
    names = sorted(output.outputs[0]) if output.outputs else []
    tensors = {name: [o[name] for o in output.outputs] for name in names}
    record = b"".join(pb.entry(2, n, pb.message(2, _batched(t))) for n, t in tensors.items())
    return b"".join(
        [
            pb.text(1, output.kind),
            pb.message(2, record + pb.integer(3, len(output.outputs))),
            *(pb.entry(3, k, _value(v)) for k, v in sorted(output.metrics.items())),
        ]
    )


def decode_sample(body: bytes) -> SampleResult:
    """The inverse of `encode_sample`."""
    sequences, prompt_logprobs, topk, cached = [], None, None, 0
    for number, value in pb.fields(body):
        if number == 1:
            sequences.append(_read_sequence(pb.bytes_of(value)))
        elif number == 2:
            found = pb.unpack("f", pb.bytes_of(value)).tolist()
            prompt_logprobs = [None if math.isnan(lp) else lp for lp in found]
        elif number == 3:
            topk = _read_topk(pb.bytes_of(value))
        elif number == 4:
            cached = pb.number_of(value)
    return SampleResult(sequences, prompt_logprobs, topk, cached)


def encode_sample(result: SampleResult) -> bytes:
    prompt = b""
    if result.prompt_logprobs is not None:
        known = [math.nan if lp is None else lp for lp in result.prompt_logprobs]
        prompt = pb.message(2, pb.pack("f", known))
    return b"".join(
        [
            *(pb.message(1, _sequence(sequence)) for sequence in result.sequences),
            prompt,
            b"" if result.topk_prompt is None else pb.message(3, _topk(result.topk_prompt)),
            pb.integer(4, result.cache_hit_tokens),
        ]
    )


def _datum(datum: Datum) -> bytes:
    chunk = pb.message(1, pb.message(1, pb.pack("i", datum.tokens)))  # Chunk.encoded_text.tokens
    inputs = sorted(datum.inputs.items())
    return pb.message(1, chunk) + b"".join(
        pb.entry(2, name, pb.message(2, _tensor(tensor))) for name, tensor in inputs
    )


def _read_datum(body: bytes) -> Datum:
    tokens: list[int] = []
    inputs = {}
    for number, value in pb.fields(body):
        if number == 1:
            tokens += _read_chunk(pb.bytes_of(value))
        elif number == 2:
            name, tensor = pb.entry_of(value)
            inputs[name] = _read_tensor(b"" if tensor is None else pb.bytes_of(tensor))
    return Datum(tokens, inputs)


def _read_chunk(body: bytes) -> list[int]:
    tokens: list[int] = []
    for number, value in pb.fields(body):
        if number != 1:
            raise ValueError("only chunks of encoded text are understood, not images or audio")
        for part, content in pb.fields(pb.bytes_of(value)):
            if part == 1:
                tokens = cast(list[int], pb.unpack("i", pb.bytes_of(content)).tolist())
    return tokens


def _tensor(tensor: Tensor) -> bytes:
    dense = pb.pack("q" if tensor.dtype == "int64" else "f", tensor.data)
    dtype = pb.integer(3, _DTYPE_NUMBERS[tensor.dtype])
    return pb.message(1, dense) + dtype + pb.packed(4, tensor.dimensions)


def _read_tensor(body: bytes) -> Tensor:
    dense, dtype = b"", 0
    shape: list[int] = []
    for number, value in pb.fields(body):
        if number == 1:
            dense = pb.bytes_of(value)
        elif number == 2:
            raise ValueError("sparse tensors are not understood: send them dense")
        elif number == 3:
            dtype = pb.number_of(value)
        elif number == 4:
            shape += pb.integers_of(value)
    data, kind = _numbers(dense, dtype)
    return Tensor(data, kind, tuple(shape) if shape else None)


def _numbers(data: bytes, dtype: int) -> tuple[list[float], Dtype]:
    if dtype not in _DTYPES:
        raise ValueError(f"the tensor type {dtype} is unknown: expected one of {sorted(_DTYPES)}")
    code, _, kind = _DTYPES[dtype]
    values = pb.unpack(code, data)
    if code == "H":
        # The upper half of a float32: widened, it is exact.
        values = pb.unpack("f", pb.pack("I", [int(half) << 16 for half in values]))
    return list(values), kind


def _batched(tensors: Sequence[Tensor]) -> bytes:
    width = 8 if tensors[0].dtype == "int64" else 4
    flat: list[float] = []
    offsets = [0]
    for tensor in tensors:
        flat += tensor.data
        offsets.append(width * len(flat))
    return b"".join(
        [
            pb.message(1, pb.pack("q" if width == 8 else "f", flat)),
            pb.message(2, pb.pack("q", offsets)),
            pb.integer(3, _DTYPE_NUMBERS[tensors[0].dtype]),
            pb.packed(4, tensors[0].dimensions[1:]),
        ]
    )


def _read_batched(body: bytes) -> list[Tensor]:
    data, offsets, dtype = b"", b"", 0
    trailing: list[int] = []
    for number, value in pb.fields(body):
        if number == 1:
            data = pb.bytes_of(value)
        elif number == 2:
            offsets = pb.bytes_of(value)
        elif number == 3:
            dtype = pb.number_of(value)
        elif number == 4:
            trailing += pb.integers_of(value)
    numbers, kind = _numbers(data, dtype)
    width = _DTYPES[dtype][1]
    ends = [int(offset) // width for offset in pb.unpack("q", offsets)]
    if ends and (ends[0] != 0 or ends[-1] != len(numbers) or ends != sorted(ends)):
        raise ValueError("the offsets of a batched tensor don't tile its data")
    row = math.prod(trailing)
    return [
        Tensor(numbers[start:end], kind, ((end - start) // row if row else 0, *trailing))
        for start, end in itertools.pairwise(ends)
    ]


def _read_record(body: bytes) -> list[dict[str, Tensor]]:
    tensors, count = {}, 0
    for number, value in pb.fields(body):
        if number == 2:
            name, batched = pb.entry_of(value)
            tensors[name] = _read_batched(b"" if batched is None else pb.bytes_of(batched))
        elif number == 3:
            count = pb.number_of(value)
    count = count or max((len(rows) for rows in tensors.values()), default=0)
    if any(len(rows) != count for rows in tensors.values()):
        lengths = {name: len(rows) for name, rows in tensors.items()}
        raise ValueError(f"{count} datums were announced, but their fields hold {lengths}")
    return [{name: rows[i] for name, rows in tensors.items()} for i in range(count)]


def _sequence(sequence: SampledSequence) -> bytes:
    tokens = pb.pack("i", sequence.tokens)
    logprobs = b"" if sequence.logprobs is None else pb.message(3, pb.pack("f", sequence.logprobs))
    topk = b"" if sequence.topk is None else pb.message(4, _topk(sequence.topk))
    reason = pb.integer(1, _STOP_REASONS.index(sequence.stop_reason))
    return reason + (pb.message(2, tokens) if tokens else b"") + logprobs + topk


def _read_sequence(body: bytes) -> SampledSequence:
    tokens: list[int] = []
    reason, logprobs, topk = 0, None, None
    for number, value in pb.fields(body):
        if number == 1:
            reason = pb.number_of(value)
        elif number == 2:
            tokens = cast(list[int], pb.unpack("i", pb.bytes_of(value)).tolist())
        elif number == 3:
            logprobs = pb.unpack("f", pb.bytes_of(value)).tolist()
        elif number == 4:
            topk = _read_topk(pb.bytes_of(value))
    if reason >= len(_STOP_REASONS):
        raise ValueError(f"the stop reason {reason} is unknown: expected 0 (stop) or 1 (length)")
    return SampledSequence(tokens, logprobs, _STOP_REASONS[reason], topk)


def _topk(rows: TopK) -> bytes:
    k = max(map(len, rows), default=0)
    cells = [cell for row in rows for cell in row + [(0, EMPTY_CELL)] * (k - len(row))]
    ids, logprobs = [token for token, _ in cells], [logprob for _, logprob in cells]
    matrices = pb.message(1, pb.pack("i", ids)) + pb.message(2, pb.pack("f", logprobs))
    return matrices + pb.integer(3, k) + pb.integer(4, len(rows))


def _read_topk(body: bytes) -> TopK:
    ids, logprobs = b"", b""
    k = length = 0
    for number, value in pb.fields(body):
        if number == 1:
            ids = pb.bytes_of(value)
        elif number == 2:
            logprobs = pb.bytes_of(value)
        elif number == 3:
            k = pb.number_of(value)
        elif number == 4:
            length = pb.number_of(value)
    cells = list(zip(pb.unpack("i", ids), pb.unpack("f", logprobs), strict=True))
    if len(cells) != k * length:
        raise ValueError(f"{len(cells)} top-k cells came for {length} positions of {k}")
    rows = [cells[i * k : (i + 1) * k] for i in range(length)]
    return [[(int(token), lp) for token, lp in row if lp != EMPTY_CELL] for row in rows]


def _value(value: float) -> bytes:
    """Field 2 of a map entry; written even when it is 0, as protobuf does within maps."""
    return pb.double(2, value) or b"\x11" + b"\0" * 8


def _number(value: float) -> bytes:
    return pb.double(1, float(value)) or b"\x09" + b"\0" * 8


def _text_value(value: str) -> bytes:
    return pb.message(2, value.encode())


def _read_config_value(value: pb.Value | None) -> float | str:
    for number, content in pb.fields(b"" if value is None else pb.bytes_of(value)):
        if number == 1:
            return pb.double_of(content)
        if number == 2:
            return pb.text_of(content)
    raise ValueError("a loss_fn_config_v2 value holds neither a number nor a text")
