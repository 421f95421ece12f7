"""1 if the completion contains the wanted strings, else 0."""

from __future__ import annotations

import re
from typing import Literal

from retrain import RewardCalculator, Row, Trajectory


class Contains(RewardCalculator):
    """1 if the completion contains one of the strings, or all of them, else 0.

    Args:
        strings: A string or a list of strings; by default the row's answer, which may be a list.
        match: Whether one of the strings is enough, or all are needed.
        ignore_case: Ignore the case of letters.
        words: Match whole words only: `4` is not found in `14`.
    """

    def __init__(
        self,
        strings: str | list[str] | None = None,
        match: Literal["any", "all"] = "any",
        ignore_case: bool = False,
        words: bool = False,
    ) -> None:
        self.needs_answer = strings is None
        self.strings = None if strings is None else _listed(strings)
        self.enough = any if match == "any" else all
        self.flags = re.IGNORECASE if ignore_case else 0
        self.edges = (r"(?<!\w)", r"(?!\w)") if words else ("", "")

    def check_row(self, row: Row) -> None:
        if self.strings is None and row.answer is not None:
            _listed(row.answer)

    async def calculate(self, trajectory: Trajectory) -> float:
        if self.strings is None and trajectory.prompt.answer is None:
            raise ValueError("the prompt has no answer: add an `answer` to its row, or `strings`")
        wanted = self.strings or _listed(trajectory.prompt.answer)
        before, after = self.edges
        patterns = [before + re.escape(string) + after for string in wanted]
        text, flags = trajectory.completion, self.flags
        return float(self.enough(re.search(pattern, text, flags) for pattern in patterns))


def _listed(strings: object) -> list[str]:
    found = [str(s) for s in (strings if isinstance(strings, list | tuple) else [strings])]
    if not found or not all(found):
        raise ValueError(
            f"got the strings {found}, expected at least one string, and no empty ones"
        )
    return found
