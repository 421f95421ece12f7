"""Our protobuf codec: the golden vectors, and the official SDK as its other half."""

from __future__ import annotations

import contextlib
import math
import struct

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tinker import types
from tinker.proto import request_conv, response_conv
from tinker.proto import tinker_public_pb2 as official

from retrain.wire.tinker import messages, payloads
from retrain.wire.tinker.values import (
    Datum,
    ForwardBackward,
    ForwardBackwardOutput,
    SampledSequence,
    SampleResult,
    Tensor,
)

GOLDEN_REQUEST = bytes.fromhex(
    "0a09733a747261696e3a3010031a640a100a0e0a0c05000000060000000700000012300a0d7461726765745f746f6b"
    "656e73121f0a18060000000000000007000000000000002c010000000000001802220103121e0a0777656967687473"
    "12130a0c000000000000803f0000803f1801220103220d63726f73735f656e74726f7079"
)
GOLDEN_SAMPLE = bytes.fromhex(
    "0a1608011208090000002c0100001a08cdccccbdcdcc4cbe0a0012080000c07f000000bf1a280a1000000000000000"
    "0004000000000000001210804fc3c7804fc3c7000000bf804fc3c7180220022001"
)
REQUEST = ForwardBackward(
    model_id="s:train:0",
    seq_id=3,
    data=[
        Datum(
            [5, 6, 7],
            {
                "target_tokens": Tensor([6, 7, 300], "int64", (3,)),
                "weights": Tensor([0.0, 1.0, 1.0], "float32", (3,)),
            },
        )
    ],
    loss="cross_entropy",
)


def test_the_golden_request_is_written_byte_for_byte_and_read_back() -> None:
    assert messages.encode_request(REQUEST) == GOLDEN_REQUEST
    assert messages.decode_request(GOLDEN_REQUEST) == REQUEST


def test_the_golden_sample_response_is_read() -> None:
    result = messages.decode_sample(GOLDEN_SAMPLE)
    long, empty = result.sequences
    assert (list(long.tokens), long.stop_reason) == ([9, 300], "length")
    assert long.logprobs == pytest.approx([-0.1, -0.2])
    assert (list(empty.tokens), empty.logprobs, empty.stop_reason) == ([], None, "stop")
    assert result.prompt_logprobs == [None, -0.5]


floats = st.floats(-(2.0**90), 2.0**90, width=32)
tokens = st.lists(st.integers(0, 2**31 - 1), max_size=9)
names = st.sampled_from(["target_tokens", "weights", "logprobs", "advantages", "ünïcode"])


@st.composite
def requests(draw: st.DrawFn) -> ForwardBackward:
    def tensor() -> Tensor:
        if draw(st.booleans()):
            ints = draw(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=9))
            return Tensor(ints, "int64", (len(ints),))
        numbers = draw(st.lists(floats, max_size=9))
        return Tensor(numbers, "float32", (len(numbers),))

    data = [
        Datum(draw(tokens), {name: tensor() for name in draw(st.sets(names))})
        for _ in range(draw(st.integers(0, 3)))
    ]
    config = draw(st.dictionaries(names, st.floats(allow_nan=False) | st.text(max_size=5)))
    return ForwardBackward(
        draw(st.text(max_size=200)),
        draw(st.integers(0, 2**31 - 1)),
        data,
        draw(st.sampled_from(["ppo", "cross_entropy", ""])),
        config,
        draw(st.booleans()),
    )


@settings(max_examples=30)
@given(requests())
def test_what_we_write_the_official_protobuf_reads_as_what_it_writes_itself(
    request: ForwardBackward,
) -> None:
    theirs = official.ForwardBackwardRequest()
    theirs.ParseFromString(messages.encode_request(request))
    expected = request_conv.forward_backward_request_to_proto(
        types.ForwardBackwardRequest(
            forward_backward_input=types.ForwardBackwardInput(
                data=[
                    types.Datum(
                        model_input=types.ModelInput.from_ints(list(datum.tokens)),
                        loss_fn_inputs={
                            name: types.TensorData(
                                data=list(t.data), dtype=t.dtype, shape=list(t.dimensions)
                            )
                            for name, t in datum.inputs.items()
                        },
                    )
                    for datum in request.data
                ],
                loss_fn=request.loss,
                loss_fn_config=dict(request.config),
            ),
            model_id=request.model_id,
            seq_id=request.seq_id,
        )
    )
    expected.forward_only = request.forward_only
    assert theirs == expected
    assert messages.decode_request(expected.SerializeToString()) == request


def test_a_sample_result_we_write_is_read_by_the_official_sdk() -> None:
    result = SampleResult(
        [
            SampledSequence([1, 2], [-0.5, -0.25], "length"),
            SampledSequence([], None, "stop"),
        ],
        prompt_logprobs=[None, -1.5],
    )
    body = messages.encode_sample(result)
    read = response_conv.deserialize_sample_response(body)
    assert [s.tokens for s in read.sequences] == [[1, 2], []]
    assert read.sequences[0].logprobs == [-0.5, -0.25]
    assert read.sequences[0].stop_reason == "length"
    assert read.prompt_logprobs == [None, -1.5]
    assert messages.decode_sample(body) == result


