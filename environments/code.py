"""The model writes a program, and the tests of the prompt's row score it in a sandbox.

A row has tests as code, or inputs and outputs, in the column `tests` or as its `answer`:

    {"prompt": "Write f(x), the square of x.", "tests": ["assert f(3) == 9", "assert f(-1) == 1"]}
    {"prompt": "Double a number.", "tests": [{"input": "4", "output": "8"}]}

See docs/sandbox.md.
"""

from __future__ import annotations

from contextlib import AsyncExitStack
from pathlib import Path
from typing import Literal

from retrain import (
    Action,
    ConfigError,
    Environment,
    Message,
    Prompt,
    Row,
    SandboxChoice,
    SandboxLimits,
    StepResult,
    grade,
    program_in,
    sandbox_of,
    tests_of,
)


class Code(Environment):
    """Runs the last code block of a reply, or the whole reply, against the tests of the row.

    Args:
        sandbox: `auto`, `namespaces`, `bubblewrap`, `none`, or a class as path/file.py:Class.
        limits: Limits of one program: seconds, cpu_seconds, memory, disk, files, processes, output.
        processes: How many programs run at the same time; by default the number of cores.
        packages: Let programs import the packages of retrain's Python environment.
        command: The command that runs the program; the name of its file is appended.
        column: The column with the tests; by default `tests`, or the answer if there is no such
            column.
        attempts: The number of programs that the model may try; it sees the first failure of each.
        score: The `fraction` of tests that the last program passes, or 1 if it passes `all`.
    """

    def __init__(  # noqa: PLR0913 - its keys in the YAML
        self,
        *,
        sandbox: str = "auto",
        limits: dict[str, float] | None = None,
        processes: int | None = None,
        packages: bool = False,
        command: list[str] | None = None,
        column: str | None = None,
        attempts: int = 1,
        score: Literal["fraction", "all"] = "fraction",
        base_dir: Path = Path(),
    ) -> None:
        if attempts < 1:
            raise ConfigError(f"environment.attempts: got {attempts}, expected at least 1")
        self.limits = SandboxLimits.of(limits or {}, "environment.limits")
        self.choice = SandboxChoice(sandbox, processes, packages, base_dir)
        self.command, self.column = command or ["python"], column
        self.attempts, self.score = attempts, score

    def check_row(self, row: Row) -> None:
        tests_of(row, self.column)

    async def setup(self) -> None:
        self.stack = AsyncExitStack()
        self.sandbox = await self.stack.enter_async_context(sandbox_of(self.choice))

    async def reset(self, prompt: Prompt) -> list[Message]:
        self.tests = tests_of(prompt, self.column)
        self.tried = 0
        return list(prompt.messages)

    async def step(self, action: Action) -> StepResult:
        self.tried += 1
        program = program_in(action.text)
        graded = await grade(
            self.sandbox, program, self.tests, limits=self.limits, command=self.command
        )
        over = all(graded.passed) or self.tried == self.attempts
        reward = graded.fraction if self.score == "fraction" else float(all(graded.passed))
        reply: list[Message] = [{"role": "user", "content": graded.feedback}]
        info = {"tests_passed": sum(graded.passed), "tests": len(graded.passed)}
        return StepResult([] if over else reply, reward if over else 0.0, over, False, info)

    async def close(self) -> None:
        await self.stack.aclose()
