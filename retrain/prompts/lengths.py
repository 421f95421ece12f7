"""Prompts that leave too little room in the model's context."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from retrain.prompts.base import PromptSource
from retrain.prompts.preparing import named
from retrain.types import Message

TRIED = 200
"""Rows that are tokenised, the longest ones."""


def long_prompts(
    source: PromptSource, tokens: Callable[[Sequence[Message]], int], limit: int
) -> str:
    """A sentence about the rows of more than `limit` tokens; empty if there are none.

    A token has at least one byte, so a row with fewer bytes than `limit`, less those of the chat
    template, is not tokenised.
    """
    sizes = source.sizes
    if not sizes or limit < 1:
        return ""
    template = tokens(source.checked_row(0).messages)  # at most
    suspects = [row for row, size in enumerate(sizes) if size + template > limit]
    suspects.sort(key=sizes.__getitem__, reverse=True)
    tried = suspects[:TRIED]
    found = sorted(row for row in tried if tokens(source.checked_row(row).messages) > limit)
    if not found:
        return ""
    least = "at least " if len(tried) < len(suspects) else ""
    return (
        f"{least}{len(found)} of {len(sizes)} prompts have more than {limit} tokens: "
        f"{named(source, found)}"
    )
