"""The one shift function: what each stream's value belongs to, over random samples."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from retrain.adapters.remote.datums import shift
from retrain.errors import NonFiniteError
from retrain.types import Sample


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(2, 30))

    def stream(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=length, max_size=length))

    finite = st.floats(-50, 50)
    return Sample(
        token_ids=stream(st.integers(0, 200_000)),
        loss_mask=stream(st.integers(0, 1)),
        logprobs=stream(finite),
        advantages=stream(finite),
        versions=stream(st.integers(-1, 9)),
        streams={"reference_logprobs": stream(finite)},
        group_id="0.0.0",
    )


@given(samples())
def test_every_target_keeps_its_own_values_and_follows_its_own_context(sample: Sample) -> None:
    datum = shift(sample)
    assert [datum.inputs[0], *datum.targets] == list(sample.token_ids)
    assert [*datum.inputs, datum.targets[-1]] == list(sample.token_ids)
    for t in range(len(datum.targets)):
        kept = sample.loss_mask[t + 1]
        assert datum.mask[t] == kept
        assert datum.logprobs[t] == (sample.logprobs[t + 1] if kept else 0.0)
        assert datum.advantages[t] == (sample.advantages[t + 1] if kept else 0.0)
        assert datum.streams["reference_logprobs"][t] == sample.streams["reference_logprobs"][t + 1]


@pytest.mark.parametrize("name", ["logprobs", "advantages"])
def test_a_trained_value_that_is_not_finite_is_refused(name: str) -> None:
    sample = Sample([5, 6], [0, 1], [0.0, -0.1], [0.0, 1.0], [0, 0], group_id="0.3.0")
    assert shift(replace(sample, loss_mask=[1, 0], **{name: [0.0, math.nan]})).mask == [0.0]
    with pytest.raises(NonFiniteError, match=rf"the {name} of a sample of group '0\.3\.0'"):
        shift(replace(sample, **{name: [0.0, math.inf]}))
