"""The conformance kit of environments, and a try of a config's rewards, without a model.

`check_environment` checks the Environment's contract: types, state that `reset` clears, independent
instances, cancellation, no leaked task. Authors can call it in their own tests. The rollouts are
played by the code that plays those of a run, so that both accept the same environments.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.assembly import assemble, maker
from retrain.chat.formats.hermes import CLOSE, OPEN
from retrain.concurrency.deadlines import cancelled, user_call
from retrain.config import (
    DeadlinesConfig,
    Plugin,
    PromptsConfig,
    RolloutConfig,
    RunConfig,
    load_config,
)
from retrain.config.plugins import built_in_names, construct
from retrain.config.yaml_text import parse_override
from retrain.environment import Action, Environment, ToolSpec
from retrain.errors import UserCodeError, blame
from retrain.prompts import Origin
from retrain.prompts.building import built
from retrain.rollout.answers import tools_of
from retrain.rollout.instance import Instance, Job, closed
from retrain.run import config_file
from retrain.trial import (
    NO_ROLLOUT,
    Say,
    Script,
    Trial,
    scripted,
    tried_agent,
    tried_rewards,
    waiting,
)
from retrain.types import Prompt, Ticket

Transcript = list[Any]  # what an environment replied: only compared
PROMPTS = 3
TURNS = 8
INSTANCES = 8
DEADLINE = 30.0
"""Seconds that one call may take, unless the config's `deadlines` say otherwise."""
SOON = 5.0
"""Seconds that a cancelled step may take to end, with `close`."""
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


async def check_subject(
    subject: str, keys: Sequence[str] = (), say: Say = lambda text: None
) -> list[Finding]:
    """Check a config's environment and rewards with its prompts, or an environment on its own.

    `keys` are overrides of the config, or `key=value` of the environment. `say` is called with what
    is being waited for, if it takes long. Raises ConfigError if it can't be loaded.
    """
    own = subject in built_in_names("environment")  # some included configs have such a name
    file = Path(subject) if own else config_file(subject)
    if file.suffix in (".yaml", ".yml"):
        loaded = assemble(load_config(file, keys))
        parts = replace(loaded, config=_limited(loaded.config))
        count = min(PROMPTS, len(parts.prompts))
        seed = parts.config.train.seed
        prompts = [parts.prompts.prompt(Ticket(0, index), seed) for index in range(count)]
        fit = Finding(True, "all parts of the config load and fit together")
        if (source := parts.algorithm.source) != "rollouts":
            unused = f"the rows are {source}: no environment and no reward is used"
            return [fit, Finding(True, unused)]
        findings = await check_environment(parts.environment, prompts, parts.config, say)
        if any(finding.what.startswith(NO_ROLLOUT) for finding in findings):
            return [fit, *findings, Finding(False, "rewards: not tried, as no rollout succeeds")]
        with waiting(say, "the rewards, called for three rollouts"):
            trials = await tried_rewards(parts, prompts)
        return [fit, *findings, *map(_finding, trials)]
    arguments = {path[0]: value for path, value in map(parse_override, keys)}
    plugin = Plugin.model_validate({**arguments, "type": subject})
    config = RunConfig(base_dir=Path.cwd())
    make: Callable[[], Environment] = maker("environment", plugin, "environment", config)
    return await check_environment(make, _own_tasks(make) or SAMPLES)


def _own_tasks(make: Callable[[], Environment]) -> list[Prompt]:
    """The first tasks of an environment that has any."""
    environment = construct("environment", make)
    if type(environment).prompts is Environment.prompts:
        return []
    origin = Origin("prompts", Path.cwd(), lambda: environment)
    source = built(PromptsConfig(type="environment", limit=PROMPTS), origin)
    return [source.prompt(Ticket(0, index)) for index in range(len(source))]


async def check_environment(
    make: Callable[[], Environment],
    prompts: Sequence[Prompt] = SAMPLES,
    config: RunConfig | None = None,
    say: Say = lambda text: None,
) -> list[Finding]:
    """Check an environment's contract; `make` returns a new instance.

    As in a run, each instance has one task, in which all its methods are called. The deadlines are
    those of `config`, and DEADLINE for those that it leaves out. `say` is called with what is being
    waited for, if it takes long.
    """
    config = _limited(config or RunConfig())
    limits = config.deadlines
    before = asyncio.all_tasks()
    faults: list[str] = []
    [instance] = _instances(make, limits, faults)
    with waiting(say, f"{instance.name}.setup: at most {limits.setup:g} s (deadlines.setup)"):
        await asyncio.wait([instance.ready])
    if instance.error is not None:
        await closed([instance], DEADLINE)
        close = [Finding(False, "close", faults[0])] if faults else []
        return [Finding(False, "setup", str(instance.error)), *close, *_leaks(before)]
    try:
        tools = tools_of(instance.name, instance.environment)
    except UserCodeError as error:
        await closed([instance], DEADLINE)
        return [Finding(False, "tools are valid", str(error))]
    if instance.overrides("run"):
        await closed([instance], DEADLINE)
        replies = [*_replies(()), *_calls(())]
        trials = await tried_agent(make, prompts, replies, config, say)
        return [Finding(True, "setup"), *map(_finding, trials), *_leaks(before)]
    alone: Transcript = []

    async def play() -> None:
        alone.extend(*await _played([instance], prompts, limits))

    findings = [Finding(True, f"tools: {', '.join(tool.name for tool in tools)}")] if tools else []
    findings += [
        Finding(True, "setup"),
        await _tried("reset and step return the right types", play()),
    ]
    good = findings[-1].good
    if good:
        more = (
            ("a reused instance behaves like a new one", _again(instance, prompts, limits, alone)),
            (
                f"{INSTANCES} concurrent instances play like one",
                _at_once(make, prompts, limits, alone),
            ),
        )
        findings += [await _tried(what, check) for what, check in more]
    await closed([instance], DEADLINE)
    if good and not faults:
        cancel = _cancelled(make, prompts[0], limits)
        findings.append(await _tried("a cancelled step ends immediately", cancel))
    findings.append(Finding(not faults, "close", "".join(faults[:1])))
    return [*findings, *_leaks(before)]


