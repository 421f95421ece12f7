"""1 if the completion's mathematical expression equals the answer, else 0."""

from __future__ import annotations

import re
import threading
import time
from typing import Any

from retrain import Reward, RewardCalculator, Row, Trajectory, needing

DELIMITERS = ("$", "\\boxed", "\\(", "\\[")
BRACES = re.compile(r"(?<!\\)[{}]")
"""Not those of a set, which have a backslash."""
CHECKING = 5.0
"""Seconds that the answers of all rows may be checked before the run."""


class Math(RewardCalculator):
    """1 if the expression in the completion equals the answer, else 0.

    The package math-verify reads both and compares them: LaTeX, `\\boxed`, fractions, sets,
    intervals, matrices, equations. The answer may be given with or without `$` or `\\boxed`. An
    answer that can't be read fails the rollout. A comparison that takes longer than `timeout`
    seconds gives it the outcome `timeout`, and no reward. It runs in worker processes, 4 unless
    `processes` is set.

    Args:
        boxed: Read only `\\boxed{...}` in the completion.
        timeout: Seconds for reading a text, and for a comparison.
    """

    processes = 4  # its timeouts are signals, which only a main thread gets
    needs_answer = True

    def __init__(self, boxed: bool = False, timeout: int = 5) -> None:
        with needing("math"):
            import math_verify
        if timeout < 1:
            raise ValueError(f"timeout is {timeout}, expected an integer >= 1")
        self.boxed, self.timeout = boxed, timeout
        self.library = math_verify
        self.checking = CHECKING

    def check_row(self, row: Row) -> None:
        """Reads answers with delimiters, which may not close, and empty ones: any other text has an
        expression."""
        answer = "" if row.answer is None else str(row.answer)
        certain = answer.strip() and not any(mark in answer for mark in DELIMITERS)
        main = threading.current_thread() is threading.main_thread()  # which gets signals
        if row.answer is None or certain or not main or self.checking < 0:
            return
        started = time.perf_counter()
        if not self.expected(answer):
            raise unreadable(answer)
        self.checking -= time.perf_counter() - started

    async def calculate(self, trajectory: Trajectory) -> float | Reward:
        answer = trajectory.prompt.answer
        if answer is None:
            raise ValueError("the prompt has no answer: add an `answer` to its row")
        said, started = trajectory.completion, time.perf_counter()
        if self.boxed:
            said = last_box(said)
        right = self.expected(str(answer))
        equal = self.library.verify(right, self.parsed(said), timeout_seconds=self.timeout)
        if not equal and time.perf_counter() - started >= self.timeout:
            return Reward(0.0, outcome="timeout")
        if not right:
            raise unreadable(answer)
        return float(equal)

    def expected(self, answer: str) -> list[Any]:
        """The answer's expression; one without delimiters is all of the text."""
        delimited = any(mark in answer for mark in DELIMITERS)
        return self.parsed(answer if delimited else f"\\boxed{{{answer}}}") or self.parsed(answer)

    def parsed(self, text: str) -> list[Any]:
        found: list[Any] = self.library.parse(text, parsing_timeout=self.timeout)
        return found


def last_box(text: str) -> str:
    """The text from its last `\\boxed` on; empty if that does not close, as in a reply cut off."""
    _, mark, rest = text.rpartition("\\boxed")
    if not rest.lstrip().startswith("{"):
        return mark and mark + rest
    depth = 0
    for brace in BRACES.findall(rest):
        depth += (brace == "{") - (brace == "}")
        if not depth:
            return mark and mark + rest
    return ""


def unreadable(answer: object) -> ValueError:
    return ValueError(f"the prompt's answer {answer!r} is no mathematical expression")
