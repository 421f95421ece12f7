"""Whatever a model samples and an environment answers, tokens stay where they were sampled.

Each pair of tokenizer and template plays conversations of arbitrary ids (non-canonical encodings,
special tokens, halves of UTF-8 characters, nothing at all) and of canonical ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from retrain.algorithms.batching import segments
from retrain.chat import Chat, Conversation
from retrain.engine.tiny import tiny_tokenizer
from retrain.environment import ToolSpec
from retrain.types import Completion, Message, Prompt, Trajectory, Turn
from tests import chat_kit

ADD = ToolSpec("add", "Add.", {"type": "object", "properties": {"a": {}, "b": {}}})
NONCE = "<zq>"  # stands in every reply of the encoding test, and nowhere else

relaxed = settings(
    max_examples=24,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)


class Watched:
    """A tokenizer that keeps the texts it encodes and refuses to tokenise a template's output."""

    def __init__(self, tokenizer: Any) -> None:
        self.inner = tokenizer
        self.eos_token_id = tokenizer.eos_token_id
        self.chat_template = tokenizer.chat_template
        self.encoded: list[str] = []

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        self.encoded.append(text)
        return self.inner.encode(text, add_special_tokens=add_special_tokens)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return self.inner.decode(token_ids, skip_special_tokens=skip_special_tokens)

    def apply_chat_template(self, messages: Any, *, tokenize: bool = True, **options: Any) -> str:
        assert not tokenize
        return self.inner.apply_chat_template(messages, tokenize=False, **options)


@dataclass
class Pair:
    """A tokenizer with its template, and what may be expected of them."""

    tokenizer: Any
    template: str = "auto"
    rewrites: bool = False
    tools: tuple[ToolSpec, ...] = ()
    ascii_only: bool = False
    chat: Chat = field(init=False)

    def __post_init__(self) -> None:
        self.tokenizer = Watched(self.tokenizer)
        self.chat = Chat(self.tokenizer, template=self.template)

    def rendered(self, messages: Sequence[Message]) -> str:
        """The template's own rendering of the messages."""
        if self.template == "none":
            return "".join(m["content"] for m in messages)
        tools = [tool.as_template() for tool in self.tools] or None
        return self.tokenizer.inner.apply_chat_template(
            messages, tools=tools, add_generation_prompt=True, tokenize=False
        )


@cache
def pair(name: str) -> Pair:
    tools = chat_kit.byte_level(chat_kit.TOOLS, eos="<|endoftext|>")
    opened = chat_kit.CHATML.replace("assistant\n", "assistant\n<think>\n")
    return {
        "tiny": lambda: Pair(tiny_tokenizer(), ascii_only=True),
        "tiny_tools": lambda: Pair(tiny_tokenizer(), tools=(ADD,), ascii_only=True),
        "character": lambda: Pair(chat_kit.character(), ascii_only=True),
        "chatml": lambda: Pair(chat_kit.byte_level()),
        "trimming": lambda: Pair(chat_kit.byte_level(chat_kit.TRIMMING)),
        "thinking": lambda: Pair(chat_kit.byte_level(chat_kit.THINKING), rewrites=True),
        "opened": lambda: Pair(chat_kit.byte_level(opened), rewrites=True),
        "tools": lambda: Pair(tools, tools=(ADD,)),
        "none": lambda: Pair(chat_kit.byte_level(None), template="none"),
    }[name]()


EXTENDING = ["tiny", "tiny_tools", "character", "chatml", "trimming", "tools", "none"]
NAMES = [*EXTENDING, "thinking", "opened"]
VERBATIM = [name for name in EXTENDING if name not in {"trimming", "none"}]

CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
SNIPPETS = ["The answer is 42.", "<think>", "</think>", "\n", " ", "<|im_end|>", "<|end|>", "lo",
            CALL, '<tool_call>{"arguments":{"b":2.50},"name":"add"}</tool_call>',
            "<tool_call>{oops}</tool_call>", "<tool_call>", "</tool_call>", "x"]  # fmt: skip
spoken = st.lists(
    st.sampled_from(SNIPPETS) | st.text(st.characters(codec="utf-8"), max_size=8), max_size=6
).map("".join)
roles = st.sampled_from(["user", "tool", "system"])


@st.composite
def observations(draw: st.DrawFn, ascii_only: bool) -> list[Message]:
    letters = (
        st.characters(min_codepoint=32, max_codepoint=126)
        if ascii_only
        else st.characters(codec="utf-8")
    )
    text = st.text(letters, min_size=1, max_size=12)
    drawn = draw(st.lists(st.tuples(roles, text), min_size=1, max_size=2))
    return [{"role": role, "content": content} for role, content in drawn]


def say(pair: Pair, ids: Sequence[int], version: int = 0) -> Completion:
    """A completion of the sampler: `ids`, with log-probs that tell one token from another."""
    text = pair.tokenizer.decode(ids, skip_special_tokens=True)
    logprobs = [-(version + 1) - i / 1000 for i in range(len(ids))]
    return Completion(list(ids), logprobs, text, "stop", version)


def sampled(draw: st.DrawFn, pair: Pair) -> list[int]:
    """Arbitrary ids, or a text split in a way that no encoder would choose; maybe ended."""
    size = len(pair.tokenizer.inner)
    arbitrary = st.lists(st.integers(0, size - 1), max_size=12)
    ids = draw(arbitrary | spoken.map(lambda text: split(pair, text)))
    if draw(st.booleans()):
        ids = [*ids, draw(st.sampled_from(pair.chat.stop_token_ids))]
    return ids


