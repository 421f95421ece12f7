"""The conformance kit of environments: plays rollouts with fixed replies, without a model.

`check_environment` checks the Environment's contract: types, state that `reset` clears, independent
instances, cancellation, no leaked task. Authors can call it in their own tests.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import math
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from retrain.assembly import KINDS, assemble
from retrain.chat.tools import CLOSE, OPEN, parse_reply
from retrain.config import load_config
from retrain.config.binding import bind
from retrain.config.plugins import built_in_names, find_plugin
from retrain.config.yaml_text import parse_override
from retrain.environment import Action, Environment, ToolSpec
from retrain.errors import blame, shown
from retrain.run import config_file
from retrain.types import Prompt

T = TypeVar("T")
Transcript = list[Any]  # an environment's replies: only compared
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


class Broken(Exception):
    """A reply of the wrong form."""


@dataclass(frozen=True)
class Finding:
    """One check: passed, or failed and what to do."""

    good: bool
    what: str
    advice: str = ""

    def __str__(self) -> str:
        return f"{'ok  ' if self.good else 'FAIL'}  {self.what}" + (
            f"\n      {self.advice}" if self.advice else ""
        )


async def check_subject(subject: str, keys: Sequence[str] = ()) -> list[Finding]:
    """Check a config's environment with the config's prompts, or an environment without a config.

    `keys` are overrides of the config, or `key=value` of the environment. Raises ConfigError if it
    can't be loaded.
    """
    own = subject in built_in_names("environment")  # some included configs have such a name
    file = Path(subject) if own else config_file(subject)
    if file.suffix in (".yaml", ".yml"):
        parts = assemble(load_config(file, keys))
        parts.scorer.close()
        prompts = [parts.prompts.row(i) for i in range(min(PROMPTS, len(parts.prompts)))]
        asked = [Prompt(f"0.{i}.0", *row) for i, row in enumerate(prompts)]
        fit = [Finding(True, "all parts of the config load and fit together")]
        return fit + await check_environment(parts.environment, asked)
    target = find_plugin(KINDS["environment"], subject, "environment", Path.cwd())
    arguments = {path[0]: value for path, value in map(parse_override, keys)}
    make = partial(target, **bind(target, arguments, "environment", given={"base_dir": Path.cwd()}))
    return await check_environment(make, SAMPLES)


async def check_environment(
    make: Callable[[], Environment], prompts: Sequence[Prompt] = SAMPLES
) -> list[Finding]:
    """Check an environment's contract; `make` returns a new instance."""
    before = asyncio.all_tasks()
    environment = make()
    findings = _tools(environment)
    if not all(finding.good for finding in findings):
        return findings  # the scripts call them
    alone: list[Transcript] = []
    form = "reset and step return the right types"
    findings.append(await _tried("setup", _within(environment.setup())))
    findings.append(await _tried(form, _play_all(environment, prompts, alone)))
    if all(finding.good for finding in findings):
        findings.append(await _again(environment, prompts, alone))
        findings.append(await _at_once(make, prompts, alone))
        findings.append(await _cancelled(environment, prompts[0]))
    findings.append(await _tried("close", _within(environment.close())))
    await asyncio.sleep(0)
    left = {t.get_name() for t in asyncio.all_tasks() - before if t is not asyncio.current_task()}
    advice = f"end them in close(): {', '.join(sorted(left)[:8])}" if left else ""
    return [*findings, Finding(not left, "no task is leaked", advice)]


def _scripts(environment: Environment) -> list[list[Action]]:
    """The replies to try, right and wrong ones, parsed as in a run."""
    texts = ["hello", "", "42", "x" * 2000]
    if environment.tools:
        calls: list[tuple[str, dict[str, Any]]] = [("no_such_tool", {})]
        calls += [(tool.name, {}) for tool in environment.tools]
        calls += [(tool.name, _example(tool)) for tool in environment.tools]
        for name, arguments in calls:
            texts.append(OPEN + json.dumps({"name": name, "arguments": arguments}) + CLOSE)
        texts.append(f"{OPEN}this is not JSON{CLOSE}")
    replies = [parse_reply(text, environment.tools) for text in texts]
    return [[Action(reply.text, reply.calls)] * TURNS for reply in replies]


def _example(tool: ToolSpec) -> dict[str, Any]:
    """Arguments of the types in the tool's schema."""
    properties = tool.parameters.get("properties", {})
    required = tool.parameters.get("required", ())
    return {n: _EXAMPLES.get(str(properties.get(n, {}).get("type")), "1") for n in required}


async def _play_all(
    environment: Environment, prompts: Sequence[Prompt], transcripts: list[Transcript]
) -> None:
    """Play every prompt with every script; appends to `transcripts`."""
    for prompt in prompts:
        for actions in _scripts(environment):
            transcript = await _play(environment, prompt, actions)
            transcripts.append(transcript)