def test_an_output_we_write_is_read_by_the_official_sdk() -> None:
    output = ForwardBackwardOutput(
        [
            {"logprobs": Tensor([-0.5, -0.25], "float32", (2,))},
            {"logprobs": Tensor([], "float32", (0,))},
            {"logprobs": Tensor([-1.0], "float32", (1,))},
        ],
        {"loss:sum": 2.5, "zero:sum": 0.0},
        "ppo",
    )
    body = messages.encode_output(output)
    read = response_conv.deserialize_forward_backward_output(body)
    assert [list(o["logprobs"].data) for o in read.loss_fn_outputs] == [[-0.5, -0.25], [], [-1.0]]
    assert read.metrics == dict(output.metrics)
    assert read.loss_fn_output_type == "ppo"
    assert messages.decode_output(body) == output


def record(data: bytes, offsets: list[int], dtype: int, count: int, trailing: list[int]) -> bytes:
    made = official.ForwardBackwardOutput(loss_fn_output_type="x:y:scalar")
    added = made.loss_fn_outputs.add(num_datums=count)
    added.fields["logprobs"].CopyFrom(
        official.BatchedTensor(
            data=data,
            offsets=np.array(offsets, np.int64).tobytes(),
            dtype=dtype,  # type: ignore[arg-type] - the generated enum's own type
            trailing_shape=trailing,
        )
    )
    return made.SerializeToString()


def test_every_type_offset_and_trailing_shape_is_read_as_the_official_sdk_reads_it() -> None:
    bf16 = b"".join(struct.pack("<f", v)[2:] for v in [1.5, -2.0, 0.25])
    cases = [
        record(bf16, [0, 4, 6], official.DTYPE_BFLOAT16, 2, []),
        record(np.array([1, -2, 3], np.int32).tobytes(), [0, 4, 12], official.DTYPE_INT32, 2, []),
        record(np.arange(6, dtype=np.int64).tobytes(), [0, 16, 48], official.DTYPE_INT64, 2, [2]),
        record(np.arange(3, dtype=np.float32).tobytes(), [0, 12], official.DTYPE_FLOAT32, 1, []),
    ]
    for body in [*cases, b"".join(cases)]:
        theirs = response_conv.deserialize_forward_backward_output(body)
        ours = messages.decode_output(body)
        assert ours.kind == theirs.loss_fn_output_type == "scalar"
        assert len(ours.outputs) == len(theirs.loss_fn_outputs)
        for mine, other in zip(ours.outputs, theirs.loss_fn_outputs, strict=True):
            assert list(mine["logprobs"].data) == list(other["logprobs"].data)
            assert mine["logprobs"].dtype == other["logprobs"].dtype
            assert list(mine["logprobs"].dimensions) == list(other["logprobs"].shape or [])


def test_a_record_that_does_not_count_its_datums_is_counted_by_its_offsets() -> None:
    body = record(np.arange(3, dtype=np.float32).tobytes(), [0, 4, 12], 1, 0, [])
    assert messages.decode_output(body).logprobs == [[0.0], [1.0, 2.0]]


@pytest.mark.parametrize(
    "body",
    [
        GOLDEN_REQUEST[:-1],
        b"\x0a\xff",
        b"\xff" * 12,
        b"\x0b",
        record(b"\0" * 8, [0, 4], 1, 1, []),
        record(b"\0" * 8, [0, 8], 9, 1, []),
        record(b"\0" * 8, [0, 8], 1, 3, []),
    ],
)
def test_torn_or_inconsistent_bytes_are_a_value_error(body: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 - the kind is the contract, the texts vary
        messages.decode_request(body) and messages.decode_output(body)


@given(st.binary(max_size=60))
def test_no_bytes_make_a_decoder_fail_otherwise(body: bytes) -> None:
    for decode in (messages.decode_request, messages.decode_output, messages.decode_sample):
        with contextlib.suppress(ValueError):
            decode(body)


def test_a_token_that_is_no_int32_is_refused() -> None:
    with pytest.raises(OverflowError):
        messages.encode_request(ForwardBackward("m", 1, [Datum([2**31], {})], "ppo"))


def test_json_results_are_read_leniently() -> None:
    output = payloads.output_from_json(
        {"loss_fn_outputs": [{"logprobs": {"data": [-1.0], "dtype": "float32"}}], "metrics": None}
    )
    assert output.logprobs == [[-1.0]]
    sample = payloads.sample_from_json(
        {"sequences": [{"tokens": [1], "stop_reason": "stop"}], "unknown": 1}
    )
    assert sample.sequences[0].logprobs is None
    with pytest.raises(ValueError, match="abort"):
        payloads.sample_from_json({"sequences": [{"tokens": [], "stop_reason": "abort"}]})
    with pytest.raises(ValueError, match="sparse"):
        payloads.output_from_json(
            {
                "loss_fn_outputs": [
                    {"w": {"data": [1], "dtype": "int64", "sparse_crow_indices": [0]}}
                ]
            }
        )
    assert math.isclose(Datum([1, 2], {"w": Tensor([1.0])}).size, 12)
