"""The conformance kit of environments, and a try of a config's rewards, without a model.

`check_environment` checks the Environment's contract: types, state that `reset` clears, independent
instances, cancellation, no leaked task. Authors can call it in their own tests. The rollouts are
played by the code that plays those of a run, so that both accept the same environments.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from retrain.assembly import assemble, maker
from retrain.chat.tools import CLOSE, OPEN, check_tools
from retrain.concurrency.deadlines import user_call
from retrain.config import DeadlinesConfig, Plugin, RolloutConfig, RunConfig, load_config
from retrain.config.plugins import built_in_names
from retrain.config.yaml_text import parse_override
from retrain.environment import Action, Environment, ToolSpec
from retrain.errors import UserCodeError, blame
from retrain.run import config_file
from retrain.trial import Script, scripted, tried_rewards
from retrain.types import Prompt, Ticket

Transcript = list[Any]  # what an environment replied: only compared
PROMPTS = 3
TURNS = 8
INSTANCES = 8
DEADLINE = 30.0
"""Seconds that one call may take."""
SAMPLES = (
    Prompt("0.0.0", ({"role": "user", "content": "a="},), answer="aaaa"),
    Prompt("0.1.0", ({"role": "user", "content": "What is 2 + 3?"},), answer="5"),
)
"""Prompts for an environment without a config."""
_EXAMPLES = {"number": 1, "integer": 1, "boolean": True, "array": [], "object": {}, "null": None}
"""A value of each JSON type; "1" for the others."""


@dataclass(frozen=True)
class Finding:
    """One check: passed, or failed and what to do."""

    good: bool
    what: str
    advice: str = ""

    def __str__(self) -> str:
        advice = f"\n      {self.advice}" if self.advice else ""
        return f"{'ok  ' if self.good else 'FAIL'}  {self.what}{advice}"


async def check_subject(subject: str, keys: Sequence[str] = ()) -> list[Finding]:
    """Check a config's environment and rewards with its prompts, or an environment on its own.

    `keys` are overrides of the config, or `key=value` of the environment. Raises ConfigError if it
    can't be loaded.
    """
    own = subject in built_in_names("environment")  # some included configs have such a name
    file = Path(subject) if own else config_file(subject)
    if file.suffix in (".yaml", ".yml"):
        parts = assemble(load_config(file, keys))
        count = min(PROMPTS, len(parts.prompts))
        prompts = [parts.prompts.prompt(Ticket(0, index)) for index in range(count)]
        fit = Finding(True, "all parts of the config load and fit together")
        if (source := parts.algorithm.source) != "rollouts":
            unused = f"the rows are {source}: no environment and no reward is used"
            return [fit, Finding(True, unused)]
        findings = await check_environment(parts.environment, prompts)
        trials = await tried_rewards(parts, prompts)
        rewards = [Finding(t.good, t.what, "\n      ".join(t.lines)) for t in trials]
        return [fit, *findings, *rewards]
    arguments = {path[0]: value for path, value in map(parse_override, keys)}
    plugin = Plugin.model_validate({**arguments, "type": subject})
    config = RunConfig(prompts=Plugin(type="list"), base_dir=Path.cwd())
    return await check_environment(maker("environment", plugin, "environment", config))


async def check_environment(
    make: Callable[[], Environment], prompts: Sequence[Prompt] = SAMPLES
) -> list[Finding]:
    """Check an environment's contract; `make` returns a new instance."""
    before = asyncio.all_tasks()
    environment = make()
    try:
        check_tools(environment.tools)
    except (TypeError, ValueError) as error:
        return [Finding(False, "tools are valid", str(error))]
    alone: Transcript = []

    async def play() -> None:
        alone.extend(*await _played([environment], prompts))

    names = ", ".join(tool.name for tool in environment.tools)
    findings = [Finding(True, f"tools: {names}")] if names else []
    findings += [
        await _tried("setup", _call(environment, "setup")),
        await _tried("reset and step return the right types", play()),
    ]
    if all(finding.good for finding in findings):
        more = (
            ("a reused instance behaves like a new one", _again(environment, prompts, alone)),
            (f"{INSTANCES} concurrent instances play like one", _at_once(make, prompts, alone)),
            ("a cancelled step ends immediately", _cancelled(environment, prompts[0])),
        )
        findings += [await _tried(what, check) for what, check in more]
    findings.append(await _tried("close", _call(environment, "close")))
    await asyncio.sleep(0)
    left = {t.get_name() for t in asyncio.all_tasks() - before if t is not asyncio.current_task()}
    advice = f"end them in close(): {', '.join(sorted(left)[:8])}" if left else ""
    return [*findings, Finding(not left, "no task is leaked", advice)]


