"""Whatever an agent does with its calls, the tokens that were sampled are trained once, as sampled.

`--hypothesis-profile=long` plays 1,000 random agents per template.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from retrain.agents.calls import Calls
from retrain.agents.histories import key_of
from retrain.algorithms.batching import branches, segments
from retrain.chat import Chat
from retrain.engine.losses import sequence_logprobs
from retrain.engine.models import load_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.sampler import SamplingParams
from retrain.types import Prompt, Trajectory
from tests.calls_kit import ADD, SAYINGS, Agent, Scripted, sampled, trained
from tests.test_chat_properties import pair, split

MOVES = ["begin", "extend", "extend", "extend", "edit", "retry", "parallel", "disconnect", "text"]
programs = st.tuples(st.lists(st.sampled_from(MOVES), min_size=2, max_size=10), st.randoms())


def speaker(random: Random, chat: Chat, encode: Callable[[str], list[int]], size: int) -> Any:
    """Ids of a saying, split in any way, or arbitrary ones; ended or not."""

    def say() -> list[int]:
        arbitrary = random.random() < 0.3
        ids = (
            [random.randrange(size) for _ in range(random.randint(0, 6))]
            if arbitrary
            else encode(random.choice(SAYINGS))
        )
        return [*ids, random.choice(chat.stop_token_ids)] if random.random() < 0.7 else ids

    return say


@pytest.mark.parametrize("name", ["tiny_tools", "tools", "thinking", "opened", "none"])
@given(program=programs)
def test_the_tokens_of_a_random_agent_are_trained_once_as_sampled(name: str, program: Any) -> None:
    moves, random = program
    those = pair(name)
    say = speaker(random, those.chat, lambda text: split(those, text), len(those.tokenizer.inner))
    sampler = Scripted(say, those.tokenizer.decode)
    calls = Calls(those.chat, sampler, max_turns=1000, max_tokens=None)
    agent = Agent(calls, random, those.tools)
    asyncio.run(agent.play(moves))

    turns = calls.turns
    taken = {id(turn.completion) for turn in turns}
    answered = [(ids, said) for ids, said in sampler.given if id(said) in taken]
    assert len(answered) == len(turns) == len(taken)
    assert {id(t.completion): list(t.prompt_ids) for t in turns} == {
        id(said): ids for ids, said in answered
    }
    assert trained(calls) == sampled(answered)
    assert all(turns[n].completion is reply.completion for n, reply in agent.said.items())
    for number, reply in agent.expected:
        parent = turns[number].parent
        assert parent is not None
        assert key_of(agent.said[parent].message) == key_of(reply.message)
        if not those.rewrites:
            assert turns[parent].is_start_of(turns[number].prompt_ids)


async def test_a_plain_forward_of_the_trained_rows_gives_the_log_probs_of_the_sampler(
    tmp_path: Any,
) -> None:
    model, tokenizer = load_model(tiny_folder(tmp_path)), tiny_tokenizer()
    chat = Chat(tokenizer)
    params = SamplingParams(max_tokens=8, stop_token_ids=chat.stop_token_ids)
    random, played = Random(7), 0
    async with LocalSampler(model, tokenizer) as sampler:

        async def sample(ids: Any, n: int, key: str, options: Any) -> Any:
            return await sampler.sample(ids, params, n)

        for _ in range(4):
            calls = Calls(chat, sample, 1000, None)
            agent = Agent(calls, random, (ADD,))
            await agent.play(random.choices(MOVES, k=8))
            if not calls.turns:
                continue
            samples = segments(Trajectory(Prompt("0.0.0", ()), calls.turns), 1.0, "r")
            played += len(branches(calls.turns)) < len(calls.turns)
            for one in samples:
                with torch.no_grad():
                    again = sequence_logprobs(model, one.token_ids, torch.device("cpu"))
                pairs = zip(one.logprobs, again, one.loss_mask, strict=True)
                assert max(abs(a - b) for a, b, kept in pairs if kept) < 1e-4
    assert played