def _leaks(before: set[asyncio.Task[Any]]) -> list[Finding]:
    """Whether only tasks of `before` still run."""
    left = {t.get_name() for t in asyncio.all_tasks() - before if t is not asyncio.current_task()}
    advice = f"end them in close(): {', '.join(sorted(left)[:8])}" if left else ""
    return [Finding(not left, "no task is leaked", advice)]


def _instances(
    make: Callable[[], Environment], limits: DeadlinesConfig, faults: list[str], count: int = 1
) -> list[Instance]:
    """New instances, as a slot of a run makes them; errors of `close` are added to `faults`."""
    setups = asyncio.Semaphore(INSTANCES)
    return [Instance(make, limits, setups, faults.append) for _ in range(count)]


def _limited(config: RunConfig) -> RunConfig:
    """`config` with DEADLINE for the calls of user code that it sets no deadline for."""
    calls = dict.fromkeys(("setup", "reset", "step", "agent", "close", "reward"), DEADLINE)
    given = {name: getattr(config.deadlines, name) for name in config.deadlines.model_fields_set}
    return config.model_copy(update={"deadlines": DeadlinesConfig(**{**calls, **given})})


def _finding(trial: Trial) -> Finding:
    return Finding(trial.good, trial.what, "\n      ".join(trial.lines))


async def _tried(what: str, check: Awaitable[None]) -> Finding:
    try:
        await check
    except UserCodeError as error:
        return Finding(False, what, str(error))
    except Exception as error:  # noqa: BLE001 - a user's object may raise anything
        return Finding(False, what, str(blame("it", error)))
    return Finding(True, what)


async def _again(
    instance: Instance, prompts: Sequence[Prompt], limits: DeadlinesConfig, alone: Transcript
) -> None:
    if await _played([instance], prompts, limits) != [alone]:
        raise UserCodeError(
            "the same prompt and replies gave another rollout: clear the state of the last rollout "
            "in reset(), and seed random numbers by self.prompt.seed, so that a resumed run "
            "repeats itself"
        )


async def _at_once(
    make: Callable[[], Environment],
    prompts: Sequence[Prompt],
    limits: DeadlinesConfig,
    alone: Transcript,
) -> None:
    instances = _instances(make, limits, [], INSTANCES)
    try:
        await asyncio.wait([instance.ready for instance in instances])
        found = await _played(instances, prompts, limits)
    finally:  # close is checked separately
        await closed(instances, DEADLINE)
    if found != [alone] * INSTANCES:
        raise UserCodeError(
            "they share state: keep it on self, not in the class, the module or a file"
        )


async def _cancelled(
    make: Callable[[], Environment], prompt: Prompt, limits: DeadlinesConfig
) -> None:
    """Cancel a step as the end of a run does: it must end, and `close` must work after it."""
    faults: list[str] = []
    [instance] = _instances(make, limits, faults)
    swallowed = False

    async def step() -> None:
        nonlocal swallowed
        environment = instance.environment
        environment.prompt = prompt
        await user_call("reset", lambda: environment.reset(prompt), DEADLINE, "reset")
        asyncio.get_running_loop().call_soon(instance.retire)
        await environment.step(Action("hello"))
        swallowed = cancelled()

    await asyncio.wait([instance.ready])
    instance.do(Job(step, lambda _: None, lambda _: None))
    await asyncio.wait([instance.ended], timeout=SOON)
    if not instance.ended.done():
        instance.abandon(UserCodeError(instance.name))
        swallowed = True
    if swallowed:
        raise UserCodeError("don't suppress CancelledError: catch Exception instead")
    if faults:
        raise UserCodeError(f"after it: {faults[0]}")


async def _played(
    instances: Sequence[Instance], prompts: Sequence[Prompt], limits: DeadlinesConfig
) -> list[Transcript]:
    """What each environment replies to every prompt and script, all environments at once.

    Raises UserCodeError for a rollout that fails.
    """
    script = Script()
    turns = RolloutConfig(max_turns=TURNS)
    config = RunConfig(rollout=turns, deadlines=limits)
    rollouts = scripted(config, script)
    transcripts: list[Transcript] = [[] for _ in instances]
    for prompt in prompts:
        for script.reply in _replies(instances[0].environment.tools):
            # each as the first rollout of a group: the others may differ by `prompt.index`
            groups = await asyncio.gather(*(rollouts.play(prompt, [i]) for i in instances))
            for transcript, group in zip(transcripts, groups, strict=True):
                for played in group.trajectories:
                    if played.outcome != "ok":
                        raise UserCodeError(played.info["error"])
                    last = [repr(turn.observation) for turn in played.turns[-1:]]
                    transcript.append((played.messages, played.rewards, len(played.turns), last))
    return transcripts


def _replies(tools: Sequence[ToolSpec]) -> Iterator[str]:
    """The replies to try, right and wrong ones."""
    yield from ("hello", "", "42", "x" * 2000)
    if tools:
        yield from _calls(tools)


def _calls(tools: Sequence[ToolSpec]) -> Iterator[str]:
    """Replies with a call of each tool, right and wrong, and of no tool."""
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
