"""Train an agent that knows nothing of `retrain`: it calls the model at a private endpoint.

    environment: {type: agent, run: my_agent.py:solve}
    environment: {type: agent, command: [python, my_agent.py, "{prompt}"]}

- `run` is a function, async or plain, that gets those of the VALUES that it declares. Its result is
  the `completion` that rewards get, or a dict: `completion`, `reward`, and more for `info`.
- `command` is started for each rollout, in a working folder of its own, with the endpoint in
  OPENAI_BASE_URL, OPENAI_API_KEY, ANTHROPIC_BASE_URL, ... Its output is the `completion`.

See docs/agents.md.
"""

from __future__ import annotations

import inspect
import json
import os
import re
import shutil
import sys
import tempfile
import traceback
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

from retrain import (
    CODE_OPTIONS,
    ConfigError,
    Endpoint,
    Environment,
    StepResult,
    UserCodeError,
    file_of,
    find_command,
    find_function,
    in_thread,
    run_program,
)

ENDPOINT = ("base_url", "anthropic_url", "api_key", "model")
VALUES = ("prompt", "messages", "answer", "metadata", "seed", "index", *ENDPOINT, "folder")
"""What a function may declare and a command may name as {prompt}, {messages}, ..."""
NAME = rf"(?:{'|'.join(VALUES)})[.\[][\w.\[\]]*|[a-z_]+"
NAMED = re.compile(rf"(?<!\$)(?:\{{\{{({NAME})\}}\}}|\{{({NAME})\}})")
"""{{name}}, for the braces themselves, or {name}; not the ${name} of a shell. A part of a value,
such as {metadata.kind}, is matched to be rejected."""
NUMBERED = re.compile(r"\{(\{\d*\})\}|(?<!\$)\{\d*\}")
"""{} or {0}, which nothing fills, or {{}} for the braces themselves."""
KEY = re.compile(r"(?:OPENAI|ANTHROPIC)_API_KEY")
"""In the error of an SDK whose client got no key."""
TAIL = 2000
"""Characters of a command's other output that are kept."""
LARGEST_RESULT = 2**24
"""Bytes of the JSON that a function in its own process returns."""


