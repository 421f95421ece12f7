"""How many tests of its row a reply's program passes, in a sandbox: for any environment."""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from retrain import (
    Reward,
    RewardCalculator,
    Row,
    SandboxChoice,
    SandboxLimits,
    Trajectory,
    grade,
    program_in,
    sandbox_of,
    tests_of,
)


class CodeTests(RewardCalculator):
    """Runs the last code block of the completion, or all of it, against the tests of the row.

    Args:
        sandbox: `auto`, `namespaces`, `bubblewrap`, `none`, or a class as path/file.py:Class.
        limits: Limits of one program: seconds, cpu_seconds, memory, disk, files, processes, output.
        packages: Let programs import the packages of retrain's Python environment.
        command: The command that runs the program; the name of its file is appended.
        column: The column with the tests; by default `tests`, or the answer if there is no such
            column.
        score: The `fraction` of tests that the program passes, or 1 if it passes `all`.
    """

    name = "code_tests"
    solved_by_answer = True

    def __init__(
        self,
        *,
        sandbox: str = "auto",
        limits: dict[str, float] | None = None,
        packages: bool = False,
        command: list[str] | None = None,
        column: str | None = None,
        score: Literal["fraction", "all"] = "fraction",
        base_dir: Path = Path(),
    ) -> None:
        self.limits = SandboxLimits.of(limits or {}, "rewards.limits")
        self.choice = SandboxChoice(sandbox, None, packages, base_dir, where="rewards")
        self.command, self.column, self.score = command or ["python"], column, score

    def check_row(self, row: Row) -> None:
        tests_of(row, self.column)

    async def setup(self) -> None:
        self.stack = AsyncExitStack()
        self.sandbox = await self.stack.enter_async_context(sandbox_of(self.choice))

    async def calculate(self, trajectory: Trajectory) -> Reward:
        tests = tests_of(trajectory.prompt, self.column)
        program = program_in(trajectory.completion)
        graded = await grade(self.sandbox, program, tests, limits=self.limits, command=self.command)
        passed = all(graded.passed)
        return Reward(graded.fraction if self.score == "fraction" else float(passed))

    async def close(self) -> None:
        await self.stack.aclose()
