"""Scripted rollouts of agents, and what a config's rewards make of scripted replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from retrain.assembly import Parts
from retrain.config import RunConfig
from retrain.environment import Environment
from retrain.errors import BudgetError, RunError, UserCodeError, alike, shown
from retrain.rewarding import Reward, Scorer, WeightedReward, checked, compares
from retrain.rewarding.composition import ENVIRONMENT
from retrain.rewarding.processes import ProcessReward
from retrain.rollout import Slot
from retrain.scripted import Finding, Say, Script, doorway, scripted, waiting
from retrain.types import Prompt, Trajectory

GARBAGE = "]]}> \\boxed{ </think> 1e999 \x00 \ufffd \U0001f642 {{ ((" + "x" * 200
"""No answer to anything, and a trap for parsers."""
EMPTY = "empty text"
Case = tuple[str, Trajectory]
NO_ROLLOUT = "the agent plays 0 "
"""How the trial of an agent begins that plays no rollout."""
LABEL = 80
"""Characters of an answer that a line shows."""


@dataclass
class _Crashes:
    """The failed rollouts of an agent; errors that differ only by the rollout are one."""

    errors: dict[str, tuple[str, str, list[str]]] = field(default_factory=dict)
    """The text of an error, its outcome, and the cases that it ended."""

    def add(self, played: Trajectory, case: str) -> None:
        error = played.info["error"]
        self.errors.setdefault(alike(error), (error, played.outcome, []))[2].append(case)

    def lines(self, tried: int) -> tuple[str, ...]:
        """Each error with its cases, and what to do about it."""
        lines: list[str] = []
        for error, outcome, cases in self.errors.values():
            always = len(cases) == tried
            lines.append(error)
            lines.append(f"  {'in every rollout' if always else 'if ' + ', '.join(cases)}")
            lines.append(f"  {_advice(error, outcome, always=always)}")
        return tuple(lines)


def _advice(error: str, outcome: str, *, always: bool) -> str:
    if outcome == "timeout":
        return "end earlier, or raise deadlines.agent"
    if "never called the model" in error:
        return (
            "call the model at `base_url` with `api_key`; a command finds them in OPENAI_BASE_URL "
            "and OPENAI_API_KEY"
        )
    if always:
        return "it doesn't depend on what the model says: fix the agent"
    return (
        "such a rollout is not trained: catch the error, and return what there is. To train it "
        "with a low reward, return that"
    )


async def tried_agent(
    make: Callable[[], Environment],
    prompts: Sequence[Prompt],
    replies: Sequence[str],
    config: RunConfig,
    say: Say,
) -> list[Finding]:
    """Let an agent play the first prompt with each reply, and the others with the first reply.

    It ends with the first rollout that exceeds its deadline.
    """
    script, faults, crashes = Script(), list[str](), _Crashes()
    plays = [(0, reply) for reply in replies] + [(n, replies[0]) for n in range(1, len(prompts))]
    played: list[tuple[int, Trajectory]] = []
    async with doorway(True) as door:
        slot = Slot(1, make, scripted(config, script, door), Scorer([]), fault=faults.append)
        try:
            for row, script.reply in plays:
                case = f"the model says {shown(script.reply, 24)} in row {row}"
                limit = f"at most {config.deadlines.agent:g} s (deadlines.agent)"
                with waiting(say, f"the agent, where {case}: {limit}"):
                    trajectory = (await slot.play(prompts[row])).trajectories[0]  # all fail alike
                played.append((row, trajectory))
                if trajectory.outcome != "ok":
                    crashes.add(trajectory, case)
                if trajectory.outcome == "timeout":
                    break
        finally:
            await slot.close()
    lines = crashes.lines(len(played))
    if left := len(plays) - len(played):
        lines = (*lines, f"{left} further rollouts were not tried after the timeout")
    good = [(row, t) for row, t in played if t.outcome == "ok"]
    return _agents_trials(good, len(prompts), len(plays), lines, faults)


def _agents_trials(
    good: Sequence[tuple[int, Trajectory]],
    prompts: int,
    plays: int,
    lines: Sequence[str],
    faults: Sequence[str],
) -> list[Finding]:
    """Whether each row was played, and whether all rollouts were; `lines` are about those that
    were not."""
    rows = len({row for row, _ in good})
    trials = [
        _found(
            rows == prompts,
            f"the agent plays {rows} of {prompts} rows",
            tuple(lines) if rows < prompts else (),
        ),
        _found(
            len(good) == plays and not faults,
            f"the agent ends without an error in {len(good)} of {plays} rollouts",
            (*(lines if rows == prompts else ()), *faults),
        ),
    ]
    limits = [str(t.info["truncated"]) for _, t in good if "truncated" in t.info]
    if limits:
        names = ", ".join(sorted(set(limits)))
        met = f"{len(limits)} rollouts met the limit {names}, and count as they are"
        trials.append(_found(True, met))
    return trials


async def tried_rewards(parts: Parts, prompts: Sequence[Prompt]) -> list[Finding]:
    """Call each reward with rollouts that say the answer of the row, nothing, and garbage.

    The rollouts are played in the config's environment, so that rewards find its `info`.
    """
    prompt = next((p for p in prompts if p.answer is not None), prompts[0])
    cases, failed = await _played(parts, prompt)
    trials: list[Finding] = []
    if not cases:
        return [_found(False, "rewards: not tried, as no rollout succeeds", tuple(failed))]
    if failed:
        lines = [f"{', '.join(labels)}: {error}" for error, labels in failed.items()]
        lines.append("such a rollout is not trained: catch the error in the environment")
        what = "a rollout for the rewards fails"
        trials.append(Finding(True, what, "\n".join(lines), warning=True))
    if not parts.scorer.rewards or any(t.rewards.get(ENVIRONMENT) for _, t in cases):
        trials.append(_of_environment(cases))
    faults: list[str] = []
    try:
        async with parts.scorer.serving(faults.append):
            trials += [await _trial(parts.scorer, part, cases) for part in parts.scorer.rewards]
    except RunError as error:
        trials.append(_found(False, "rewards: setup", [str(error)]))
    return [*trials, *(_found(False, "rewards: close", [fault]) for fault in faults)]


async def _played(parts: Parts, prompt: Prompt) -> tuple[list[Case], Mapping[str, list[str]]]:
    """A rollout for each reply; for those that fail, the labels per error."""
    replies = {EMPTY: "", "garbage": GARBAGE}
    if prompt.answer is not None:
        replies = {f"answer {shown(prompt.answer, LABEL)}": str(prompt.answer), **replies}
    script, unscored = Script(), Scorer([])
    cases: list[Case] = []
    failed: dict[str, list[str]] = {}
    async with doorway(parts.runs_agent) as door:
        rollouts = scripted(parts.config, script, door)
        slot = Slot(1, parts.environment, rollouts, unscored, fault=lambda _: None)
        try:
            for label, script.reply in replies.items():
                for played in (await slot.play(prompt)).trajectories:
                    seated = f"{label} {played.seat}".rstrip()
                    if played.outcome == "ok":
                        cases.append((seated, played))
                    else:
                        failed.setdefault(played.info["error"], []).append(seated)
        finally:
            await slot.close()
    return cases, failed


def _of_environment(cases: Sequence[Case]) -> Finding:
    """The reward of the environment's steps: an empty text must not get all of it."""
    lines = [f"{label}: {t.rewards.get(ENVIRONMENT, 0.0):g}" for label, t in cases]
    short = {label: t for label, t in cases if not t.seat and len(t.turns) == 1}
    values = {label: t.rewards.get(ENVIRONMENT, 0.0) for label, t in short.items()}
    empty = values.pop(EMPTY, 0.0)
    values.pop("garbage", None)
    full = max(values.values(), default=1.0)
    good = empty <= 0 or empty < full
    if not good:
        lines.append(
            "an empty text gets the full reward, so there is nothing to learn: check that the row "
            "has what the environment compares the reply with, such as tests or an answer"
        )
    return _found(good, f"reward '{ENVIRONMENT}'", lines)


