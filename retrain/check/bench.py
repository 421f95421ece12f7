"""What the checks share: what one found, deadlines, the watch of the loop, and the environment."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field, replace

from retrain.config import DeadlinesConfig, RunConfig
from retrain.environment import Environment
from retrain.errors import UserCodeError
from retrain.rollout.instance import Instance
from retrain.supervision.watch import ADVICE, Watch
from retrain.types import Prompt

Say = Callable[[str], object]
"""Prints immediately what takes long."""
INSTANCES = 4
"""Environments that play at the same time."""
SLOW_SECONDS = 2.0
"""After so many seconds a wait is announced, and a call counts as slow."""
BLOCKED = 0.25
"""Seconds that user code may block the event loop."""
DEADLINE = 30.0
"""Seconds that one call may take, unless the config's `deadlines` say otherwise."""
LIMITED = ("reset", "step", "agent", "close", "reward")
"""The deadlines that DEADLINE replaces. `setup` keeps its own: it may load an index or a model."""


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


def limited(config: RunConfig) -> RunConfig:
    """`config` with DEADLINE for the calls of user code that it sets no deadline for."""
    given = {name: getattr(config.deadlines, name) for name in config.deadlines.model_fields_set}
    limits = DeadlinesConfig(**{**dict.fromkeys(LIMITED, DEADLINE), **given})
    return config.model_copy(update={"deadlines": limits})


def explained(findings: Sequence[Finding], given: RunConfig) -> list[Finding]:
    """The findings, where a deadline that the config doesn't set is said to be the check's own."""

    def said(text: str) -> str:
        for key in set(LIMITED) - given.deadlines.model_fields_set:
            own = f"{DEADLINE:g} s, the limit of this check. To raise it, set deadlines.{key}."
            text = text.replace(f"deadlines.{key} = {DEADLINE} s", own)
        return text

    return [replace(finding, advice=said(finding.advice)) for finding in findings]


@contextmanager
def waiting(say: Say, what: str) -> Iterator[None]:
    """Say what is being waited for, if it takes long."""
    timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, say, f"waiting for {what}")
    try:
        yield
    finally:
        timer.cancel()


class Blocks:
    """What blocks the event loop while the checks run."""

    def __init__(self) -> None:
        self._longest: dict[str, float] = {}
        self.seconds = 0.0

    @property
    def too_long(self) -> bool:
        """Whether it is found, and takes so long that the other checks can wait."""
        return self.seconds > SLOW_SECONDS

    def watched(self) -> Watch:
        """A context in which the event loop is watched."""
        return Watch(slow=BLOCKED, found=self._found)

    def _found(self, place: str, seconds: float, calls: int) -> None:
        if (each := seconds / calls) > BLOCKED:
            self._longest[place] = max(each, self._longest.get(place, 0.0))
            self.seconds += seconds

    def finding(self) -> Finding:
        """Whether nothing blocked it."""
        lines = [f"{place} blocked it for {time:.1f} s" for place, time in self._longest.items()]
        if not lines:
            return ok("nothing blocks the event loop")
        if self.too_long:
            lines.append("The checks ended early because this makes them slow.")
        return fail("the event loop is blocked", *lines, ADVICE)


@dataclass(frozen=True)
class Bench:
    """An environment that is checked."""

    make: Callable[[], Environment]
    """Returns a new one."""
    prompts: Sequence[Prompt]
    config: RunConfig
    """With the deadlines of `limited`."""
    say: Say
    blocks: Blocks = field(default_factory=Blocks)
    """Ends what would take too long."""

    def instances(self, faults: list[str], count: int = 1) -> list[Instance]:
        """New instances, as a slot of a run makes them; errors of `close` are added to `faults`."""
        setups = asyncio.Semaphore(INSTANCES)
        limits = self.config.deadlines
        return [Instance(self.make, limits, setups, faults.append) for _ in range(count)]

    def waiting(self, what: str, key: str) -> AbstractContextManager[None]:
        """Wait for a call that has the deadline `deadlines.KEY`."""
        seconds = getattr(self.config.deadlines, key)
        return waiting(self.say, f"{what}: at most {seconds:g} s (deadlines.{key})")
