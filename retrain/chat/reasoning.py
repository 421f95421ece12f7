"""Reasoning in a reply: what comes before the answer, between tags.

The prompt may have opened it (`opener`): then the reply begins inside. Reasoning that is never
closed has no answer.
"""

from __future__ import annotations

from typing import Final

TAGS: Final = {
    "<think>": "</think>",
    "[THINK]": "[/THINK]",
    "<seed:think>": "</seed:think>",
    "<|START_THINKING|>": "<|END_THINKING|>",
}
"""How reasoning begins and ends."""
_OPENINGS: Final = tuple(TAGS)
_TAIL: Final = 32
"""Characters at the end of a prompt in which a tag opens the reply's reasoning."""


def reasoning_opener(text: str) -> str:
    """The end of a prompt that starts the model's reasoning, else ""."""
    end = text[-_TAIL:]
    if not end.rstrip().endswith(_OPENINGS):
        return ""
    return end[max(end.rfind(tag) for tag in _OPENINGS) :]


def closing(opener: str) -> str:
    """The tag that ends the reasoning which `opener` starts."""
    return TAGS.get(opener.strip(), "</think>")


def answer_start(text: str, opener: str = "") -> int:
    """Where the answer starts: at the end of `text` if the reasoning never ends."""
    close = closing(opener)
    if not opener:
        said = text.lstrip()
        if not said.startswith(_OPENINGS):
            return 0
        close = next(TAGS[tag] for tag in _OPENINGS if said.startswith(tag))
    end = text.find(close)
    return len(text) if end < 0 else end + len(close)


def split_reasoning(text: str, opener: str = "") -> tuple[str, str]:
    """The reasoning of a reply without its tags, and its answer."""
    if not opener and not text.lstrip().startswith(_OPENINGS):  # the common case, fast
        return "", text
    start = answer_start(text, opener)
    reasoning = text[:start].strip()
    for tag, close in TAGS.items():
        if reasoning.startswith(tag):
            reasoning = reasoning.removeprefix(tag)
        if reasoning.endswith(close):
            reasoning = reasoning.removesuffix(close)
    return reasoning.strip("\n"), text[start:].lstrip("\n")
