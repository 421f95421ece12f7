"""Score scripted replies with a config's rewards, and with those of its environment."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from itertools import groupby

from retrain.assembly import Parts
from retrain.chat.reasoning import TAGS
from retrain.check.scripted import Finding, Script, doorway, found, scripted
from retrain.errors import BudgetError, RunError, UserCodeError, shown
from retrain.prompts import MIXTURE
from retrain.rollout import Slot
from retrain.scoring import (
    Reward,
    RewardCalculator,
    Scorer,
    WeightedReward,
    checked,
    compares,
)
from retrain.scoring.composition import ENVIRONMENT
from retrain.scoring.processes import ProcessReward
from retrain.types import Prompt, Ticket, Trajectory, Turn

GARBAGE = "]]}> \\boxed{ </think> 1e999 \x00 </think> \ufffd \U0001f642 {{ ((" + "x" * 200
"""No answer to anything, and a trap for parsers. A tag that appears twice has no valid form."""
EMPTY, NONSENSE = "empty reply", "garbage"
Plan = tuple[str, str, Prompt, str]
"""The label of a case, the place of its row, and a prompt with the reply to it."""
LABEL = 80
"""Characters of an answer that a line shows."""
ANSWERS = 100
"""The answers of so many rows are played, if the environment gives a reward or one checks rows."""
SECONDS = 10.0
"""After this time no further answer is played, nor scored by the same reward."""
SHOWN = 5
"""Rows with a wrong answer that are listed."""
TRY = "try one with --reply TEXT"


@dataclass(frozen=True)
class Case:
    """A rollout, and what its model says."""

    label: str
    place: str
    """The place of its row, if rows of several sources are tried."""
    trajectory: Trajectory

    def __str__(self) -> str:
        return f"{self.label} ({self.place})" if self.place else self.label


async def tried_rewards(
    parts: Parts, prompts: Sequence[Prompt], replies: Sequence[str] = ()
) -> list[Finding]:
    """Call each reward with rollouts that say the answer of the row, `replies`, nothing, garbage.

    The rollouts are played in the config's environment, so that rewards find its `info`.
    """
    rows = _rows(prompts)
    trials = [_subjects(parts, rows)]
    if not replies and all(prompt.answer is None for prompt in rows):
        advice = f"if a column has them, set prompts.answer_column; else {TRY}"
        trials.append(Finding(True, "none of the first rows has an answer to try", advice))
    plans: list[Plan] = []
    for prompt in rows:
        place = parts.prompts.location(prompt.ticket.row) if len(rows) > 1 else ""
        plans += [(label, place, prompt, text) for label, text in _texts(prompt, replies).items()]
    cases, others, failed = await _played(parts, plans)
    if not cases:
        return [
            *trials,
            found(False, "rewards: not tried, because no rollout succeeds", tuple(failed)),
        ]
    if failed:
        lines = [f"{', '.join(labels)}: {error}" for error, labels in failed.items()]
        lines.append("rollouts with errors are not trained: catch the error in the environment")
        what = "a rollout for the rewards fails"
        trials.append(Finding(True, what, "\n".join(lines), warning=True))
    if said := [_parsed(case) for case in cases if case.label.startswith("reply ")]:
        trials.append(found(True, "the replies, as the rewards get them", said))
    if _rewarded(parts, cases):
        singles = [case for case in others if not case.trajectory.seat]
        values = {str(case): _given(case.trajectory) for case in singles}
        trials += [_of_environment(cases), *_of_answers(values)]
    faults: list[str] = []
    try:
        async with parts.scorer.serving(faults.append):
            for part in parts.scorer.rewards:
                trials.append(await _trial(parts.scorer, part, cases))
                if part in _readers(parts.scorer):
                    values = await _values(parts.scorer, part, others)
                    trials += _of_answers(values, f" from '{part.name}'")
    except RunError as error:
        trials.append(found(False, "rewards: setup", [str(error)]))
    return [*trials, *(found(False, "rewards: close", [fault]) for fault in faults)]


def _rows(prompts: Sequence[Prompt]) -> list[Prompt]:
    """A prompt of each source, with an answer if one has it."""
    sources: dict[object, Prompt] = {}
    for prompt in prompts:
        source = prompt.metadata.get(MIXTURE)
        if source not in sources or (sources[source].answer is None is not prompt.answer):
            sources[source] = prompt
    return list(sources.values())


def _subjects(parts: Parts, rows: Sequence[Prompt]) -> Finding:
    """The prompts of which the rewards score replies."""
    names = [
        ": ".join(
            [parts.prompts.location(prompt.ticket.row), *([shown(prompt.text)] * bool(prompt.text))]
        )
        for prompt in rows
    ]
    if len(names) == 1:
        return Finding(True, f"the rewards are tried with replies to {names[0]}")
    return found(True, "the rewards are tried with replies to a row of each source", names)


def _texts(prompt: Prompt, replies: Sequence[str]) -> dict[str, str]:
    """The replies to a prompt, and what to call them."""
    texts = {f"reply {shown(reply, LABEL)}": reply for reply in replies}
    if prompt.answer is not None:
        texts = {f"answer {shown(prompt.answer, LABEL)}": str(prompt.answer), **texts}
    return {**texts, EMPTY: "", NONSENSE: GARBAGE}


async def _played(
    parts: Parts, plans: Sequence[Plan]
) -> tuple[list[Case], list[Case], Mapping[str, list[str]]]:
    """The rollouts of the plans, those that say the answers of rows if the environment gives a
    reward or a reward reads rows, and for those that fail, the labels per error."""
    script, opener = Script(), _opener(parts)
    failed: dict[str, list[str]] = {}

    async def play(plans: Iterable[Plan]) -> list[Case]:
        cases: list[Case] = []
        for label, place, prompt, text in plans:
            opened = opener if label.startswith("reply ") else ""
            script.reply = opened + text.removeprefix(opened)
            for played in (await slot.play(prompt)).trajectories:
                case = Case(f"{label} {played.seat}".rstrip(), place, played)
                if played.outcome == "ok":
                    played.turns = [_without(opened, turn) for turn in played.turns]
                    cases.append(case)
                else:
                    failed.setdefault(played.info["error"], []).append(str(case))
        return cases

    async with doorway(parts.config, parts.runs_agent) as door:
        rollouts = scripted(parts.config, script, door)
        slot = Slot(1, parts.environment, rollouts, Scorer([]), fault=lambda _: None)
        try:
            cases = await play(plans)
            tried = _rewarded(parts, cases) or _readers(parts.scorer)
            others = await play(_answers(parts)) if cases and tried and not parts.runs_agent else []
        finally:
            await slot.close()
    return cases, others, failed


def _opener(parts: Parts) -> str:
    """The tag with which the prompts of a run open the reasoning, as its `format` says."""
    tags = (getattr(_inner(part), "opener", "") for part in parts.scorer.rewards)
    return next((tag for tag in tags if tag in TAGS), "")


def _without(opener: str, turn: Turn) -> Turn:
    """The turn as it is in a run, where the `opener` is not part of the reply."""
    said, first = turn.completion, len(opener)  # one token per character
    if not said.text.startswith(opener):  # after the call of a tool
        return turn
    ids, logprobs = said.token_ids[first:], said.logprobs[first:]
    shorter = replace(said, text=said.text[first:], token_ids=ids, logprobs=logprobs)
    return turn._replace(completion=shorter)


def _answers(parts: Parts) -> Iterator[Plan]:
    """The answers of the first rows."""
    until = time.monotonic() + SECONDS
    for index in parts.prompts.first_rows(ANSWERS):
        if time.monotonic() > until:
            return
        prompt = parts.prompts.prompt(Ticket(0, index), parts.config.train.seed)
        if prompt.answer is not None:
            yield parts.prompts.location(index), "", prompt, str(prompt.answer)


def _rewarded(parts: Parts, cases: Sequence[Case]) -> bool:
    """Whether the steps of the environment give a reward, or nothing else does."""
    return not parts.scorer.rewards or any(_given(case.trajectory) for case in cases)


def _parsed(case: Case) -> str:
    played = case.trajectory
    reasoning, completion = shown(played.reasoning, LABEL), shown(played.completion, LABEL)
    return f"{case}: reasoning {reasoning}, completion {completion}"


def _of_environment(cases: Sequence[Case]) -> Finding:
    """The reward of the environment's steps: an empty reply must not get all of it."""
    lines = [f"{case}: {_given(case.trajectory):g}" for case in cases]
    what = f"reward '{ENVIRONMENT}'"
    by_row: dict[str, dict[str, Trajectory]] = {}
    for case in cases:
        if not case.trajectory.seat:
            by_row.setdefault(case.place, {})[case.label] = case.trajectory
    if any(map(_rewards_nothing, by_row.values())):
        lines.append(
            "an empty reply gets the full reward, so there is nothing to learn: check that the "
            "row contains what the environment compares the reply with, such as tests or an "
            "answer"
        )
        return found(False, what, lines)
    wrong = any(map(_rewards_no_answer, by_row.values()))
    if wrong:
        lines.append(
            "the answer gets no more than an empty reply: check that it is correct. If a reply "
            f"needs a different format, {TRY}"
        )
    return Finding(True, what, "\n".join(lines), warning=wrong)


