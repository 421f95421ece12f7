"""Given replies as turns: the very ids that the model would have had to sample."""

import json
from functools import cache

import chat_kit
import pytest
from conversation_kit import user
from hypothesis import given
from hypothesis import strategies as st

from retrain.algorithms.batching import segments
from retrain.chat import Chat
from retrain.engine.tiny import tiny_tokenizer
from retrain.environment import ToolSpec
from retrain.rollout.playback import GIVEN, Playback
from retrain.types import Prompt

TEMPLATES = {
    "character": chat_kit.character,
    "chatml": chat_kit.byte_level,
    "trimming": lambda: chat_kit.byte_level(chat_kit.TRIMMING),
    "thinking": lambda: chat_kit.byte_level(chat_kit.THINKING),
    "tools": lambda: chat_kit.byte_level(chat_kit.TOOLS),
}


@cache
def chat_of(name: str) -> Chat:
    return Chat(TEMPLATES[name]())


def said(text):
    return {"role": "assistant", "content": text}


def row(opening, *continuations, **metadata):
    return Prompt("0.3.0", opening, continuations, metadata)


async def played(chat, prompt, max_length=1000):
    return (await Playback(chat, max_length).play(prompt)).trajectories


words = st.text(st.characters(codec="ascii", categories=["L", "N"]), min_size=1, max_size=8)


@pytest.mark.parametrize("name", TEMPLATES)
@given(asked=words, replies=st.lists(words, min_size=1, max_size=3))
async def test_the_trained_tokens_are_the_assistants_and_their_ends_in_the_templates_text(
    name, asked, replies
):
    chat = chat_of(name)
    continuation = [said(replies[0])]
    for reply in replies[1:]:
        continuation += [user("more"), said(reply)]
    [trajectory] = await played(chat, row([user(asked)], continuation))
    assert trajectory.outcome == "ok"
    [sample] = segments(trajectory, 1.0, "r")
    whole = chat.template.render([user(asked), *continuation], generation=False)
    text = chat.tokens._tokenizer.decode(sample.token_ids)
    assert whole.startswith(text)
    assert not whole[len(text) :].strip(), "what follows the last turn's end is white space"
    trained = [t for t, kept in zip(sample.token_ids, sample.loss_mask, strict=True) if kept]
    end = chat.tokens._tokenizer.decode([chat.stop_token_ids[0]])
    assert chat.tokens._tokenizer.decode(trained) == "".join(reply + end for reply in replies)
    assert set(sample.versions) == {GIVEN}
    assert [turn.completion.text for turn in trajectory.turns] == replies


async def test_without_a_template_the_reply_ends_with_eos():
    tokenizer = chat_kit.byte_level(None, eos="<|endoftext|>")
    chat = Chat(tokenizer, template="none")
    [trajectory] = await played(chat, row([user("1, 2, ")], [said("3")]))
    [sample] = segments(trajectory, 1.0, "r")
    assert tokenizer.decode(sample.token_ids) == "1, 2, 3<|endoftext|>"
    assert sample.loss_mask[-1] == 1


async def test_a_template_that_drops_reasoning_makes_a_sample_of_each_turn():
    chat = chat_of("thinking")
    first = said("<think>\nhm\n</think>\n\n5")
    [trajectory] = await played(chat, row([user("2+3?")], [first, user("sure?"), said("yes")]))
    before, after = segments(trajectory, 1.0, "r")
    decode = chat.tokens._tokenizer.decode
    assert "<think>\nhm" in decode(before.token_ids)
    assert "hm" not in decode(after.token_ids), "what the model will have seen by then"


async def test_a_pair_that_the_template_would_cut_in_pieces_is_refused_whole():
    first = said("<think>\nhm\n</think>\n\n5")
    prompt = row([user("2+3?")], [first, user("sure?"), said("yes")], [said("6")])
    trajectories = await played(chat_of("thinking"), prompt)
    assert [t.outcome for t in trajectories] == ["invalid", "invalid"]
    assert "rewrites its earlier turns" in trajectories[1].info["error"]


async def test_a_row_that_is_too_long_fails_whole_and_says_so():
    chat = chat_of("character")
    short, long = await played(chat, row([user("a")], [said("b")], [said("b" * 50)]), 20)
    assert short.outcome == long.outcome == "invalid"
    assert short.info["error"] == (
        "row 3 (from 0): it has 55 tokens, expected at most 20, the limit of the "
        "model or algorithm.max_length. Shorten it; rows are never truncated."
    )


async def test_an_opening_that_the_template_refuses_fails_its_own_row():
    strict = chat_kit.byte_level(
        "{% for m in messages %}{% if m.role == 'critic' %}{{ raise_exception('no critic') }}"
        "{% endif %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    opening = [{"role": "critic", "content": "x"}, user("a")]
    [trajectory] = await played(Chat(strict), row(opening, [said("b")]))
    assert trajectory.outcome == "invalid"
    assert "no critic" in trajectory.info["error"]


CALC = {"name": "calc", "description": "", "parameters": {"properties": {"x": {"type": "string"}}}}
CALL = '<tool_call>{"name": "calc", "arguments": {"x": "2+3"}}</tool_call>'
FUNCTION = {"type": "function", "function": {"name": "calc", "arguments": {"x": "2+3"}}}
CALLS = {"role": "assistant", "content": None, "tool_calls": [FUNCTION]}


@pytest.mark.parametrize(
    "tools", [[CALC], [{"type": "function", "function": CALC}], json.dumps([CALC])]
)
async def test_a_rows_tools_are_shown_and_called_as_in_a_rollout(tools):
    chat = Chat(tiny_tokenizer())
    shown = chat.begin([user("2+3=")], [ToolSpec(**CALC)])
    for asks in (said(CALL), CALLS):
        continuation = [asks, {"role": "tool", "content": "5"}, said("5")]
        [trajectory] = await played(chat, row([user("2+3=")], continuation, tools=tools))
        assert list(trajectory.turns[0].prompt_ids) == list(shown.prompt_ids)
        assert [turn.completion.text for turn in trajectory.turns] == [CALL, "5"]


async def test_calls_that_the_template_would_leave_out_fail_their_row():
    prompt = row([user("2+3=")], [CALLS], tools=[CALC])
    [trajectory] = await played(chat_of("chatml"), prompt)
    assert trajectory.outcome == "invalid"
    assert "tool_calls" in trajectory.info["error"]
