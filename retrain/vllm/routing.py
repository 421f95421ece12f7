"""Which server gets a request: the least loaded, or the one that has the prompt in its cache.

Pure: no HTTP and no clock. The turns of a rollout, and prompts that begin alike, go to the server
that computed their beginning, as long as it is not much more loaded than the least loaded one.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence

BLOCK = 64
"""Tokens per block of a prompt; a shorter beginning is not recognised."""
COVERED = 0.5
"""The part of a prompt that must be in a server's cache to prefer that server. A system prompt that
all prompts share is a smaller part, and must not bring them all to one server."""
SLACK = 1.25
"""A preferred server may have this many times the rows of the least loaded one,"""
SPARE = 16
"""and this many rows more."""
REMEMBERED = 200_000
"""Blocks whose server is known: 12.8 million tokens."""


class Router:
    """Chooses servers, which are numbers from 0."""

    def __init__(self, servers: int, *, remembered: int = REMEMBERED) -> None:
        self.rows = [0] * servers
        """The rows in flight at each server."""
        self._holders: OrderedDict[int, int] = OrderedDict()
        """The server of each block by its chained hash; the least recently used first."""
        self._remembered = remembered
        self._turn = 0

    def choose(self, prompt_ids: Sequence[int], candidates: Collection[int]) -> int:
        """The server for a request; `candidates` are those that are up, at least one."""
        if len(candidates) == 1:
            [only] = candidates
            return only
        least = min(self.rows[server] for server in candidates)
        blocks = list(chained(prompt_ids))
        held = self._holder(blocks, len(prompt_ids))
        if held in candidates and self.rows[held] <= least * SLACK + SPARE:
            chosen = held
        else:
            chosen = self._next_of([s for s in candidates if self.rows[s] == least])
        self._remember(blocks, chosen)
        return chosen

    def forget(self, server: int) -> None:
        """The server lost its cache."""
        for block in [block for block, holder in self._holders.items() if holder == server]:
            del self._holders[block]

    def _holder(self, blocks: Sequence[int], tokens: int) -> int:
        """The server with the longest known beginning; -1 if that is short."""
        for index in range(len(blocks) - 1, -1, -1):
            if (index + 1) * BLOCK < tokens * COVERED:
                break
            if blocks[index] in self._holders:
                return self._holders[blocks[index]]
        return -1

    def _next_of(self, equal: Sequence[int]) -> int:
        """Equally loaded servers take turns."""
        self._turn += 1
        return min(equal, key=lambda server: (server - self._turn) % len(self.rows))

    def _remember(self, blocks: Sequence[int], server: int) -> None:
        for block in blocks:
            self._holders[block] = server
            self._holders.move_to_end(block)
        while len(self._holders) > self._remembered:
            self._holders.popitem(last=False)


def chained(prompt_ids: Sequence[int]) -> Iterator[int]:
    """A hash per whole block, of all tokens up to its end."""
    ids = array("q", prompt_ids)
    value = 0
    for end in range(BLOCK, len(ids) + 1, BLOCK):
        value = hash((value, ids[end - BLOCK : end].tobytes()))
        yield value
