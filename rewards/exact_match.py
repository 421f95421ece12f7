"""1 if the completion is the answer, else 0."""

from __future__ import annotations

from retrain import reward


@reward
def exact_match(completion: str, answer: object, ignore_case: bool = False) -> float:
    """1 if the completion is the answer, else 0; surrounding whitespace is ignored.

    Args:
        ignore_case: Ignore the case of letters.
    """
    if answer is None:
        raise ValueError("the prompt has no answer: add an `answer` to its row")
    said, right = completion.strip(), str(answer).strip()
    return float(said.lower() == right.lower() if ignore_case else said == right)