async def _tried(what: str, check: Awaitable[None]) -> Finding:
    try:
        await check
    except UserCodeError as error:
        return Finding(False, what, str(error))
    except Exception as error:  # noqa: BLE001 - a user's constructor may raise anything
        return Finding(False, what, str(blame("it", error)))
    return Finding(True, what)


async def _call(environment: Environment, hook: str) -> None:
    await user_call(
        f"{type(environment).__name__}.{hook}", getattr(environment, hook), DEADLINE, hook
    )


async def _again(environment: Environment, prompts: Sequence[Prompt], alone: Transcript) -> None:
    if await _played([environment], prompts) != [alone]:
        raise UserCodeError(
            "the same prompt and replies gave another rollout: clear the state of the last rollout "
            "in reset(), and seed random numbers by self.prompt.id, so that a resumed run repeats "
            "itself"
        )


async def _at_once(
    make: Callable[[], Environment], prompts: Sequence[Prompt], alone: Transcript
) -> None:
    environments = [make() for _ in range(INSTANCES)]
    try:
        await asyncio.gather(*(_call(environment, "setup") for environment in environments))
        found = await _played(environments, prompts)
    finally:  # close is checked separately
        closing = (_call(environment, "close") for environment in environments)
        await asyncio.gather(*closing, return_exceptions=True)
    if found != [alone] * INSTANCES:
        raise UserCodeError(
            "they share state: keep it on self, not in the class, the module or a file"
        )


async def _cancelled(environment: Environment, prompt: Prompt) -> None:
    environment.prompt = prompt
    await user_call("reset", lambda: environment.reset(prompt), DEADLINE, "reset")
    task = asyncio.ensure_future(environment.step(Action("hello")))
    await asyncio.sleep(0)
    finished = task.done()
    task.cancel()
    _, pending = await asyncio.wait([task], timeout=5)
    if pending or not (finished or task.cancelled()):
        raise UserCodeError("don't suppress CancelledError: catch Exception instead")


async def _played(
    environments: Sequence[Environment], prompts: Sequence[Prompt]
) -> list[Transcript]:
    """What each environment replies to every prompt and script, all environments at once.

    Raises UserCodeError for a rollout that fails.
    """
    config = RunConfig(
        prompts=Plugin(type="list"),
        rollout=RolloutConfig(max_turns=TURNS),
        deadlines=DeadlinesConfig(reset=DEADLINE, step=DEADLINE),
    )
    script = Script()
    rollouts = scripted(config, script)
    transcripts: list[Transcript] = [[] for _ in environments]
    for prompt in prompts:
        for script.reply in _replies(environments[0].tools):
            group = await rollouts.play(prompt, environments)
            for transcript, played in zip(transcripts, group.trajectories, strict=True):
                if played.outcome != "ok":
                    raise UserCodeError(played.info["error"])
                last = repr(played.turns[-1].observation)
                transcript.append((played.messages, played.rewards, len(played.turns), last))
    return transcripts


def _replies(tools: Sequence[ToolSpec]) -> Iterator[str]:
    """The replies to try, right and wrong ones."""
    yield from ("hello", "", "42", "x" * 2000)
    if tools:
        calls: list[tuple[str, dict[str, Any]]] = [("no_such_tool", {})]
        calls += [(tool.name, {}) for tool in tools]
        calls += [(tool.name, _example(tool)) for tool in tools]
        for name, arguments in calls:
            yield OPEN + json.dumps({"name": name, "arguments": arguments}) + CLOSE
        yield f"{OPEN}this is not JSON{CLOSE}"


def _example(tool: ToolSpec) -> dict[str, Any]:
    """Arguments of the types in the tool's schema."""
    properties = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", ())
    return {n: _EXAMPLES.get(str(properties.get(n, {}).get("type")), "1") for n in required}