class Agent(Environment):
    """Runs a function or a command that calls the model itself.

    Args:
        run: A function as path/file.py:name or module:name.
        process: Run the function in its own process, so that it can be stopped.
        command: A program and its arguments, instead of `run`.
        stdin: The standard input of a command.
        files: Text files that a command finds in its working folder.
        env: Additional environment variables of a command.
        output: Where the completion of a command is: `stdout`, or a file in its working folder.
        exit_codes: Exit codes with which a command gives a result, by default 0; any other counts
            as a crash.
        seats: The model names that the agent uses in its calls, if several parties are trained.
        on_error: What an exception or a crash is: by default (`fail`) the rollout is scored only if
            the model is the cause, see docs/agents.md; with `score` also for any other error,
            except for outages and timeouts.
    """

    def __init__(  # noqa: PLR0913 - its keys in the YAML
        self,
        *,
        run: str | None = None,
        process: bool = False,
        command: list[str] | None = None,
        stdin: str = "",
        files: dict[str, str] | None = None,
        env: dict[str, str] | None = None,
        output: str = "stdout",
        exit_codes: Sequence[int] = (0,),
        seats: list[str] | None = None,
        on_error: Literal["fail", "score"] = "fail",
        base_dir: Path = Path(),
    ) -> None:
        if (run is None) == (command is None):
            got = "neither `run` nor `command`" if run is None else "both `run` and `command`"
            raise ConfigError(
                f"environment: got {got}, expected one of them: `run` (a function, such as "
                "my_agent.py:solve) or `command` (a program and its arguments)"
            )
        self.seats, self.on_error = tuple(seats or ()), on_error
        self.path, self.process, self.base_dir = run, process, base_dir.resolve()
        self.stdin, self.files, self.env = stdin, files or {}, env or {}
        self.output, self.exit_codes = output, tuple(exit_codes)
        others = {"stdin": stdin, "files": files, "env": env, "output": output != "stdout"}
        if run is not None:
            _only("command", {**others, "exit_codes": self.exit_codes != (0,)})
            self.function = find_function(run, base_dir, "environment.run")
            self.wanted = _wanted(self.function)
        else:
            _only("run", {"process": process})
            self.command = find_command(
                command or [], self.base_dir, "environment.command", self.files
            )
            self._check_command()

    def _check_command(self) -> None:
        """Raises ConfigError for a {name} or a file that no rollout can fill in."""
        _check_names("command", self.command)
        _check_names("stdin", [self.stdin])
        for part in _texts(self.command):
            if wrong := next((m[0] for m in NUMBERED.finditer(part) if not m[1]), ""):
                raise ConfigError(_unknown("command", wrong))
        _check_names("files", self.files.values())
        _check_names("env", self.env.values())
        for name in (*self.files, self.output):
            path = Path(name)
            if path.is_absolute() or ".." in path.parts or not path.parts:
                raise ConfigError(
                    f"environment: got the file {name!r}, expected one in the working folder"
                )

    async def run(self, endpoint: Endpoint) -> StepResult:
        values = {
            "prompt": self.prompt.text,
            "messages": list(self.prompt.messages),
            "answer": self.prompt.answer,
            "metadata": dict(self.prompt.metadata),
            "seed": self.prompt.seed,
            "index": self.prompt.index,
            **{name: getattr(endpoint, name) for name in ENDPOINT},
        }
        if self.path is not None and not self.process and "folder" not in self.wanted:
            return self._result(await self._call(values))
        async with _folder() as folder:
            values["folder"] = str(folder)
            if self.path is None:
                return await self._start(folder, values)
            call = self._in_process(folder, values) if self.process else self._call(values)
            return self._result(await call)

    async def _call(self, values: Mapping[str, Any]) -> Any:
        call = partial(self.function, **{name: values[name] for name in self.wanted})
        try:
            if inspect.iscoroutinefunction(self.function):
                return await call()
            answer = await in_thread(call)
            return await answer if inspect.isawaitable(answer) else answer
        except Exception as error:
            found = KEY.search(str(error))
            if found is None or found[0] in os.environ:
                raise
            raise UserCodeError(
                f"{self.path}: {found[0]} is not set, because the function runs in the process of "
                f"retrain{_line(error, self.function)}. Pass its arguments `base_url` and "
                "`api_key` to the client, or set environment.process: true"
            ) from error

    async def _in_process(self, folder: Path, values: Mapping[str, Any]) -> Any:
        arguments = {name: values[name] for name in self.wanted}
        home = str(self.base_dir)
        job = {"function": self.path, "base_dir": home, "arguments": arguments}
        done = await run_program(
            [sys.executable, "-m", "retrain.agents.child", folder],
            stdin=json.dumps(job),
            env=_variables(values),
        )
        if done.exit_code:
            raise done.failure(f"the process of {self.path}")
        result = await file_of(folder, "result.json", LARGEST_RESULT + 1)
        if len(result) > LARGEST_RESULT:
            raise UserCodeError(
                f"{self.path} returned more than {LARGEST_RESULT >> 20} MiB of JSON, expected the "
                "completion, or a dict with `completion`, `reward` and what rewards need"
            )
        return await in_thread(partial(json.loads, result))

    async def _start(self, folder: Path, values: Mapping[str, Any]) -> StepResult:
        for name, text in self.files.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(_filled(text, values), encoding="utf-8")
        env = {name: _filled(text, values) for name, text in self.env.items()}
        texts = _texts(self.command)
        done = await run_program(
            [_filled(NUMBERED.sub(r"\1", p) if p in texts else p, values) for p in self.command],
            stdin=_filled(self.stdin, values),
            cwd=folder,
            env={**_variables(values), **env},
        )
        program = Path(self.command[0]).name
        if done.exit_code not in self.exit_codes:
            raise done.failure(program, self.command)
        info: dict[str, Any] = {"exit_code": done.exit_code, "stderr": done.stderr[-TAIL:]}
        if self.output == "stdout":
            return self._result({**info, "completion": done.stdout})
        try:
            written = await file_of(folder, self.output)
        except OSError as error:
            what = f"{program} wrote no file {self.output} that can be read ({error}): it"
            raise done.failure(what, self.command) from error
        text = written.decode(errors="replace")
        return self._result({**info, "stdout": done.stdout[-TAIL:], "completion": text})

    def _result(self, answer: Any) -> StepResult:
        """What an agent returned: a StepResult, a dict of `info`, or the completion.

        The completion has no whitespace at its ends, whether a function or a command returns it.
        """
        if isinstance(answer, StepResult):
            info, result = dict(answer.info), answer
        elif isinstance(answer, Mapping):
            info = dict(answer)
            result = StepResult([], info.pop("reward", 0.0), True, False, info)
        elif answer is None or isinstance(answer, str | int | float):
            info = {} if answer is None else {"completion": answer}
            result = StepResult([], 0.0, True, False, info)
        else:
            raise UserCodeError(
                f"{self.path} returned a value of type {type(answer).__name__}, expected a string "
                "(the completion), a dict (`completion`, `reward`, and more for `info`) or nothing"
            )
        if info.get("completion") is not None:
            info["completion"] = str(info["completion"]).strip()
        return result._replace(info=info)


