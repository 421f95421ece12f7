"""The protobuf forms of the values, for the client and the service.

Only the fields that are used here are declared; protobuf ignores the others. A decoder raises
ValueError on bytes that aren't such a message, or that are inconsistent.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Mapping, Sequence
from functools import cache
from types import SimpleNamespace
from typing import Any, cast, get_args

from retrain.wire.tinker.values import (
    Datum,
    Dtype,
    ForwardBackward,
    ForwardBackwardOutput,
    SampledSequence,
    SampleResult,
    StopReason,
    Tensor,
    TopTokens,
)

PROTOBUF = "application/x-protobuf"
"""The media type of these bodies."""
_SCHEMA = {
    "EncodedText": "tokens:1 bytes",
    "Chunk": "encoded_text:1 EncodedText",
    "SparseTensor": "values:1 bytes, starts:2 bytes, columns:3 bytes",
    "Tensor": "dense:1 bytes?, sparse:2 SparseTensor, dtype:3 int32, shape:4 int64*",
    "Datum": "model_input:1 Chunk*, inputs:2 {Tensor}",
    "ConfigValue": "number:1 double?, text:2 string?",
    "Request": "model_id:1 string, seq_id:2 int32, data:3 Datum*, loss:4 string, "
    "numbers:5 {double}, forward_only:6 bool, config:7 {ConfigValue}",
    "Batched": "data:1 bytes, offsets:2 bytes, dtype:3 int32, trailing_shape:4 int64*",
    "Record": "fields:2 {Batched}, count:3 int64",
    "Output": "kind:1 string, records:2 Record*, metrics:3 {double}",
    "Top": "ids:1 bytes, logprobs:2 bytes, width:3 uint32, length:4 uint32",
    "Sequence": "stop_reason:1 int32, tokens:2 bytes, logprobs:3 bytes?, top:4 Top?",
    "Sample": "sequences:1 Sequence*, prompt_logprobs:2 bytes?, prompt_top:3 Top?, "
    "targets:5 Tensor?",
}
"""The fields of each message, `name:number type`: `*` is repeated, `?` optional, `{}` a map from
strings. The names are ours; the wire has only the numbers."""
_DTYPE_NUMBERS = {"float32": 1, "int64": 2}
_DTYPES: Mapping[int, tuple[str, int, Dtype]] = {
    1: ("f", 4, "float32"),
    2: ("q", 8, "int64"),
    3: ("i", 4, "int64"),
    4: ("H", 2, "float32"),  # bfloat16: the upper half of a float32
}
_STOP_REASONS: tuple[StopReason, ...] = get_args(StopReason)  # in the order of their numbers

Message = Any  # a protobuf class made at run time, or its instance


def encode_request(request: ForwardBackward) -> bytes:
    """The protobuf body; raises OverflowError when a token id is not an int32."""
    body = _types().Request(
        model_id=request.model_id,
        seq_id=request.seq_id,
        loss=request.loss,
        forward_only=request.forward_only,
    )
    for datum in request.data:
        written = body.data.add()
        written.model_input.add().encoded_text.tokens = _pack("i", datum.tokens)
        for name, tensor in datum.inputs.items():
            _write_tensor(written.inputs[name], tensor)
    for name, value in request.config.items():
        if isinstance(value, str):
            body.config[name].text = value
        else:  # older services read the first of the two maps
            body.numbers[name] = body.config[name].number = float(value)
    return _bytes(body)


def decode_request(body: bytes) -> ForwardBackward:
    read = _parsed("Request", body)
    config: dict[str, float | str] = dict(read.numbers)
    for name, value in read.config.items():
        config[name] = value.text if value.HasField("text") else value.number
    data = [
        Datum(
            [token for chunk in datum.model_input for token in _chunk_tokens(chunk)],
            {name: _read_tensor(tensor) for name, tensor in datum.inputs.items()},
        )
        for datum in read.data
    ]
    return ForwardBackward(
        read.model_id, read.seq_id, data, read.loss, config, bool(read.forward_only)
    )


def encode_output(output: ForwardBackwardOutput) -> bytes:
    """A record for each run of datums with the same fields of the same trailing shapes."""
    body = _types().Output(kind=output.kind, metrics=output.metrics)
    for _, alike in itertools.groupby(output.outputs, _form):
        _write_record(body.records, list(alike))
    return _bytes(body)


def _form(output: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tensor.dimensions[1:] for name, tensor in output.items()}


def _write_record(records: Message, outputs: Sequence[Mapping[str, Tensor]]) -> None:
    record = records.add(count=len(outputs))
    for name in outputs[0]:
        tensors = [one[name] for one in outputs]
        integers = tensors[0].dtype == "int64"
        ends = itertools.accumulate((len(t.data) for t in tensors), initial=0)
        batched = record.fields[name]
        batched.data = _pack("q" if integers else "f", [v for t in tensors for v in t.data])
        batched.offsets = _pack("q", [end * (8 if integers else 4) for end in ends])
        batched.dtype = _DTYPE_NUMBERS[tensors[0].dtype]
        batched.trailing_shape.extend(tensors[0].dimensions[1:])


def decode_output(body: bytes) -> ForwardBackwardOutput:
    read = _parsed("Output", body)
    outputs = [one for record in read.records for one in _read_record(record)]
    return ForwardBackwardOutput(outputs, dict(read.metrics), read.kind.rpartition(":")[2])


def encode_sample(result: SampleResult) -> bytes:
    body = _types().Sample()
    for sequence in result.sequences:
        written = body.sequences.add(
            stop_reason=_STOP_REASONS.index(sequence.stop_reason),
            tokens=_pack("i", sequence.tokens),
        )
        if sequence.logprobs is not None:
            written.logprobs = _pack("f", sequence.logprobs)
        if sequence.top is not None:
            _write_top(written.top, sequence.top)
    if result.prompt_top is not None:
        _write_top(body.prompt_top, result.prompt_top)
    if result.targets is not None:
        _write_tensor(body.targets, result.targets)
    if result.prompt_logprobs is not None:
        known = [math.nan if lp is None else lp for lp in result.prompt_logprobs]
        body.prompt_logprobs = _pack("f", known)
    return _bytes(body)


def decode_sample(body: bytes) -> SampleResult:
    read = _parsed("Sample", body)
    prompt_logprobs = None
    if read.HasField("prompt_logprobs"):
        found = _unpack("f", read.prompt_logprobs)
        prompt_logprobs = [None if math.isnan(lp) else lp for lp in found]
    return SampleResult(list(map(_read_sequence, read.sequences)), prompt_logprobs)


def _write_top(message: Message, top: TopTokens) -> None:
    message.ids = _pack("i", [id for row in top.ids for id in row])
    message.logprobs = _pack("f", [logprob for row in top.logprobs for logprob in row])
    message.width, message.length = top.width, len(top.ids)


def _write_tensor(message: Message, tensor: Tensor) -> None:
    values = _pack("qf"[tensor.dtype == "float32"], tensor.data)
    if tensor.sparse is None:
        message.dense = values
    else:
        message.sparse.values = values
        message.sparse.starts, message.sparse.columns = (_pack("q", i) for i in tensor.sparse)
    message.dtype = _DTYPE_NUMBERS[tensor.dtype]
    message.shape.extend(tensor.dimensions)


def _read_sequence(read: Message) -> SampledSequence:
    if not 0 <= read.stop_reason < len(_STOP_REASONS):
        raise ValueError(f"stop reason: got {read.stop_reason}, expected 0 (stop) or 1 (length)")
    return SampledSequence(
        cast(list[int], _unpack("i", read.tokens)),
        _unpack("f", read.logprobs) if read.HasField("logprobs") else None,
        _STOP_REASONS[read.stop_reason],
    )


def _chunk_tokens(chunk: Message) -> list[int]:
    if not chunk.HasField("encoded_text"):
        raise ValueError(
            "a chunk of the prompt is not encoded text; images and audio are not supported"
        )
    return cast(list[int], _unpack("i", chunk.encoded_text.tokens))


def _read_tensor(read: Message) -> Tensor:
    if not read.HasField("sparse"):
        data, kind = _numbers(read.dense, read.dtype)
        return Tensor(data, kind, tuple(read.shape) or None)
    data, kind = _numbers(read.sparse.values, read.dtype)
    starts, columns = (_unpack("q", part) for part in (read.sparse.starts, read.sparse.columns))
    indices = cast(list[int], starts), cast(list[int], columns)
    return Tensor(data, kind, tuple(read.shape), indices)


def _numbers(data: bytes, dtype: int) -> tuple[list[float], Dtype]:
    if dtype not in _DTYPES:
        raise ValueError(f"tensor type: got {dtype}, expected one of {sorted(_DTYPES)}")
    code, _, kind = _DTYPES[dtype]
    values = _unpack(code, data)
    if code == "H":
        values = _unpack("f", _pack("I", [int(half) << 16 for half in values]))
    return values, kind


def _read_record(read: Message) -> list[dict[str, Tensor]]:
    tensors = {name: _read_batched(batched) for name, batched in read.fields.items()}
    count = read.count or max((len(rows) for rows in tensors.values()), default=0)
    if any(len(rows) != count for rows in tensors.values()):
        lengths = {name: len(rows) for name, rows in tensors.items()}
        raise ValueError(f"a record has {lengths} rows, expected {count} of each field")
    return [{name: rows[i] for name, rows in tensors.items()} for i in range(count)]


def _read_batched(read: Message) -> list[Tensor]:
    numbers, kind = _numbers(read.data, read.dtype)
    width = _DTYPES[read.dtype][1]
    ends = [int(offset) // width for offset in _unpack("q", read.offsets)]
    if ends and (ends[0] != 0 or ends[-1] != len(numbers) or ends != sorted(ends)):
        raise ValueError("the offsets of a batched tensor don't cover its data")
    row = math.prod(read.trailing_shape)
    return [
        Tensor(numbers[start:end], kind, ((end - start) // row if row else 0, *read.trailing_shape))
        for start, end in itertools.pairwise(ends)
    ]


def _pack(code: str, values: Sequence[float]) -> bytes:
    """Little-endian bytes (the machine's); raises OverflowError when an integer does not fit."""
    return array(code, values).tobytes()


def _unpack(code: str, data: bytes) -> list[float]:
    """The inverse of `_pack`; raises ValueError when the bytes don't divide."""
    numbers = array(code)
    numbers.frombytes(data)
    return cast(list[float], numbers.tolist())


def _parsed(name: str, body: bytes) -> Message:
    from google.protobuf.message import DecodeError

    try:
        return getattr(_types(), name).FromString(body)
    except DecodeError as error:
        raise ValueError(f"not a protobuf message of Tinker's: {error}") from error


def _bytes(body: Message) -> bytes:
    return cast(bytes, body.SerializeToString(deterministic=True))


@cache
def _types() -> SimpleNamespace:
    """The class of each message of `_SCHEMA`, in a pool that is separate from the official SDK's.

    protobuf is imported on first use, so that a dry run does not load it.
    """
    from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

    file = descriptor_pb2.FileDescriptorProto(name="retrain", package="retrain", syntax="proto3")
    for name, fields in _SCHEMA.items():
        message = file.message_type.add(name=name)
        for field in filter(None, fields.split(", ")):
            _declare(message, *field.split(" "))
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    found = {
        message.name: message_factory.GetMessageClass(
            pool.FindMessageTypeByName(f"retrain.{message.name}")
        )
        for message in file.message_type
    }
    return SimpleNamespace(**found)


def _declare(message: Message, field: str, kind: str) -> None:
    """Add a field of `_SCHEMA` to a message's descriptor."""
    name, number = field.split(":")
    declared = message.field.add(name=name, number=int(number), label=1)  # optional
    base = kind.strip("{}*?")
    if kind.startswith("{"):
        entry = message.nested_type.add(name=f"{name.capitalize()}Entry")
        entry.options.map_entry = True
        _declare(entry, "key:1", "string")
        _declare(entry, "value:2", base)
        base = f"{message.name}.{entry.name}"
    if base[0].isupper():
        declared.type_name = f".retrain.{base}"
    else:
        declared.type = getattr(declared, f"TYPE_{base.upper()}")
    if kind[0] == "{" or kind[-1] == "*":
        declared.label = declared.LABEL_REPEATED
    if kind[-1] == "?":
        declared.proto3_optional = True
        declared.oneof_index = len(message.oneof_decl)
        message.oneof_decl.add(name=f"_{name}")
