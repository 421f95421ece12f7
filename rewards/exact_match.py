"""1 for the answer, 0 for anything else."""

from __future__ import annotations

from retrain import reward


@reward
def exact_match(completion: str, answer: str, ignore_case: bool = False) -> float:
    """Surrounding white space never counts; case does, unless told otherwise."""
    said, right = completion.strip(), str(answer).strip()
    return float(said.lower() == right.lower() if ignore_case else said == right)
