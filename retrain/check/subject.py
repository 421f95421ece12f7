"""The conformance kit of environments, and a try of a config's rewards, without a model.

`check_environment` checks the Environment's contract: types, state that `reset` clears, independent
instances, cancellation, no leaked task. Authors can call it in their own tests. The rollouts are
played by the code that plays those of a run, so that both accept the same environments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.assembly import Parts, assemble, maker
from retrain.check import NO_ROLLOUT, tried_agent, tried_rewards
from retrain.check.replay import (
    Play,
    Played,
    calls_for,
    compare,
    played,
    repeatable,
    texts_for,
    tools_finding,
)
from retrain.check.scripted import TEXTS, Blocks, Finding, Say, tried, waiting, wrong_calls
from retrain.config import DeadlinesConfig, Plugin, PromptsConfig, RunConfig, load_config
from retrain.config.paths import TINY, find_model
from retrain.config.plugins import built_in_names, config_file, construct, find_object
from retrain.config.variables import Problems, filled_in
from retrain.config.yaml_text import parse_override
from retrain.environment import Action, Environment
from retrain.errors import ConfigError, NotFoundError, PluginError, UserCodeError
from retrain.prompts import Origin
from retrain.prompts.building import built
from retrain.rollout.answers import tools_of
from retrain.rollout.instance import Instance, closed
from retrain.scoring.calls import together
from retrain.types import Prompt, Ticket

PROMPTS = 3
INSTANCES = 4
DEADLINE = 30.0
"""Seconds that one call may take, unless the config's `deadlines` say otherwise."""
LIMITED = ("reset", "step", "agent", "close", "reward")
"""The deadlines that DEADLINE replaces. `setup` keeps its own: it may load an index or a model."""
SOON = 5.0
"""Seconds that a cancelled step may take to end, with `close`."""
SAMPLES = (
    Prompt("0.0.0", ({"role": "user", "content": "a="},), answer="aaaa"),
    Prompt("0.1.0", ({"role": "user", "content": "What is 2 + 3?"},), answer="5"),
)
"""Prompts for an environment without a config."""
SETUP, TOOLS = "setup", "tools are valid"
"""Without these, no rollout can be played."""
AGAIN = (
    "the same prompt and replies gave a different rollout: clear the state of the last rollout "
    "in reset(), and seed random numbers with self.prompt.seed, so that a resumed run repeats "
    "itself"
)
SHARED = "they share state: keep it on self, not in the class, the module or a file"
VARIES = (
    "this is expected for a clock or a live search. If the tool keeps state, create that state "
    "anew for each rollout"
)