def split(pair: Pair, text: str) -> list[int]:
    """The text encoded letter by letter: never the canonical way, for a BPE."""
    encode = pair.tokenizer.inner.encode
    return [i for letter in text for i in encode(letter, add_special_tokens=False)]


def extends(previous: Sequence[int], new: Sequence[int]) -> bool:
    return list(new[: len(previous)]) == list(previous)


def open_conversation(draw: st.DrawFn, pair: Pair) -> Conversation:
    opening: list[Message] = [{"role": "user", "content": "What is 17 + 25?"}]
    if draw(st.booleans()):
        opening.insert(0, {"role": "system", "content": "Be brief."})
    return pair.chat.begin(opening, pair.tools)


def played(
    data: st.DataObject,
    pair: Pair,
    ids_of: Callable[[st.DrawFn, Pair], list[int]] = sampled,
    turns: int = 3,
) -> Iterator[tuple[Conversation, list[int], Completion, list[Message]]]:
    """A conversation after each turn: its prompt before it, the reply, and what was observed."""
    conversation = open_conversation(data.draw, pair)
    for version in range(data.draw(st.integers(1, turns))):
        before, reply = conversation.prompt_ids, say(pair, ids_of(data.draw, pair), version)
        conversation.reply(reply)
        observed = data.draw(observations(pair.ascii_only))
        conversation.observe(observed)
        yield conversation, before, reply, observed


@pytest.mark.parametrize("name", NAMES)
@relaxed
@given(data=st.data())
def test_a_prompt_extends_the_sampled_ids_or_is_the_template_s_own_rendering(
    name: str, data: st.DataObject
) -> None:
    """And the samples that are trained have the masks, log-probs and versions of these tokens."""
    chosen, turns = pair(name), []
    for conversation, before, reply, observation in played(data, chosen, turns=4):
        turns.append(Turn(before, reply))
        rendered = chosen.rendered(conversation.messages)
        anew = chosen.tokenizer.inner.encode(rendered, add_special_tokens=False)
        assert extends([*before, *reply.token_ids], conversation.prompt_ids) or (
            chosen.rewrites and conversation.prompt_ids == anew
        )
        if name in VERBATIM:
            behind = conversation.prompt_ids[len(before) + len(reply.token_ids) :]
            text = chosen.tokenizer.decode(behind)
            assert rendered.endswith(text)
            assert all(m["content"] in text for m in observation)
    samples = segments(Trajectory(Prompt("0.0.0", []), turns), 1.0, "0.0.0#0")
    trained = [
        (token, logprob, version)
        for s in samples
        for token, mask, logprob, version in zip(
            s.token_ids, s.loss_mask, s.logprobs, s.versions, strict=True
        )
        if mask
    ]
    expected = [
        (token, logprob, turn.completion.version)
        for turn in turns
        for token, logprob in zip(turn.completion.token_ids, turn.completion.logprobs, strict=True)
    ]
    assert trained == expected
    assert chosen.rewrites or len(samples) <= 1


@pytest.mark.parametrize("name", EXTENDING)
@relaxed
@given(data=st.data())
def test_canonical_replies_make_exactly_the_template_s_rendering(
    name: str, data: st.DataObject
) -> None:
    chosen = pair(name)
    tokenizer = chosen.tokenizer.inner
    letters = st.characters(min_codepoint=33, max_codepoint=126)

    def canonical(draw: st.DrawFn, _: Pair) -> list[int]:
        said = draw(st.text(letters, max_size=20).filter(lambda text: "<" not in text))
        ids = tokenizer.encode(said, add_special_tokens=False)
        ended = draw(st.booleans()) and name != "none"
        return [*ids, chosen.chat.stop_token_ids[-1]] if ended else ids

    for conversation, *_ in played(data, chosen, canonical):
        assert tokenizer.decode(conversation.prompt_ids) == chosen.rendered(conversation.messages)


@relaxed
@given(a=st.integers(), b=st.floats(allow_nan=False, allow_infinity=False), said=st.booleans())
def test_a_canonical_tool_call_makes_exactly_the_template_s_rendering(
    a: int, b: float, said: bool
) -> None:
    chosen = pair("tools")
    conversation = chosen.chat.begin([{"role": "user", "content": "17 + 25?"}], chosen.tools)
    call = json.dumps({"name": "add", "arguments": {"a": a, "b": b}})
    reply = ("I add.\n" if said else "") + f"<tool_call>\n{call}\n</tool_call>"
    ids = [*split(chosen, reply), chosen.chat.stop_token_ids[-1]]
    action = conversation.reply(say(chosen, ids))
    [read] = action.tool_calls
    assert (read.name, dict(read.arguments), read.error) == ("add", {"a": a, "b": b}, None)
    conversation.observe([{"role": "tool", "content": "42", "tool_call_id": read.id}])
    decoded = chosen.tokenizer.decode(conversation.prompt_ids)
    assert decoded == chosen.rendered(conversation.messages)


@pytest.mark.parametrize("name", EXTENDING)
@relaxed
@given(data=st.data())
def test_sampled_text_is_never_encoded(name: str, data: st.DataObject) -> None:
    chosen = pair(name)

    def marked(draw: st.DrawFn, pair: Pair) -> list[int]:
        pair.tokenizer.encoded.clear()
        return [*split(pair, NONCE), *sampled(draw, pair)]

    for _ in played(data, chosen, marked):
        assert chosen.tokenizer.encoded
        assert not any(NONCE in text for text in chosen.tokenizer.encoded)
