"""The share of the answer's characters that the completion has in their places."""

from __future__ import annotations

from retrain import reward


@reward
def slot_match(completion: str, answer: object) -> float:
    """Always divided by the answer's length: a short completion can't win by stopping early."""
    if answer is None or not str(answer):
        raise ValueError("the prompt has no answer: give its row an `answer`")
    right = str(answer)
    return sum(a == b for a, b in zip(right, completion, strict=False)) / len(right)
