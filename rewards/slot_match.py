"""The fraction of the answer's characters that the completion has at the same positions."""

from __future__ import annotations

from retrain import reward


@reward
def slot_match(completion: str, answer: object) -> float:
    """The fraction of the answer's characters that are right; missing characters count as wrong."""
    if answer is None or not str(answer):
        raise ValueError("the prompt has no answer: add an `answer` to its row")
    right = str(answer)
    return sum(a == b for a, b in zip(right, completion, strict=False)) / len(right)
