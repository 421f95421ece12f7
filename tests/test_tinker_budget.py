"""The parts of the Tinker client without a server: chunks, metrics, budgets and pauses."""

from __future__ import annotations

import asyncio
import math

import pytest

from retrain.adapters.remote.datums import chunks
from retrain.adapters.tinker import Datum, Tensor
from retrain.adapters.tinker.data import check_data, merge
from retrain.adapters.tinker.limits import Backpressure
from retrain.supervision.sharing import Capacity
from retrain.wire.tinker.values import ForwardBackwardOutput
from tests.test_tinker_client import datum


def test_chunks_keep_to_both_limits_and_a_huge_datum_goes_alone() -> None:
    small, huge = datum(1, 2), datum(*range(100))
    parts = chunks([small, small, small, huge, small], lambda datum: datum.size, 100, 2)
    assert [len(part) for part in parts] == [2, 1, 1, 1]
    assert chunks([small, small, small], lambda datum: datum.size, 2 * small.size) == [
        [small, small],
        [small],
    ]
    assert chunks([], lambda datum: datum.size, 100) == []


def test_metrics_merge_by_their_reduction_and_odd_names_do_no_harm() -> None:
    def part(datums: int, **metrics: float) -> ForwardBackwardOutput:
        return ForwardBackwardOutput(
            [{}] * datums, {name.replace("__", ":"): value for name, value in metrics.items()}
        )

    first = part(1, a__sum=1, b__mean=1, c__min=1, d__max=1, plain=1, only_here__sum=1)
    merged = merge([first, part(3, a__sum=2, b__mean=5, c__min=0, d__max=4, plain=5)])
    assert len(merged.outputs) == 4
    assert merged.metrics == {"a:sum": 3, "b:mean": 4, "c:min": 0, "d:max": 4, "plain": 4}


async def test_a_budget_serves_in_order_and_a_cancelled_waiter_costs_nothing() -> None:
    budget = Capacity(2)
    order: list[str] = []

    async def take(name: str, units: int) -> None:
        async with budget.take(units):
            order.append(name)

    async with budget.take(1):
        large = asyncio.create_task(take("large", 9))
        gone = asyncio.create_task(take("gone", 1))
        small = asyncio.create_task(take("small", 1))
        await asyncio.sleep(0)
        gone.cancel()
        await asyncio.sleep(0)
        assert order == [], "a small request overtook the large one"
    await asyncio.gather(large, small, gone, return_exceptions=True)
    assert order == ["large", "small"]
    async with asyncio.timeout(30), budget.take(2):
        pass


async def test_a_pause_is_longer_after_a_large_prompt(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)
        pressure._resume = 0.0

    monkeypatch.setattr(asyncio, "sleep", sleep)
    pressure = Backpressure(1, 10)
    for tokens, seconds in ((10, 1.0), (20_000, 5.0)):
        pressure.pause(tokens, None)
        await pressure.pause_over()
        assert slept.pop() == pytest.approx(seconds, abs=0.1)


@pytest.mark.parametrize(
    ("tokens", "weights"),
    [([], []), ([1], [math.nan]), ([1], [1e39]), ([-1], [1.0]), ([1, 2], [1.0]), ([2**31], [1.0])],
)
def test_data_that_a_service_could_not_read_are_not_sent(tokens, weights) -> None:
    with pytest.raises(ValueError, match="datum 0: "):
        check_data([Datum(tokens, {"weights": Tensor(weights)})])
    with pytest.raises(ValueError, match="the batch is empty"):
        check_data([])
    check_data([Datum([1], {"weights": Tensor([0.5])})])
