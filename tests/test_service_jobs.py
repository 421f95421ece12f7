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


class FakeSampler:
    """Knows which weights it holds."""

    holds: object = None
    closed = failed = False

    async def __aenter__(self) -> FakeSampler:
        return self

    async def load_weights(self, weights: object, version: int) -> None:
        self.holds = weights
        if weights == "x":
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

    pool = SamplerPool(make, str, limit=2)  # type: ignore[type-var, arg-type]  # fakes
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
        assert first.holds == "a"
    assert await waiting == "c"
    assert len(made) == 2


async def test_the_longest_rested_sampler_is_taken_over(pool, made):
    keys = None, "a", None, "b", "c"  # None is the base model
    assert [await hold(pool, key) for key in keys] == ["None", "a", "None", "b", "c"]
    assert sorted(sampler.holds for sampler in made) == ["b", "c"]


async def test_weights_that_cannot_be_loaded_take_no_place(pool, made):
    for _ in range(3):
        with pytest.raises(ValueError, match="can't be loaded"):
            async with pool.use("x"):
                pass
    assert await hold(pool, "a") == "a"


async def test_p14_what_nobody_needs_any_more_is_closed_once_it_is_idle(pool, made):
    assert await hold(pool, "a") == "a"
    async with pool.use("b") as second:
        await pool.forget(["a", "b", "never"])
        assert [sampler.closed for sampler in made] == [True, False]
        assert second.holds == "b"
    assert second.closed
    assert await hold(pool, "b") == "b"
    assert len(made) == 3


async def test_p14_without_free_memory_an_idle_sampler_is_taken_over(pool, made):
    pool._room = lambda: False
    assert [await hold(pool, key) for key in "abc"] == ["a", "b", "c"]
    assert len(made) == 1


async def test_a_failed_sampler_is_replaced_at_the_next_request(pool, made):
    async with pool.use("a") as first:
        first.failed = True
    assert await hold(pool, "a") == "a"
    assert (len(made), first.closed) == (2, True)


async def hold(pool: SamplerPool, key: str) -> object:
    async with pool.use(key) as sampler:
        return sampler.holds
