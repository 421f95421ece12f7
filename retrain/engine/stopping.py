"""When a row ends: a stop token, a stop string, its max_tokens, or the model's context.

Stop strings are searched only in the text of the last tokens, special tokens included, and only
after a token that can contain the last character of one.
"""

from __future__ import annotations

from collections.abc import Sequence

from retrain.sampler import PARTIAL, SamplingParams, Tokenizer
from retrain.types import StopReason


class Stopping:
    """The rule of a request, shared by its rows."""

    def __init__(
        self,
        params: SamplingParams,
        tokenizer: Tokenizer,
        always: frozenset[int],
        room: int | None,
    ) -> None:
        """`always` are the model's stop tokens; `room` is the rest of its context."""
        self.params = params
        self.tokenizer = tokenizer
        self.stop_ids = always | frozenset(params.stop_token_ids)
        self.limit = params.max_tokens if room is None else min(params.max_tokens, room)
        # Nearly every token has at least one byte; 4 more tokens for those that have none.
        self._tail = max((len(text.encode()) for text in params.stop), default=0) + 4
        self._last = {text[-1] for text in params.stop}
        self._may_complete: dict[int, bool] = {}

    def reason(self, token_ids: Sequence[int]) -> StopReason | None:
        """Why a row with these sampled ids ends; None if it continues."""
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
        # Whitespace may be lost: some tokenizers drop a leading space when they decode.
        return PARTIAL in text or any(last in text or last.isspace() for last in self._last)