async def check_subject(
    subject: str,
    keys: Sequence[str] = (),
    say: Say = lambda text: None,
    replies: Sequence[str] = (),
    watched: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> list[Finding]:
    """Check a config's environment and rewards with its prompts, or an environment on its own.

    `keys` are overrides of the config, or `key=value` of the environment. `say` is called with what
    is being waited for, if it takes long. The rewards of a config score `replies` too. `watched` is
    entered for the checks, not while prompts load. Raises ConfigError if it can't be loaded.
    """
    own = subject in built_in_names("environment")  # some included configs have such a name
    file = Path(subject) if own else config_file(subject)
    if file.suffix in (".yaml", ".yml"):
        config, absent = _without_model(load_config(file, keys))
        loaded = assemble(config)
        parts = replace(loaded, config=_limited(loaded.config))
        with watched():
            findings = await _checked_parts(parts, say, replies)
        return _explained([*absent, *findings], loaded.config)
    if replies:
        raise ConfigError(f"--reply: got the environment {subject}, expected a config with rewards")
    unset: Problems = {}
    given = {path[0]: value for path, value in map(parse_override, keys)}
    arguments = filled_in(given, unset)
    if unset:
        raise ConfigError(*(f"{path}: {problem}" for path, problem in unset.items()))
    plugin = Plugin.model_validate({**arguments, "type": subject})
    config = RunConfig(base_dir=Path.cwd())
    try:
        make: Callable[[], Environment] = maker("environment", plugin, "environment", config)
    except PluginError as error:
        raise _as_tool(subject, error) from error
    prompts = _own_tasks(make) or SAMPLES
    with watched():
        return await check_environment(make, prompts, say=say)


def _without_model(config: RunConfig) -> tuple[RunConfig, list[Finding]]:
    """The config; if its model is not trained yet, with another one and a warning."""
    try:
        find_model(config.model, config.base_dir)
    except NotFoundError as error:
        absent = Finding(True, "the model does not exist yet", str(error), warning=True)
        return config.model_copy(update={"model": TINY}), [absent]
    except ConfigError:  # `assemble` reports it with the other problems
        pass
    return config, []


async def _checked_parts(parts: Parts, say: Say, replies: Sequence[str]) -> list[Finding]:
    """Check the environment and the rewards of a config."""
    seed, rows = parts.config.train.seed, parts.prompts.first_rows(PROMPTS)
    prompts = [parts.prompts.prompt(Ticket(0, row), seed) for row in rows]
    fit = [Finding(True, "all parts of the config load and fit together")]
    fit += [Finding(True, text, warning=True) for text in parts.warnings]
    if (source := parts.algorithm.source) != "rollouts":
        unused = f"the rows are {source}: the environment and the rewards are not used"
        return [*fit, Finding(True, unused)]
    blocks = Blocks()
    with blocks.watched():
        findings = await _checked(parts.environment, prompts, parts.config, say, blocks)
        if any(not f.good and f.what.startswith((SETUP, TOOLS, NO_ROLLOUT)) for f in findings):
            trials = [Finding(False, "rewards: not tried, because no rollout succeeds")]
        elif blocks.too_long:
            trials = [Finding(False, "rewards: not tried, because the event loop is blocked")]
        else:
            with waiting(say, "the rewards, called for a few rollouts"):
                trials = await tried_rewards(parts, prompts, replies)
    return [*fit, *findings, blocks.finding(), *trials]


def _as_tool(subject: str, error: PluginError) -> PluginError:
    """The error of a subject that is no environment, with what to do if it is a tool."""
    try:
        found = find_object(subject, Path.cwd(), "environment")
    except PluginError:
        return error
    is_class = isinstance(found, type) and issubclass(found, Environment)
    if is_class or not callable(found) or ":" not in subject:
        return error
    return PluginError(
        f"{subject} is not an environment. To check it as a tool: "
        f"retrain check tools 'tools=[{subject}]'. In a config: "
        f"`environment: {{type: tools, tools: [{subject}]}}`."
    )


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
    those of `config`, and DEADLINE for those of LIMITED that it leaves out. Each tool is called
    once in each of 2 + INSTANCES rollouts. `say` is called with what is being waited for, if it
    takes long.
    """
    blocks = Blocks()
    with blocks.watched():
        findings = await _checked(make, prompts, config or RunConfig(), say, blocks)
    return [*findings, blocks.finding()]


async def _checked(
    make: Callable[[], Environment],
    prompts: Sequence[Prompt],
    given: RunConfig,
    say: Say,
    blocks: Blocks,
) -> list[Finding]:
    """What `check_environment` finds, but for `blocks`, which ends what would take too long."""
    config = _limited(given)
    before = asyncio.all_tasks()
    faults: list[str] = []
    [instance] = _instances(make, config.deadlines, faults)
    limit = f"at most {config.deadlines.setup:g} s (deadlines.setup)"
    with waiting(say, f"{instance.name}.setup: {limit}"):
        await instance.open()
    what, error = SETUP, instance.error
    if error is None:
        try:
            tools_of(instance.name, instance.environment)
        except UserCodeError as wrong:
            what, error = TOOLS, wrong
    if error is not None:
        await closed([instance])
        findings = [Finding(False, what, str(error)), *(Finding(False, "close", f) for f in faults)]
    elif "run" in instance.overridden:
        await closed([instance])
        replies = [*TEXTS, *wrong_calls(())]
        agent = await tried_agent(make, prompts, replies, config, say, blocks)
        findings = [Finding(True, SETUP), *agent]
    else:
        findings = await _checked_steps(
            make, instance, prompts, config.deadlines, say, faults, blocks
        )
    return _explained([*findings, *_leaks(before)], given)


async def _checked_steps(
    make: Callable[[], Environment],
    instance: Instance,
    prompts: Sequence[Prompt],
    limits: DeadlinesConfig,
    say: Say,
    faults: list[str],
    blocks: Blocks,
) -> list[Finding]:
    """Check what `reset` and `step` return, and close the instance."""
    texts = texts_for(prompts)
    plays: list[Play] = []
    first: list[Played] = []

    async def play() -> None:
        first.extend(*await played([instance], texts, limits, say, blocks))
        plays.extend(texts[: len(first)])
        calls = calls_for(prompts[0], instance.environment.tools)  # `reset` may set them
        plays.extend(calls)
        first.extend(*await played([instance], calls, limits, say, blocks))

    right = await tried("reset and step return the right types", play())
    if right.good and len(plays) < len(texts):
        some = f"{len(plays)} of {len(texts)} replies were tried, because the environment is slow"
        right = replace(right, advice=some)
    del plays[len(first) :]
    findings = [Finding(True, SETUP), right]
    if right.good:
        if any(play.call for play in plays):
            findings.insert(0, tools_finding(plays, first))
        if not blocks.too_long:
            pairs = repeatable(plays, first)
            findings += await _compared(make, instance, pairs, limits, say, blocks)
    await closed([instance])
    if right.good and not faults and not blocks.too_long:
        cancel, before = _cancelled(make, prompts[0], limits), blocks.seconds
        ends = await tried("a cancelled step ends immediately", cancel)
        if ends.good and blocks.seconds > before:
            ends = replace(ends, good=False, advice="it blocks the event loop (see below)")
        findings.append(ends)
    return [*findings, Finding(not faults, "close", "".join(faults[:1]))]


async def _compared(
    make: Callable[[], Environment],
    instance: Instance,
    pairs: Sequence[tuple[Play, Played]],
    limits: DeadlinesConfig,
    say: Say,
    blocks: Blocks,
) -> list[Finding]:
    """Play again, in the same instance and in several new ones at once."""
    plays = [play for play, _ in pairs]
    differ: dict[str, str] = {}

    async def again() -> None:
        others = await played([instance], plays, limits, say, blocks)
        differ.update(compare(pairs, others, AGAIN))

    async def at_once() -> None:
        instances = _instances(make, limits, [], INSTANCES)
        try:
            await together([one.open() for one in instances])
            others = await played(instances, plays, limits, say, blocks)
        finally:  # close is checked separately
            await closed(instances)
        differ.update(compare(pairs, others, SHARED) | differ)

    findings = [
        await tried("a reused instance behaves like a new one", again()),
        await tried(f"{INSTANCES} concurrent instances behave like one", at_once()),
    ]
    if differ:
        lines = "\n".join([*differ.values(), VARIES])
        what = "the result of a tool differs for the same call"
        findings.append(Finding(True, what, lines, warning=True))
    return findings


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
    given = {name: getattr(config.deadlines, name) for name in config.deadlines.model_fields_set}
    limits = DeadlinesConfig(**{**dict.fromkeys(LIMITED, DEADLINE), **given})
    return config.model_copy(update={"deadlines": limits})


def _explained(findings: Sequence[Finding], given: RunConfig) -> list[Finding]:
    """The findings, where a deadline that the config doesn't set is said to be the check's own."""

    def said(text: str) -> str:
        for key in set(LIMITED) - given.deadlines.model_fields_set:
            own = f"{DEADLINE:g} s, the limit of this check. To raise it, set deadlines.{key}."
            text = text.replace(f"deadlines.{key} = {DEADLINE} s", own)
        return text

    return [replace(finding, advice=said(finding.advice)) for finding in findings]


async def _cancelled(
    make: Callable[[], Environment], prompt: Prompt, limits: DeadlinesConfig
) -> None:
    """Cancel a step as the end of a run does: it must end, and `close` must work after it."""
    faults: list[str] = []
    [instance] = _instances(make, limits, faults)
    swallowed = False

    async def step() -> None:
        nonlocal swallowed
        task = asyncio.current_task()
        assert task is not None
        soon = asyncio.get_running_loop().call_soon(task.cancel)
        try:
            await environment.step(Action("hello"))
            swallowed = task.cancelling() > 0
        finally:
            soon.cancel()  # the step may be over

    await instance.open()
    environment = instance.environment
    environment.prompt = prompt
    await instance.call("reset", lambda: environment.reset(prompt))
    playing = asyncio.create_task(instance.call("step", step))
    _, stuck = await asyncio.wait([playing], timeout=SOON)
    await instance.retire()
    if swallowed or stuck:
        raise UserCodeError("don't suppress CancelledError: catch Exception instead")
    if faults:
        raise UserCodeError(f"close() failed after a cancelled step: {faults[0]}")