def _given(trajectory: Trajectory) -> float:
    return trajectory.rewards.get(ENVIRONMENT, 0.0)


def _rewards_nothing(played: Mapping[str, Trajectory]) -> bool:
    """Whether an empty reply gets the full reward from a single step, of the replies to a row."""
    short = {label: _given(t) for label, t in played.items() if len(t.turns) == 1}
    empty = short.pop(EMPTY, 0.0)
    short.pop(NONSENSE, None)
    return empty > 0 and empty >= max(short.values(), default=1.0)


def _rewards_no_answer(played: Mapping[str, Trajectory]) -> bool:
    """Whether the answer of a row gets no more than an empty reply."""
    answers = [_given(t) for label, t in played.items() if label.startswith("answer ")]
    empty = _given(played[EMPTY]) if EMPTY in played and len(played[EMPTY].turns) == 1 else 0.0
    return bool(answers) and max(answers) <= max(empty, 0.0)


def _of_answers(values: Mapping[str, float], giver: str = "") -> Iterator[Finding]:
    """Whether the answers of several rows get the same reward; nan is a failure."""
    full = max((v for v in values.values() if not math.isnan(v)), default=0.0)
    lower = [f"{row}: {_number(value)}" for row, value in values.items() if not value >= full]
    if len(values) < 2:
        return
    if not lower and full > 0:
        yield Finding(True, f"the answers of {len(values)} rows get {full:g} each{giver}")
    elif lower:
        more = [f"and {len(lower) - SHOWN} more"] if len(lower) > SHOWN else []
        advice = (
            "check that these answers are correct, and that the rows contain what they are "
            "compared with"
        )
        what = f"the answers of {len(lower)} of {len(values)} rows get less than {full:g}{giver}"
        yield Finding(True, what, "\n".join([*lower[:SHOWN], *more, advice]), warning=True)


