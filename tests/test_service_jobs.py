"""Numbered jobs, what is kept of them, and the pool of live samplers."""

from __future__ import annotations

import asyncio

import pytest

from retrain.service import jobs as jobs_module
from retrain.service.errors import ServiceError
from retrain.service.jobs import Jobs, Lane, RequestJob
from retrain.service.samplers import SamplerPool


async def answer() -> int:
    return 42


async def test_what_came_of_an_old_job_is_forgotten_once_newer_results_fill_the_room(monkeypatch):
    monkeypatch.setattr(jobs_module, "KEPT", 100)
    jobs = Jobs()
    first, second = (jobs.start(RequestJob("forward", size=60), answer) for _ in range(2))
    assert await first.wait(5)
    assert await second.wait(5)
    assert jobs.get(second.id).result == 42
    with pytest.raises(ServiceError) as caught:
        jobs.get(first.id)
    assert caught.value.status == 410
    await jobs.close()


async def test_a_forgotten_job_is_not_run_again():
    jobs = Jobs()
    lane = Lane(jobs)
    job = lane.submit(1, b"body", RequestJob("optim_step"), answer, ordered=True)
    assert await job.wait(5)
    jobs._finished.clear()
    jobs._forgotten = 1
    with pytest.raises(ServiceError, match=job.id):
        lane.submit(1, b"body", RequestJob("optim_step"), answer, ordered=True)
    await jobs.close()


async def test_a_failure_that_nobody_foresaw_reaches_the_client():
    async def broken() -> None:
        raise ZeroDivisionError("oh")

    jobs = Jobs()
    job = jobs.start(RequestJob("forward"), broken)
    assert await job.wait(5)
    assert job.error is not None
    assert (job.error.status, str(job.error)) == (500, "ZeroDivisionError: oh")
    await jobs.close()


async def test_jobs_start_in_the_order_of_their_numbers():
    jobs, ran = Jobs(), []
    lane = Lane(jobs)

    def work(number: int):
        async def run() -> None:
            ran.append(number)

        return run

    made = [lane.submit(n, b"", RequestJob("x"), work(n), ordered=True) for n in (3, 5, 2, 4)]
    assert {job.state for job in made} == {"waiting"}
    made.append(lane.submit(1, b"", RequestJob("x"), work(1), ordered=True))
    assert all([await job.wait(5) for job in made])
    assert ran == [1, 2, 3, 4, 5]
    await jobs.close()


class FakeSampler:
    """Knows which weights it holds."""

    holds: object = None
    closed = failed = False

    async def __aenter__(self) -> FakeSampler:
        return self

    async def load_weights(self, weights: object, version: int) -> None:
        self.holds = weights
        if weights == "X":
            raise ValueError("these can't be loaded")

    async def close(self) -> None:
        self.closed = True


@pytest.fixture
def made() -> list[FakeSampler]:
    return []


@pytest.fixture
async def pool(made):
    def make() -> FakeSampler:
        made.append(FakeSampler())
        return made[-1]

    pool = SamplerPool(make, str.upper, limit=2)  # type: ignore[type-var, arg-type]  # fakes
    yield pool
    await pool.close()
    assert all(sampler.closed for sampler in made)


async def test_a_sampler_keeps_its_weights_while_it_is_used(pool, made):
    async with pool.use("a") as first, pool.use("b"):
        waiting = asyncio.create_task(hold(pool, "c"))
        async with pool.use("a") as again:
            assert again is first
        for _ in range(20):  # turns of the loop in which the wrong thing could happen
            await asyncio.sleep(0)
        assert not waiting.done()
        assert first.holds == "A"
    assert await waiting == "C"
    assert len(made) == 2


async def test_the_longest_rested_sampler_is_taken_over(pool, made):
    assert [await hold(pool, key) for key in "abac"] == ["A", "B", "A", "C"]
    assert sorted(sampler.holds for sampler in made) == ["A", "C"]


async def test_weights_that_cannot_be_loaded_take_no_place(pool, made):
    for _ in range(3):
        with pytest.raises(ValueError, match="can't be loaded"):
            async with pool.use("x"):
                pass
    assert await hold(pool, "a") == "A"


async def test_the_base_model_whose_key_is_none_makes_way_too(made):
    def make() -> FakeSampler:
        made.append(FakeSampler())
        return made[-1]

    pool = SamplerPool(make, repr, limit=2)  # type: ignore[type-var, arg-type]  # fakes
    assert [await hold(pool, key) for key in (None, "a", "b")] == ["None", "'a'", "'b'"]
    assert sorted(sampler.holds for sampler in made) == ["'a'", "'b'"]
    await pool.close()


async def test_p14_what_nobody_needs_any_more_is_closed_once_it_is_idle(pool, made):
    assert await hold(pool, "a") == "A"
    async with pool.use("b") as second:
        await pool.forget(["a", "b", "never"])
        assert [sampler.closed for sampler in made] == [True, False]
        assert second.holds == "B"
    assert second.closed
    assert await hold(pool, "b") == "B"
    assert len(made) == 3


async def test_p14_without_free_memory_an_idle_sampler_is_taken_over(pool, made):
    pool._room = lambda: False
    assert [await hold(pool, key) for key in "abc"] == ["A", "B", "C"]
    assert len(made) == 1


async def test_a_failed_sampler_is_replaced_at_the_next_request(pool, made):
    async with pool.use("a") as first:
        first.failed = True
    assert await hold(pool, "a") == "A"
    assert (len(made), first.closed) == (2, True)


async def hold(pool: SamplerPool, key: str) -> object:
    async with pool.use(key) as sampler:
        return sampler.holds
