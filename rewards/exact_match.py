"""1 for the answer, 0 for anything else."""

from __future__ import annotations

from retrain import reward


@reward
def exact_match(completion: str, answer: object, ignore_case: bool = False) -> float:
    """Surrounding white space never counts; case does, unless told otherwise."""
    if answer is None:
        raise ValueError("the prompt has no answer: give its row an `answer`")
    said, right = completion.strip(), str(answer).strip()
    return float(said.lower() == right.lower() if ignore_case else said == right)
