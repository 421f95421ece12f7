"""Weaver's JSON as pure functions: what is spliced, what is read, and what is refused."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.adapters.weaver import wire

finite = st.floats(allow_nan=False, allow_infinity=False)


@st.composite
def rows(draw: st.DrawFn) -> wire.TrainingRow:
    length = draw(st.integers(1, 12))

    def stream(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=length, max_size=length))

    tokens = st.integers(0, 200_000)
    inputs = {"target_tokens": stream(tokens), "weights": stream(finite)}
    return wire.TrainingRow(stream(tokens), inputs)


@given(st.lists(rows(), min_size=1, max_size=4), st.integers(1, 10**9), st.text(max_size=9))
def test_a_spliced_body_is_the_json_of_the_whole(
    data: list[wire.TrainingRow], seq_id: int, model_id: str
) -> None:
    value = wire.training_input(data, "cross_entropy")
    body = json.loads(wire.training_body(model_id, seq_id, "forward_backward_input", value))
    assert body["payload"].keys() == {
        "model_id",
        "seq_id",
        "tensor_transport",
        "forward_backward_input",
    }
    assert (body["payload"]["model_id"], body["payload"]["seq_id"]) == (model_id, seq_id)
    sent = body["payload"]["forward_backward_input"]["data"]
    for row, got in zip(data, sent, strict=True):
        assert got["model_input"]["chunks"][0]["tokens"] == row.tokens
        assert {k: v["data"] for k, v in got["loss_fn_inputs"].items()} == row.loss_fn_inputs


@pytest.mark.parametrize(
    "name", ["model_path", "ModelPath", "modelPath", "MODEL_PATH", "modelpath"]
)
def test_a_field_is_found_in_every_spelling(name: str) -> None:
    assert wire.read({"x": 1, name: "p"}, "model_path") == "p"
    assert wire.read({name: None}, "model_path", "default") == "default"


def test_metrics_are_the_numbers_of_a_result() -> None:
    found = {"grad_norm": 1, "note": "text", "flag": True}
    assert wire.metrics({"result": {"metrics": found}}) == {"grad_norm": 1.0}
    assert wire.metrics({"metrics": found}) == {"grad_norm": 1.0}
    assert wire.metrics({}) == {}


@pytest.mark.parametrize(
    ("parse", "payload", "match"),
    [
        (wire.identifier, {"name": "x"}, r"with an id, got an object with the keys \['name'\]"),
        (wire.operation, {"id": "x", "status": "odd"}, "status pending, running, done or error"),
        (wire.operation, [], "got a list"),
        (wire.target_logprobs, {"result": {}}, "expected loss_fn_outputs"),
        (wire.target_logprobs, {"loss_fn_outputs": [{"logprobs": "x"}]}, "list of numbers"),
        (wire.sequences, {"result": {}}, "expected sequences"),
        (wire.sequences, {"sequences": [{"tokens": [1], "logprobs": []}]}, "1 tokens but 0"),
        (wire.prompt_logprobs, {}, "expected prompt_logprobs"),
        (wire.checkpoint_path, {"id": "x"}, "a checkpoint with a path"),
    ],
)
def test_a_reply_that_cannot_be_read_says_what_was_expected(
    parse: Any, payload: Any, match: str
) -> None:
    with pytest.raises(ValueError, match=match):
        parse(payload)


def test_logprobs_come_as_lists_or_tensors() -> None:
    outputs = [{"logprobs": [-1, -2.5]}, {"logprobs": {"data": [-3.0], "dtype": "float32"}}]
    for response in ({"loss_fn_outputs": outputs}, {"result": {"loss_fn_outputs": outputs}}):
        assert wire.target_logprobs(response) == [[-1.0, -2.5], [-3.0]]


def test_nan_and_infinity_have_no_words_in_json() -> None:
    for value in (math.nan, math.inf):
        with pytest.raises(ValueError, match="JSON"):
            wire.dumps({"x": value})
