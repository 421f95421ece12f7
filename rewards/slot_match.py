"""The share of the answer's characters that the completion has in their places."""

from __future__ import annotations

from retrain import reward


@reward
def slot_match(completion: str, answer: str) -> float:
    """Always divided by the answer's length: a short completion can't win by stopping early."""
    return sum(a == b for a, b in zip(answer, completion, strict=False)) / len(answer)