def _found(good: bool, what: str, lines: Sequence[str] = ()) -> Finding:
    return Finding(good, what, "\n".join(lines))


async def _trial(scorer: Scorer, part: WeightedReward, cases: Sequence[Case]) -> Finding:
    """The verdicts of one reward, with the time of each call."""
    lines: list[str] = []
    calculator = part.calculator
    judge = calculator.inner if isinstance(calculator, ProcessReward) else calculator
    calls = [cases] if compares(judge) else [[case] for case in cases]
    good, failed = True, dict[str, list[str]]()
    for call in calls:
        started = time.perf_counter()
        verdicts = await scorer.verdicts(part, [trajectory for _, trajectory in call])
        took = f"in {1000 * (time.perf_counter() - started):.1f} ms"
        for (label, trajectory), verdict in zip(call, verdicts, strict=True):
            try:
                judged = checked(part.name, verdict)
            except (UserCodeError, BudgetError) as error:  # which is often the same for every reply
                failed.setdefault(str(error), []).append(label)
                continue
            trajectory.rewards[part.name] = judged.value  # for those that come after it
            good = good and judged.outcome in ("ok", "invalid")
            lines.append(f"{label}: {_described(judged)} {took}")
    lines += [f"{', '.join(labels)}: {error}" for error, labels in failed.items()]
    return _found(good and not failed, f"reward '{part.name}'", tuple(lines))


def _described(judged: Reward) -> str:
    if judged.outcome != "ok":
        return judged.outcome
    components = ", ".join(f"{name} {value:g}" for name, value in judged.components.items())
    return f"{judged.value:g}" + (f" ({components})" if components else "")