def _number(value: float) -> str:
    return "fails" if math.isnan(value) else f"{value:g}"


def _readers(scorer: Scorer) -> list[WeightedReward]:
    """The rewards that the answer of a row should satisfy, and that no gate keeps from some."""
    parts = [part for part in scorer.rewards if not scorer.composition.is_gated(part.name)]
    return [part for part in parts if _satisfied(_inner(part))]


def _satisfied(reward: RewardCalculator) -> bool:
    """Whether the answers should get the full reward: they solve the task, or are checked for it
    before a run."""
    checks = type(reward).check_row is not RewardCalculator.check_row
    return reward.solved_by_answer or (checks and reward.needs_answer)


async def _values(scorer: Scorer, part: WeightedReward, cases: Sequence[Case]) -> dict[str, float]:
    """What a reward gives the answers of rows, until the time is up; nan for a failure."""
    values, until = dict[str, float](), time.monotonic() + SECONDS
    for case in cases:
        if time.monotonic() > until:
            break
        [verdict] = await scorer.verdicts(part, [case.trajectory])
        values[str(case)] = math.nan
        with suppress(UserCodeError, BudgetError):
            judged = checked(part.name, verdict)
            values[str(case)] = judged.value if judged.outcome == "ok" else math.nan
    return values


async def _trial(scorer: Scorer, part: WeightedReward, cases: Sequence[Case]) -> Finding:
    """The verdicts of one reward, with the time of each call."""
    lines: list[str] = []
    calls = [[case] for case in cases]
    if compares(_inner(part)):  # a group has one prompt
        calls = [[*group] for _, group in groupby(cases, lambda case: case.place)]
    good, failed, values = True, dict[str, list[str]](), list[float]()
    for call in calls:
        started = time.perf_counter()
        verdicts = await scorer.verdicts(part, [case.trajectory for case in call])
        took = f"in {1000 * (time.perf_counter() - started):.1f} ms"
        for case, verdict in zip(call, verdicts, strict=True):
            try:
                judged = checked(part.name, verdict)
            except (UserCodeError, BudgetError) as error:  # which is often the same for every reply
                failed.setdefault(str(error), []).append(str(case))
                continue
            case.trajectory.rewards[part.name] = judged.value  # for those that come after it
            good = good and judged.outcome in ("ok", "invalid")
            values += [judged.value] * (judged.outcome == "ok")
            lines.append(f"{case}: {_described(judged)} {took}")
    lines += [f"{', '.join(labels)}: {error}" for error, labels in failed.items()]
    good = good and not failed
    same = good and len(values) == len(cases) and len(set(values)) == 1
    if same:
        reads = _inner(part).needs_answer or part in _readers(scorer)
        answer = reads and any(case.label.startswith("answer ") for case in cases)
        note = ", including the answer: check that the answer is correct" if answer else ""
        lines.append(
            f"every reply gets the same value{note}. Try a reply that should score differently: "
            "--reply TEXT"
        )
    return Finding(good, f"reward '{part.name}'", "\n".join(lines), warning=same)


def _inner(part: WeightedReward) -> RewardCalculator:
    """The calculator, or that of its worker processes."""
    calculator = part.calculator
    return calculator.inner if isinstance(calculator, ProcessReward) else calculator


def _described(judged: Reward) -> str:
    if judged.outcome != "ok":
        return judged.outcome
    components = ", ".join(f"{name} {value:g}" for name, value in judged.components.items())
    return f"{judged.value:g}" + (f" ({components})" if components else "")
