"""Score scripted replies with a config's rewards, and with those of its environment."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from retrain.assembly import Parts
from retrain.check.bench import Finding, fail, ok, warn
from retrain.check.cases import (
    ANSWER,
    EMPTY,
    LABEL,
    NONSENSE,
    REPLY,
    SECONDS,
    Case,
    inner,
    played_cases,
    rewarded,
    sampled_rows,
    solved_by_answers,
)
from retrain.errors import BudgetError, RunError, UserCodeError, first_of, shown
from retrain.scoring import Reward, Scorer, WeightedReward, checked, compares
from retrain.scoring.composition import ENVIRONMENT
from retrain.types import Prompt

SHOWN = 5
"""Rows with a wrong answer that are listed."""
TRY = "try one with --reply TEXT"


async def tried_rewards(
    parts: Parts, prompts: Sequence[Prompt], replies: Sequence[str] = ()
) -> list[Finding]:
    """Call each reward with rollouts that say the answer of the row, `replies`, nothing, garbage.

    `environment` is the reward of the environment's steps, if they give any or nothing else does.
    """
    rows = sampled_rows(prompts)
    findings = [_subjects(parts, rows)]
    if not replies and all(prompt.answer is None for prompt in rows):
        advice = f"if a column has them, set prompts.answer_column; else {TRY}"
        findings.append(ok("none of the first rows has an answer to try", advice))
    cases, answers, failed = await played_cases(parts, rows, replies)
    if not cases:
        return [*findings, fail("rewards: not tried, because no rollout succeeds", *failed)]
    if failed:
        advice = "rollouts with errors are not trained: catch the error in the environment"
        findings.append(warn("a rollout for the rewards fails", *_by_error(failed), advice))
    if said := [_parsed(case) for case in cases if case.label.startswith(REPLY)]:
        findings.append(ok("the replies, as the rewards get them", *said))
    if rewarded(parts, cases):
        values = {str(case): case.given for case in answers if not case.trajectory.seat}
        findings += [_of_environment(cases), *_of_answers(values)]
    return [*findings, *await _called(parts.scorer, cases, answers)]


async def _called(scorer: Scorer, cases: Sequence[Case], answers: Sequence[Case]) -> list[Finding]:
    """What each reward makes of the cases, and of the answers of rows if it reads these."""
    findings, faults = list[Finding](), list[str]()
    try:
        async with scorer.serving(faults.append):
            for part in scorer.rewards:
                findings.append(await _trial(scorer, part, cases))
                if part in solved_by_answers(scorer):
                    values = await _values(scorer, part, answers)
                    findings += _of_answers(values, f" from '{part.name}'")
    except RunError as error:
        findings.append(fail("rewards: setup", str(error)))
    return [*findings, *(fail("rewards: close", fault) for fault in faults)]


async def _trial(scorer: Scorer, part: WeightedReward, cases: Sequence[Case]) -> Finding:
    """The verdicts of one reward, with the time of each call."""
    calls = [[case] for case in cases]
    if compares(inner(part)):  # a group has one prompt
        calls = [[*group] for _, group in groupby(cases, lambda case: case.place)]
    lines, failed, verdicts = list[str](), dict[str, list[str]](), list[Reward]()
    for call in calls:
        started = time.perf_counter()
        answers = await scorer.verdicts(part, [case.trajectory for case in call])
        took = f"in {1000 * (time.perf_counter() - started):.1f} ms"
        for case, answer in zip(call, answers, strict=True):
            judged = _judged(part, answer)
            if isinstance(judged, Reward):
                case.trajectory.rewards[part.name] = judged.value  # for those that come after it
                verdicts.append(judged)
                lines.append(f"{case}: {_described(judged)} {took}")
            else:  # often the same error for every reply
                failed.setdefault(str(judged), []).append(str(case))
    what = f"reward '{part.name}'"
    if failed or any(judged.outcome not in ("ok", "invalid") for judged in verdicts):
        return fail(what, *lines, *_by_error(failed))
    same = len({judged.value for judged in verdicts}) == 1
    if same and all(judged.outcome == "ok" for judged in verdicts):
        return warn(what, *lines, _same_value(scorer, part, cases))
    return ok(what, *lines)


def _judged(part: WeightedReward, answer: Any) -> Reward | Exception:
    """The verdict of a reward, or why it has none."""
    try:
        return checked(part.name, answer)
    except (UserCodeError, BudgetError) as error:
        return error


def _described(judged: Reward) -> str:
    if judged.outcome != "ok":
        return judged.outcome
    components = ", ".join(f"{name} {value:g}" for name, value in judged.components.items())
    return f"{judged.value:g}" + (f" ({components})" if components else "")


def _same_value(scorer: Scorer, part: WeightedReward, cases: Sequence[Case]) -> str:
    """What to do if every case gets the same value."""
    reads = inner(part).needs_answer or part in solved_by_answers(scorer)
    answer = reads and any(case.label.startswith(ANSWER) for case in cases)
    note = ", including the answer: check that the answer is correct" if answer else ""
    return (
        f"every reply gets the same value{note}. Try a reply that should score differently: "
        "--reply TEXT"
    )


def _by_error(failed: Mapping[str, Sequence[str]]) -> list[str]:
    return [f"{', '.join(cases)}: {error}" for error, cases in failed.items()]


def _subjects(parts: Parts, rows: Sequence[Prompt]) -> Finding:
    """The prompts of which the rewards score replies."""
    names = []
    for prompt in rows:
        text = f": {shown(prompt.text)}" if prompt.text else ""
        names.append(parts.prompts.location(prompt.ticket.row) + text)
    if len(names) == 1:
        return ok(f"the rewards are tried with replies to {names[0]}")
    return ok("the rewards are tried with replies to a row of each source", *names)


def _parsed(case: Case) -> str:
    played = case.trajectory
    reasoning, completion = shown(played.reasoning, LABEL), shown(played.completion, LABEL)
    return f"{case}: reasoning {reasoning}, completion {completion}"


def _of_environment(cases: Sequence[Case]) -> Finding:
    """The reward of the environment's steps: an empty reply must not get all of it."""
    what, lines = f"reward '{ENVIRONMENT}'", [f"{case}: {case.given:g}" for case in cases]
    rows: dict[str, list[Case]] = {}
    for case in cases:
        if not case.trajectory.seat:
            rows.setdefault(case.place, []).append(case)
    if any(map(_rewards_nothing, rows.values())):
        advice = (
            "an empty reply gets the full reward, so there is nothing to learn: check that the "
            "row contains what the environment compares the reply with, such as tests or an answer"
        )
        return fail(what, *lines, advice)
    if any(map(_rewards_no_answer, rows.values())):
        advice = (
            "the answer gets no more than an empty reply: check that it is correct. If a reply "
            f"needs a different format, {TRY}"
        )
        return warn(what, *lines, advice)
    return ok(what, *lines)


