"""What a check found: it passed, maybe with a warning, or failed; and what to do."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from retrain.errors import UserCodeError


@dataclass(frozen=True)
class Finding:
    """One check: passed, maybe with a warning, or failed; and what to do."""

    good: bool
    what: str
    advice: str = ""
    warning: bool = False
    fatal: bool = False
    """Whether no rollout can be played."""

    def __str__(self) -> str:
        advice = "".join(f"\n      {line}" for line in self.advice.splitlines())
        word = "FAIL" if not self.good else "warn" if self.warning else "ok  "
        return f"{word}  {self.what}{advice}"


def ok(what: str, *lines: str) -> Finding:
    """A check that passed, with what it shows."""
    return Finding(True, what, "\n".join(lines))


def warn(what: str, *lines: str) -> Finding:
    """A check that passed with a warning."""
    return Finding(True, what, "\n".join(lines), warning=True)


def fail(what: str, *lines: str, fatal: bool = False) -> Finding:
    """A check that failed."""
    return Finding(False, what, "\n".join(lines), fatal=fatal)


async def tried(what: str, check: Awaitable[None]) -> Finding:
    """The finding of a check that raises UserCodeError if it fails."""
    try:
        await check
    except UserCodeError as error:
        return fail(what, str(error))
    return ok(what)
