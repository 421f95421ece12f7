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
        self._walked: dict[int, tuple[Sequence[Message], list[int]]] = {}
        """The last history that began with a message, and the place after each message."""

    def find(self, opening: Key, messages: Sequence[Message]) -> tuple[int, int, Said | None]:
        """The place of a history, for `add`; the index of its last reply, and where that is from.

        `opening` is what histories must share besides their messages, such as the tools.
        """
        backwards = range(len(messages) - 1, -1, -1)
        last = next((i for i in backwards if messages[i]["role"] == "assistant"), -1)
        places = self._walk(opening, messages)
        found = self._closest(places[last], messages[: last + 1]) if last >= 0 else None
        return places[-1], last, found

    def _walk(self, opening: Key, messages: Sequence[Message]) -> list[int]:
        """The place after each message.

        Most calls repeat the history of an earlier call that began with the same message. What is
        equal in form says the same, so only the rest is compared by what it says.
        """
        root = self._next(0, opening)
        start = self._next(root, key_of(messages[0])) if messages else root
        known, places = self._walked.get(start, ((), []))
        places = places[: _equal_at_start(known, messages)]
        for message in messages[len(places) :]:
            places.append(self._next(places[-1] if places else root, key_of(message)))
        self._walked[start] = tuple(messages), places
        return places or [root]

    def add(self, place: int, message: Message, said: Said) -> None:
        """A reply to the history at `place`, as the agent gets it."""
        self._replies.setdefault(self._next(place, key_of(message)), []).append(said)

    def _next(self, place: int, key: Key) -> int:
        return self._places.setdefault((place, key), len(self._places) + 1)

    def _closest(self, place: int, messages: Sequence[Message]) -> Said | None:
        """Of the replies that say the same, the one with the same ids, else the latest."""
        known = self._replies.get(place, ())
        fits = [said for said in known if _has_reasoning(said, messages)]
        return max(fits, key=lambda said: (_equal_ids(said, messages), said.turn), default=None)


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


def _equal_at_start(known: Sequence[Message], given: Sequence[Message]) -> int:
    """How many messages are equal, with arguments of calls of the same types: True equals 1."""
    for index, (one, other) in enumerate(zip(known, given, strict=False)):
        if one != other or ("tool_calls" in one and repr(one) != repr(other)):
            return index
    return min(len(known), len(given))


def _has_reasoning(said: Said, given: Sequence[Message]) -> bool:
    """Whether the reasoning of an equal history is that of `said`, where it was not dropped."""
    for index, theirs in enumerate(given):
        if "</think>" in theirs["content"] or theirs.get("reasoning_content"):
            reasoning = theirs["role"] == "assistant" and _reasoning(theirs)
            own = said.thoughts.get(index) or _reasoning(said.conversation.messages[index])
            if reasoning and reasoning != own.strip():
                return False
    return True


def _equal_ids(said: Said, given: Sequence[Message]) -> int:
    """The replies of two equal histories with equal ids of calls."""
    pairs = zip(said.conversation.messages, given, strict=True)
    return sum([m["role"] == "assistant" and _ids(m) == _ids(theirs) for m, theirs in pairs])


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
