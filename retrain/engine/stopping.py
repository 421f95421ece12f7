"""When a row ends: a stop token, a stop string, its max_tokens, or the model's context.

Stop strings are looked for in the text of a completion's last tokens alone, special tokens
included, and only after a token that can hold a string's last character.
"""

from __future__ import annotations

from collections.abc import Sequence

from retrain.sampler import SamplingParams, Tokenizer
from retrain.types import StopReason

PARTIAL = "\N{REPLACEMENT CHARACTER}"
"""What decodes from a piece of a character's bytes."""


class Stopping:
    """One request's rule, shared by its rows."""

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer,
        always: frozenset[int],
        room: int | None,
    ) -> None:
        """`always` are the model's own stop tokens, `room` what its context leaves (None: any)."""
        self.params = params
        self.tokenizer = tokenizer
        self.stop_ids = always | frozenset(params.stop_token_ids)
        self.limit = params.max_tokens if room is None else min(params.max_tokens, room)
        # A token gives one byte at least, but for a few that give none: hence some to spare.
        self._tail = max((len(text.encode()) for text in params.stop), default=0) + 4
        self._last = {text[-1] for text in params.stop}
        self._may_complete: dict[int, bool] = {}

    def reason(self, token_ids: Sequence[int]) -> StopReason | None:
        """Why a row with these sampled ids ends, None while it goes on."""
        if token_ids[-1] in self.stop_ids or (self.params.stop and self._complete(token_ids)):
            return "stop"
        if len(token_ids) < self.limit:
            return None
        return "length" if self.limit == self.params.max_tokens else "context"

    def _complete(self, token_ids: Sequence[int]) -> bool:
        newest = token_ids[-1]
        if newest not in self._may_complete:
            self._may_complete[newest] = self._holds_a_last_character(newest)
        if not self._may_complete[newest]:
            return False
        text = self.tokenizer.decode(token_ids[-self._tail :])
        return any(stop in text for stop in self.params.stop)

    def _holds_a_last_character(self, token_id: int) -> bool:
        text = self.tokenizer.decode([token_id])
        # Some tokenizers drop a leading space when they decode, hence the space.
        return PARTIAL in text or any(last in text or last.isspace() for last in self._last)
