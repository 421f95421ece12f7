"""Which earlier reply of an agent's rollout a chat history continues.

Two histories are equal if their messages say the same. The form doesn't count: how tool calls are
serialised, the order of keys, 1 or 1.0, the ids of tool calls, whitespace around a reply, reasoning
that was dropped. Reasoning that was changed counts, as any other edit does.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from retrain.chat import Conversation
from retrain.chat.reasoning import split_reasoning
from retrain.chat.tokens import TurnTokens
from retrain.types import Message, Turn

Key = tuple[Any, ...]


class Said(NamedTuple):
    """A reply that later calls may continue."""

    turn: int
    conversation: Conversation
    """After the reply."""
    thoughts: Mapping[int, str]
    """The reasoning that the agent got, by the index of the reply in the conversation."""


class Histories:
    """The histories of a rollout's calls as a trie: each message is stored once."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, Key], int] = {}
        self._replies: dict[int, list[Said]] = {}

    def find(self, opening: Key, messages: Sequence[Message]) -> tuple[int, int, Said | None]:
        """The place of a history, for `add`; the index of its last reply, and where that is from.

        `opening` is what histories must share besides their messages, such as the tools.
        """
        place, found = self._next(0, opening), None
        last = max([i for i, m in enumerate(messages) if m["role"] == "assistant"], default=-1)
        for index, message in enumerate(messages):
            place = self._next(place, key_of(message))
            if index == last:
                found = self._closest(place, messages[: last + 1])
        return place, last, found

    def add(self, place: int, message: Message, said: Said) -> None:
        """A reply to the history at `place`, as the agent gets it."""
        self._replies.setdefault(self._next(place, key_of(message)), []).append(said)

    def _next(self, place: int, key: Key) -> int:
        return self._places.setdefault((place, key), len(self._places) + 1)

    def _closest(self, place: int, messages: Sequence[Message]) -> Said | None:
        """Of the replies that say the same, the one with the same ids, else the latest."""
        fits = [
            (likeness, said.turn, said)
            for said in self._replies.get(place, ())
            if (likeness := _likeness(said, messages)) is not None
        ]
        return max(fits)[-1] if fits else None


class Texts:
    """The prompts of text completions with their continuations."""

    def __init__(self, tokens: TurnTokens) -> None:
        self._tokens = tokens
        self._known: list[tuple[str, str, int]] = []  # seat, prompt and continuation, turn

    def find(
        self, seat: str, prompt: str | Sequence[int], turns: Sequence[Turn]
    ) -> tuple[int | None, list[int], str, str]:
        """The turn that a prompt continues, its ids, the text that it adds, and its whole text.

        Raises ValueError for a string or a token id that the tokenizer has no tokens for.
        """
        tokens = self._tokens
        if isinstance(prompt, str):
            known = [(s, t, n) for s, t, n in self._known if s == seat and prompt.startswith(t)]
            if not known:
                return None, tokens.encode_text(prompt), prompt, prompt
            _, text, number = max(known, key=lambda k: len(k[1]))
            added = prompt[len(text) :]
            return number, tokens.extended(turns[number], added), added, prompt
        ids = list(prompt)
        if wrong := tokens.unknown(ids):
            raise ValueError(f"got the token id {wrong[0]}, which the tokenizer doesn't have")
        found = [n for n, turn in enumerate(turns) if turn.seat == seat and turn.is_start_of(ids)]
        if not found:
            return None, ids, tokens.text(ids), tokens.text(ids)
        number = max(found, key=lambda n: turns[n].length)
        return number, ids, tokens.text(ids[turns[number].length :]), tokens.text(ids)

    def add(self, seat: str, prompt: str, said: str, turn: int) -> None:
        """A completion; one without text looks like a call that repeats its prompt."""
        if said:
            self._known.append((seat, prompt + said, turn))


def key_of(message: Message) -> Key:
    """Equal for messages that say the same."""
    role, content = message["role"], message["content"]
    if role != "assistant":
        return role, content, "" if role == "tool" else message.get("name", "")
    calls = [call["function"] for call in message.get("tool_calls", ())]
    spelled = [(call["name"], _hashable(call["arguments"])) for call in calls]
    return role, split_reasoning(content)[1].strip(), *spelled


def renamed(added: Sequence[Message], given: Message, own: Message) -> list[Message]:
    """Tool messages with the ids of our tool calls instead of those that the agent made up."""
    ids = dict(zip(_ids(given), _ids(own), strict=False))
    return [
        Message(**{**m, "tool_call_id": ids[m["tool_call_id"]]})
        if m.get("tool_call_id") in ids
        else m
        for m in added
    ]


def _likeness(said: Said, given: Sequence[Message]) -> int | None:
    """The replies of two equal histories with equal ids of calls; None if reasoning was changed."""
    alike = 0
    for index, (mine, theirs) in enumerate(zip(said.conversation.messages, given, strict=True)):
        if theirs["role"] == "assistant":
            reasoning = _reasoning(theirs)
            if reasoning and reasoning != (said.thoughts.get(index) or _reasoning(mine)).strip():
                return None
            alike += _ids(mine) == _ids(theirs)
    return alike


def _reasoning(message: Message) -> str:
    return (message.get("reasoning_content") or split_reasoning(message["content"])[0]).strip()


def _ids(message: Message) -> list[str]:
    return [call.get("id", "") for call in message.get("tool_calls", ())]


def _hashable(value: Any) -> Any:
    """Equal for equal JSON values; 1 and 1.0 are one number, as in JavaScript."""
    if isinstance(value, Mapping):
        return frozenset([(key, _hashable(one)) for key, one in value.items()])
    if isinstance(value, list | tuple):
        return tuple([_hashable(one) for one in value])
    return (value,) if isinstance(value, bool) else value  # else True would equal 1
