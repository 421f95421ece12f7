"""The simulated fleet of `benchmarks.fleet`: virtual time, so exact bars."""

import asyncio
import logging

import pytest

from benchmarks.fleet import ROWS, Case, play
from benchmarks.fleet_engine import TOKENS, Curve, Engine
from tests.chaos.judgement import judge_log
from tests.chaos.virtual_time import VirtualLoop


@pytest.fixture(autouse=True)
def _quiet():
    logging.disable(logging.WARNING)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.parametrize(
    ("engines", "target", "bound", "least"),
    [(1, 4, 8, 0.9), (2, 4, 12, 0.93), (2, 1, 3, 0.55), (1, 0, 0, 0.25)],
)
def test_a_fleet_reaches_its_share_of_the_limit(engines, target, bound, least):
    outcome = play(Case(engines, target, bound, steps=6))
    assert least <= outcome.fraction < 1.1
    assert outcome.staleness_max <= bound
    assert outcome.wrong == []


@pytest.mark.parametrize("mode", ["adapter", "keep_cache", "recompute", "drain"])
def test_after_deaths_of_engines_nothing_is_trained_twice_or_by_base_weights(mode, tmp_path):
    fleet = {"in_flight": mode, "failures": 200.0}
    case = Case(3, 2, 4, per_engine=16, steps=12, fleet=fleet)
    outcome = play(case, tmp_path / "run")
    book, _ = judge_log(tmp_path / "run", case.config(tmp_path / "run"), ROWS)
    assert outcome.wrong == book.wrong == []
    assert outcome.staleness_max <= 4
    assert outcome.deaths > 2
    assert outcome.lost > 0


def test_the_same_case_gives_the_same_outcome():
    case = Case(2, 1, 3, per_engine=16, turns=3, steps=4, fleet={"failures": 200.0})
    assert play(case) == play(case)


CURVE = Curve(overhead=0.0, weights=1.0, compute=0.01, attention=0.5, max_rows=2)
"""A step takes 1.5 s for one row and 2 s for two; the 64 tokens of an id TOKENS / 100 s."""


def timed(play):
    """The result of `play(engine)`, and the seconds of virtual time until it was there."""

    async def run():
        result = await play(Engine(CURVE, salted=False))
        return result, asyncio.get_running_loop().time()

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


PREFILL = TOKENS * CURVE.compute


@pytest.mark.parametrize(
    ("prompts", "lengths", "seconds"),
    [
        ([[1]], [10], PREFILL + 15),
        ([[1]], [10, 10], PREFILL + 20),  # the second row finds the prompt in the cache
        ([[1], [2]], [10], 2 * PREFILL + 20),
        ([[1]], [10, 20], PREFILL + 20 + 15),  # the second row is alone at the end
        ([[1]], [10, 10, 10], PREFILL + 20 + 15),  # and the third waits for a place
    ],
)
def test_an_engine_takes_the_time_of_its_curve(prompts, lengths, seconds):
    async def both(engine):
        await asyncio.gather(*(engine.sample(prompt, lengths) for prompt in prompts))

    assert timed(both)[1] == pytest.approx(seconds)