def _rewards_nothing(row: Sequence[Case]) -> bool:
    """Whether an empty reply gets the full reward from a single step, of the replies to a row."""
    said = [one for one in row if one.single and one.label not in (EMPTY, NONSENSE)]
    full = max((one.given for one in said), default=1.0)
    return any(0 < one.given >= full for one in row if one.single and one.label == EMPTY)


def _rewards_no_answer(row: Sequence[Case]) -> bool:
    """Whether the answer of a row gets no more than an empty reply."""
    empty = [one.given for one in row if one.single and one.label == EMPTY]
    answers = [one.given for one in row if one.label.startswith(ANSWER)]
    return bool(answers) and max(answers) <= max([0.0, *empty])


async def _values(
    scorer: Scorer, part: WeightedReward, answers: Sequence[Case]
) -> dict[str, float]:
    """What a reward gives the answers of rows, until the time is up; nan for a failure."""
    values, until = dict[str, float](), time.monotonic() + SECONDS
    for case in answers:
        if time.monotonic() > until:
            break
        [answer] = await scorer.verdicts(part, [case.trajectory])
        judged = _judged(part, answer)
        values[str(case)] = math.nan
        if isinstance(judged, Reward) and judged.outcome == "ok":
            values[str(case)] = judged.value
    return values


def _of_answers(values: Mapping[str, float], giver: str = "") -> Iterator[Finding]:
    """Whether the answers of several rows get the same reward; nan is a failure."""
    full = max((v for v in values.values() if not math.isnan(v)), default=0.0)
    lower = [
        f"{row}: {'fails' if math.isnan(value) else format(value, 'g')}"
        for row, value in values.items()
        if not value >= full
    ]
    if len(values) < 2:
        return
    if lower:
        what = f"the answers of {len(lower)} of {len(values)} rows get less than {full:g}{giver}"
        advice = (
            "check that these answers are correct, and that the rows contain what they are "
            "compared with"
        )
        yield warn(what, first_of(lower, "\n", SHOWN), advice)
    elif full > 0:
        yield ok(f"the answers of {len(values)} rows get {full:g} each{giver}")
