"""The interface of a sandbox, for containers and remote sandboxes too: two methods."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from retrain.errors import ConfigError

LimitName = Literal["", "time", "cpu", "memory", "processes", "output"]


class SandboxError(RuntimeError):
    """A sandbox failed. It says nothing about the program, so it is never a reward."""


@dataclass(frozen=True, slots=True)
class SandboxLimits:
    """What one program may use."""

    seconds: float = 10.0
    """Wall-clock time."""
    cpu_seconds: int = 10
    """CPU time per process."""
    memory: int = 512
    """MiB of memory: address space per process, and memory in use of all processes together."""
    disk: int = 64
    """MiB that it may write."""
    files: int = 4096
    """The number of files that it may create."""
    processes: int = 32
    """Processes and threads at the same time."""
    output: int = 1024
    """KiB that it may print to each of its two outputs."""

    @classmethod
    def of(cls, given: Mapping[str, Any], where: str) -> SandboxLimits:
        """The limits with the keys of a config; raises ConfigError for a wrong key or value."""
        problems = []
        for name, value in given.items():
            number = "a number" if name == "seconds" else "an integer"
            if name not in cls.__slots__:
                expected = ", ".join(cls.__slots__)
                problems.append(f"{where}.{name}: unknown; expected one of {expected}")
            elif type(value) not in (int, float if name == "seconds" else int) or value <= 0:
                problems.append(f"{where}.{name}: got {value!r}, expected {number} above 0")
        if problems:
            raise ConfigError(*problems)
        return cls(**given)


@dataclass(frozen=True, slots=True)
class SandboxResult:
    """How a program ended."""

    exit_code: int
    """Negative for a signal."""
    stdout: str
    stderr: str
    seconds: float = 0.0
    """Wall-clock time."""
    limit: LimitName = ""
    """The limit that ended it, if one did."""


class Sandbox(ABC):
    """Runs programs that nobody has read. A config names your own class in `sandbox`.

    A run makes one object of each choice of `sandbox`; many programs run in it at the same time.
    The constructor takes no arguments.
    """

    @abstractmethod
    async def run(
        self,
        command: Sequence[str],
        files: Mapping[str, str],
        *,
        stdin: str = "",
        limits: SandboxLimits | None = None,
    ) -> SandboxResult:
        """Run a command in a new, empty working folder with these text files.

        A command that begins with "python" means the sandbox's interpreter. When the call is
        cancelled, the program ends. Raises SandboxError if the sandbox itself fails.
        """

    async def close(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """End what is left."""
