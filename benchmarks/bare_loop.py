"""A bare asyncio loop over the mock engine, the baseline for the cost of the pipeline.

It is what an experienced engineer would write on one page for one task: slot workers that sample a
group of completions, gather its rewards and compute its advantages; a bounded queue; a learner.
Engine, prompts, rewards, group size, slots and batches are those of the pipe. It writes no file,
and has no bound on staleness, chat template, environment, deadline, metric, checkpoint or handling
of errors.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from itertools import cycle
from statistics import fmean, pstdev

from benchmarks.mock_engine import MockAdapter
from retrain.sampler import SamplingParams
from retrain.types import Batch, Completion, Denominators, Sample

Row = Mapping[str, str]
Rewards = Callable[[Sequence[Completion], str], Awaitable[Sequence[float]]]


async def train_bare(
    engine: MockAdapter,
    rows: Sequence[Row],
    rewards: Rewards,
    *,
    slots: int,
    groups: int,
    steps: int,
    group_size: int,
    on_step: Callable[[int], None],
) -> None:
    """`steps` steps of `groups` groups, sampled in `slots` slots; `on_step` follows each."""
    done: asyncio.Queue[list[Sample]] = asyncio.Queue(groups)
    source = enumerate(cycle(rows))  # shared: a seed of its own for each group, as in the pipe
    workers = [
        asyncio.create_task(_work(engine, source, rewards, group_size, done)) for _ in range(slots)
    ]
    for step in range(1, steps + 1):
        samples = [sample for _ in range(groups) for sample in await done.get()]
        tokens = sum(sum(sample.loss_mask) for sample in samples)
        await engine.update(Batch(samples, "grpo", {}, Denominators(tokens, len(samples))))
        await engine.publish()
        on_step(step)
    for worker in workers:
        worker.cancel()
    await asyncio.gather(*workers, return_exceptions=True)


async def _work(
    engine: MockAdapter,
    source: Iterator[tuple[int, Row]],
    rewards: Rewards,
    group_size: int,
    done: asyncio.Queue[list[Sample]],
) -> None:
    """Sample one group after the other."""
    for seed, row in source:
        prompt_ids = engine.tokenizer.encode(row["prompt"])
        params = SamplingParams(max_tokens=4, seed=seed)
        completions = await engine.sample(prompt_ids, params, group_size)
        given = await rewards(completions, row["answer"])
        mean, spread = fmean(given), pstdev(given) + 1e-4
        advantages = [(reward - mean) / spread for reward in given]
        await done.put(
            [
                _sample(prompt_ids, completion, advantage)
                for completion, advantage in zip(completions, advantages, strict=True)
            ]
        )


def _sample(prompt_ids: list[int], completion: Completion, advantage: float) -> Sample:
    before, count = len(prompt_ids), len(completion.token_ids)
    return Sample(
        [*prompt_ids, *completion.token_ids],
        [0] * before + [1] * count,
        [0.0] * before + [*completion.logprobs],
        [0.0] * before + [advantage] * count,
        [-1] * before + [completion.version] * count,
    )
