"""Weaver's JSON as pure functions: what is read, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from retrain.adapters.weaver import wire


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
        (wire.identifier, {"name": "x"}, r"\['name'\]"),
        (wire.operation, {"id": "x", "status": "odd"}, "status pending, running, done or error"),
        (wire.operation, [], "got a list"),
        (wire.target_logprobs, {"result": {}}, "loss_fn_outputs"),
        (wire.target_logprobs, {"loss_fn_outputs": [{"logprobs": "x"}]}, "list of numbers"),
        (wire.sequences, {"result": {}}, "expected sequences"),
        (wire.sequences, {"sequences": [{"tokens": [1], "logprobs": []}]}, "1 tokens but 0"),
        (wire.prompt_logprobs, {}, "prompt_logprobs"),
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