async def _play(environment: Environment, prompt: Prompt, actions: Iterable[Action]) -> Transcript:
    """One episode; raises Broken for a reply of the wrong form."""
    environment.prompt = prompt
    opening = await _within(environment.reset(prompt))
    _check_messages("reset", opening)
    if not opening:
        raise Broken("reset returned no messages, expected at least one")
    transcript: Transcript = [_frozen(opening)]
    for action in actions:
        answer = await _within(environment.step(action))
        _check_step(answer)
        observation, reward, terminated, truncated, _ = answer
        transcript.append((_frozen(observation), reward, terminated, truncated))
        if terminated or truncated:
            break
    return transcript


def _check_step(answer: Any) -> None:
    if not isinstance(answer, tuple) or len(answer) != 5:
        raise Broken(
            f"step returned {type(answer).__name__}, expected StepResult(observation, reward, "
            "terminated, truncated, info)"
        )
    observation, reward, terminated, truncated, info = answer
    _check_messages("step", observation)
    if not isinstance(reward, int | float) or not math.isfinite(reward):
        raise Broken(f"step returned the reward {shown(reward)}, expected a finite number")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool):
            raise Broken(f"step returned {name} = {shown(flag)}, expected True or False")
    if not isinstance(info, dict):
        raise Broken(f"step returned the info {shown(info)}, expected a dict")


def _check_messages(where: str, messages: Any) -> None:
    if isinstance(messages, str) or not isinstance(messages, Sequence):
        raise Broken(
            f"{where} returned {type(messages).__name__} as its messages, expected a list such as "
            '[{"role": "user", "content": "..."}]'
        )
    for message in messages:
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise Broken(f"{where} returned the message {shown(message)}, expected a `role`")
        if not isinstance(message.get("content"), str):
            raise Broken(
                f"{where} returned the message {shown(message)}, expected a string `content`"
            )


def _tools(environment: Environment) -> list[Finding]:
    tools = environment.tools
    if not tools:
        return []
    wrong = [shown(tool) for tool in tools if not isinstance(tool, ToolSpec)]
    if wrong:
        return [Finding(False, "tools are ToolSpecs", f"{', '.join(wrong)}: expected a ToolSpec")]
    names = [tool.name for tool in tools]
    if len(set(names)) < len(names):
        return [Finding(False, "tools have different names", f"duplicates in {names}")]
    try:
        json.dumps([tool.as_template() for tool in tools])
    except TypeError as error:
        return [Finding(False, "tools are JSON", f"the parameters are not JSON: {error}")]
    return [Finding(True, f"tools: {', '.join(names)}")]


async def _tried(what: str, call: Awaitable[Any]) -> Finding:
    try:
        await call
    except TimeoutError:
        return Finding(False, what, f"took longer than {DEADLINE:.0f} s")
    except Broken as error:
        return Finding(False, what, str(error))
    except Exception as error:  # noqa: BLE001 - a user's code may raise anything
        return Finding(False, what, str(blame("it", error)))
    return Finding(True, what)


async def _again(
    environment: Environment, prompts: Sequence[Prompt], alone: list[Transcript]
) -> Finding:
    """The same rollouts on the same instance: `reset` must clear the state of the last one."""
    what = "a used instance plays like a new one"
    found: list[Transcript] = []
    tried = await _tried(what, _play_all(environment, prompts, found))
    if not tried.good or found == alone:
        return tried
    return Finding(
        False,
        what,
        "the same prompt and replies gave another rollout: clear the state of the last rollout in "
        "reset(), and seed random numbers by self.prompt.id, so that a resumed run repeats itself",
    )


async def _at_once(
    make: Callable[[], Environment], prompts: Sequence[Prompt], alone: list[Transcript]
) -> Finding:
    what = f"{INSTANCES} concurrent instances play like a single one"

    async def instance() -> list[Transcript]:
        environment = make()
        await _within(environment.setup())
        transcripts: list[Transcript] = []
        try:
            await _play_all(environment, prompts, transcripts)
        finally:
            with suppress(Exception):  # close is checked separately
                await _within(environment.close())
        return transcripts

    found: list[list[Transcript]] = []

    async def together() -> None:
        found.extend(await asyncio.gather(*(instance() for _ in range(INSTANCES))))

    tried = await _tried(what, together())
    if not tried.good or all(transcripts == alone for transcripts in found):
        return tried
    advice = "they share state: keep it on self, not in the class, the module or a file"
    return Finding(False, what, advice)


async def _cancelled(environment: Environment, prompt: Prompt) -> Finding:
    what = "a cancelled step ends immediately"
    environment.prompt = prompt
    await _within(environment.reset(prompt))
    task = asyncio.ensure_future(environment.step(Action("hello")))
    await asyncio.sleep(0)
    finished = task.done()
    task.cancel()
    _, pending = await asyncio.wait([task], timeout=5)
    if pending or not (finished or task.cancelled()):
        return Finding(False, what, "don't suppress CancelledError: catch Exception instead")
    return Finding(True, what)


async def _within(call: Awaitable[T]) -> T:
    if not inspect.isawaitable(call):
        raise Broken("it is not a coroutine function: write `async def`")
    async with asyncio.timeout(DEADLINE):
        return await call


def _frozen(messages: Sequence[Any]) -> str:
    return json.dumps(list(messages), sort_keys=True, default=repr)
