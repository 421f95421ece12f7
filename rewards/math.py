"""1 if the completion's mathematical expression equals the answer, else 0."""

from __future__ import annotations

import logging
import re
import threading
import time
from typing import Any

from retrain import Reward, RewardCalculator, Row, Trajectory, needing

_LOG = logging.getLogger(__name__)
UNESCAPED = r"(?<!\\)(?:\\\\)*"
"""Before a character without a backslash of its own: two are a line break."""
DELIMITER = re.compile(UNESCAPED + r"(?:\$|\\boxed|\\\(|\\\[)")
BRACE = re.compile(UNESCAPED + r"([{}])")
"""Not one of a set, which has a backslash."""
CHECKING = 5.0
"""Seconds that the answers of all rows may be checked before the run."""
LISTED = 5
"""Answers that can't be read."""
TOLERATED = 100
"""So many of them never end a run, even if they come first, as in sorted rows."""


class Math(RewardCalculator):
    """1 if the expression in the completion equals the answer, else 0.

    The package math-verify reads both and compares them: LaTeX, `\\boxed`, fractions, sets,
    intervals, matrices, equations. The answer may be given with or without `$` or `\\boxed`. An
    answer that can't be read fails the rollout. If a comparison takes longer than `timeout`
    seconds, the rollout gets the outcome `timeout` and no reward. The reward runs in worker
    processes, 4 unless `processes` is set.

    Args:
        boxed: Read only `\\boxed{...}` in the completion.
        timeout: The time limit, in seconds, for parsing an expression, and for a comparison.
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
        self.checking, self.checked, self.unreadable = CHECKING, 0, 0

    def check_row(self, row: Row) -> None:
        """Warns of an answer that can't be read, as only its rollouts fail. Raises ValueError if
        that is so for more than TOLERATED answers, and for most of those until then."""
        main = threading.current_thread() is threading.main_thread()  # which gets signals
        if row.answer is None or not main or self.checking < 0:
            return
        answer = str(row.answer)
        self.checked += 1
        if self.readable(answer):
            return
        self.unreadable += 1
        if self.unreadable > max(TOLERATED, self.checked / 2):
            raise unreadable(answer)
        if self.unreadable <= LISTED:
            more = ". No further answers are listed" if self.unreadable == LISTED else ""
            problem, name = unreadable(answer), self.name or "math"
            _LOG.warning("reward '%s': %s, so its rollouts will fail%s", name, problem, more)

    def readable(self, answer: str) -> bool:
        """Any text without delimiters, which may not close, is taken to have an expression."""
        if not answer.strip() or not DELIMITER.search(answer):
            return bool(answer.strip())
        started = time.perf_counter()
        found = self.expected(answer)
        self.checking -= time.perf_counter() - started
        return bool(found)

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
        delimited = DELIMITER.search(answer)
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
    for brace in BRACE.findall(rest):
        depth += (brace == "{") - (brace == "}")
        if not depth:
            return mark and mark + rest
    return ""


def unreadable(answer: object) -> ValueError:
    return ValueError(f"the prompt's answer {answer!r} can't be read as a mathematical expression")
