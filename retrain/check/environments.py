"""The conformance kit of environments, without a model.

It checks the Environment's contract: types, state that `reset` clears, independent instances,
cancellation, no leaked task. The rollouts are played by the code that plays those of a run, so that
both accept the same environments.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from retrain.check.agents import tried_agent
from retrain.check.bench import (
    INSTANCES,
    Bench,
    Finding,
    Say,
    explained,
    fail,
    limited,
    ok,
    tried,
    warn,
)
from retrain.check.replay import Played, calls_for, compare, played, texts_for, tools_finding
from retrain.check.scripted import TEXTS, wrong_calls
from retrain.config import RunConfig
from retrain.environment import Action, Environment
from retrain.errors import UserCodeError
from retrain.rollout.answers import tools_of
from retrain.rollout.instance import Instance, closed
from retrain.scoring.calls import together
from retrain.supervision.boundary import boundary
from retrain.types import Prompt

SOON = 5.0
"""Seconds that a cancelled step may take to end, with `close`."""
SAMPLES = (
    Prompt("0.0.0", ({"role": "user", "content": "a="},), answer="aaaa"),
    Prompt("0.1.0", ({"role": "user", "content": "What is 2 + 3?"},), answer="5"),
)
"""Prompts for an environment without a config."""
SETUP = "setup"
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


async def check_environment(
    make: Callable[[], Environment],
    prompts: Sequence[Prompt] = SAMPLES,
    config: RunConfig | None = None,
    say: Say = lambda text: None,
) -> list[Finding]:
    """Check an environment's contract; `make` returns a new instance.

    As in a run, each instance has one task, in which all its methods are called. The deadlines are
    those of `config`, and those of `limited` that it leaves out. Each tool is called once in each
    of 2 + INSTANCES rollouts. `say` is called with what is being waited for, if it takes long.
    """
    given = config or RunConfig()
    bench = Bench(make, prompts, limited(given), say)
    with bench.blocks.watched():
        findings = await contract(bench)
    return explained([*findings, bench.blocks.finding()], given)


async def contract(bench: Bench) -> list[Finding]:
    """What `check_environment` finds, but for what blocks the loop."""
    before = asyncio.all_tasks()
    faults: list[str] = []
    [instance] = bench.instances(faults)
    with bench.waiting(f"{instance.name}.setup", "setup"):
        await instance.open()
    findings = _unusable(instance)
    if findings or "run" in instance.overridden:
        await closed([instance])
    if findings:
        findings += [fail("close", fault) for fault in faults]
    elif "run" in instance.overridden:
        findings = [ok(SETUP), *await tried_agent(bench, [*TEXTS, *wrong_calls(())])]
    else:
        findings = await _checked_steps(bench, instance, faults)
    return [*findings, *_leaks(before)]


def _unusable(instance: Instance) -> list[Finding]:
    """Why it can't play, if so."""
    if instance.error is not None:
        return [fail(SETUP, str(instance.error), fatal=True)]
    try:
        tools_of(instance.name, instance.environment)
    except UserCodeError as error:
        return [fail("tools are valid", str(error), fatal=True)]
    return []


async def _checked_steps(bench: Bench, instance: Instance, faults: list[str]) -> list[Finding]:
    """Check what `reset` and `step` return, and close the instance."""
    texts = texts_for(bench.prompts)
    replied: list[Played] = []
    called: list[Played] = []

    async def play() -> None:
        replied.extend(*await played(bench, [instance], texts))
        with boundary(instance.name):
            calls = calls_for(bench.prompts[0], instance.environment.tools)  # `reset` may set them
        called.extend(*await played(bench, [instance], calls))

    right = await tried("reset and step return the right types", play())
    if right.good and len(replied) < len(texts):
        some = f"{len(replied)} of {len(texts)} replies were tried, because the environment is slow"
        right = replace(right, advice=some)
    findings = [ok(SETUP), right]
    if right.good:
        if tools := [one for one in called if one.play.call]:
            findings.insert(0, tools_finding(tools))
        if not bench.blocks.too_long:
            first = [one for one in replied + called if not one.slow]
            findings += await _compared(bench, instance, first)
    await closed([instance])
    if right.good and not faults and not bench.blocks.too_long:
        findings.append(await _cancelled(bench))
    return [*findings, fail("close", faults[0]) if faults else ok("close")]


async def _compared(bench: Bench, instance: Instance, first: Sequence[Played]) -> list[Finding]:
    """Play again, in the same instance and in several new ones at once."""
    plays = [one.play for one in first]
    differ: dict[str, str] = {}

    async def again() -> None:
        differ.update(compare(first, await played(bench, [instance], plays), AGAIN))

    async def at_once() -> None:
        instances = bench.instances([], INSTANCES)
        try:
            await together([one.open() for one in instances])
            others = await played(bench, instances, plays)
        finally:  # close is checked separately
            await closed(instances)
        differ.update(compare(first, others, SHARED) | differ)

    findings = [
        await tried("a reused instance behaves like a new one", again()),
        await tried(f"{INSTANCES} concurrent instances behave like one", at_once()),
    ]
    if differ:
        what = "the result of a tool differs for the same call"
        findings.append(warn(what, *differ.values(), VARIES))
    return findings


async def _cancelled(bench: Bench) -> Finding:
    """Whether a step ends that is cancelled, and does not block the loop for it."""
    before = bench.blocks.seconds
    ends = await tried("a cancelled step ends immediately", _cancel(bench))
    if ends.good and bench.blocks.seconds > before:
        return fail(ends.what, "it blocks the event loop (see below)")
    return ends


async def _cancel(bench: Bench) -> None:
    """Cancel a step as the end of a run does: it must end, and `close` must work after it."""
    faults: list[str] = []
    [instance] = bench.instances(faults)
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
    if instance.error is not None:
        await instance.retire()
        raise instance.error
    environment, prompt = instance.environment, bench.prompts[0]
    environment.prompt = prompt
    await instance.call("reset", lambda: environment.reset(prompt))
    playing = asyncio.create_task(instance.call("step", step))
    _, stuck = await asyncio.wait([playing], timeout=SOON)
    await instance.retire()
    if swallowed or stuck:
        raise UserCodeError("don't suppress CancelledError: catch Exception instead")
    if faults:
        raise UserCodeError(f"close() failed after a cancelled step: {faults[0]}")


def _leaks(before: set[asyncio.Task[Any]]) -> list[Finding]:
    """Whether only tasks of `before` still run."""
    what, left = "no task is leaked", asyncio.all_tasks() - before - {asyncio.current_task()}
    names = sorted({task.get_name() for task in left})
    return [fail(what, f"end them in close(): {', '.join(names[:8])}") if left else ok(what)]