def _line(error: BaseException, function: Callable[..., Any]) -> str:
    """The last line of the function's file that an error passed through."""
    file = getattr(inspect.getmodule(function), "__file__", None)
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
    return f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""


def _only(key: str, given: Mapping[str, Any]) -> None:
    """Raises ConfigError for keys that have no effect, as they belong to `key`."""
    if unused := [name for name, value in given.items() if value]:
        raise ConfigError(f"environment.{unused[0]}: only for `{key}`; remove it")


def _wanted(function: Callable[..., Any]) -> tuple[str, ...]:
    """The arguments that an agent declares; raises ConfigError for one that doesn't exist."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return VALUES
    named = [p for p in parameters if p.kind is not p.VAR_POSITIONAL]
    unknown = [p.name for p in named if p.name not in VALUES and p.default is p.empty]
    if unknown:
        raise ConfigError(
            f"environment.run: the function requires {', '.join(unknown)}, expected any of "
            f"{', '.join(VALUES)}. Give other arguments a default."
        )
    return tuple(p.name for p in named if p.name in VALUES)


def _texts(command: Sequence[str]) -> list[str]:
    """The arguments of a command that are no code or JSON, in which {} has a meaning."""
    return [
        part
        for before, part in pairwise(command)
        if before not in CODE_OPTIONS and '"' not in part and "\n" not in part
    ]


def _check_names(key: str, texts: Iterable[str]) -> None:
    """Raises ConfigError for a {name} that is not known."""
    for match in (match for text in texts for match in NAMED.finditer(text)):
        if match[2] and match[2] not in VALUES:
            raise ConfigError(_unknown(key, match[0]))


def _unknown(key: str, found: str) -> str:
    return (
        f"environment.{key}: got {found}, expected one of "
        f"{', '.join('{' + name + '}' for name in VALUES)}; "
        f"write {{{found}}} for the braces themselves"
    )


@asynccontextmanager
async def _folder() -> AsyncIterator[Path]:
    """A new folder, which is removed in a thread: an agent may leave many files."""
    folder = Path(tempfile.mkdtemp(prefix="retrain-agent-"))
    try:
        yield folder
    finally:
        await in_thread(partial(shutil.rmtree, folder, ignore_errors=True))


def _variables(values: Mapping[str, Any]) -> dict[str, str]:
    """Where SDKs find the endpoint; `python` is the interpreter of the run."""
    own = os.path.dirname(sys.executable)
    return {
        "PATH": os.pathsep.join([own, os.environ.get("PATH", os.defpath)]),
        "OPENAI_BASE_URL": values["base_url"],
        "OPENAI_API_BASE": values["base_url"],
        "OPENAI_API_KEY": values["api_key"],
        "OPENAI_MODEL": values["model"],
        "ANTHROPIC_BASE_URL": values["anthropic_url"],
        "ANTHROPIC_API_KEY": values["api_key"],
        "ANTHROPIC_MODEL": values["model"],
    }


def _filled(text: str, values: Mapping[str, Any]) -> str:
    """The text with its {names} replaced in one pass: a prompt may have such names itself."""

    def value(match: re.Match[str]) -> str:
        if match[2] is None:
            return f"{{{match[1]}}}"
        found = values[match[2]]
        return found if isinstance(found, str) else json.dumps(found)

    return NAMED.sub(value, text)
