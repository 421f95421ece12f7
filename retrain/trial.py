"""Scripted rollouts of agents, and what a config's rewards make of scripted replies."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from retrain.types import Prompt, Ticket, Trajectory

GARBAGE = "]]}> \\boxed{ </think> 1e999 \x00 \ufffd \U0001f642 {{ ((" + "x" * 200
"""No answer to anything, and a trap for parsers."""
EMPTY = "empty text"
Case = tuple[str, Trajectory]
Plan = tuple[str, Prompt, str]
"""A label, and a prompt with the reply to it."""
NO_ROLLOUT = "the agent plays 0 "
"""How the trial of an agent begins that plays no rollout."""
LABEL = 80
"""Characters of an answer that a line shows."""
ANSWERS = 100
"""The answers of so many rows are played, if the environment gives a reward."""
SECONDS = 10.0
"""No further answer is played after this time."""
SHOWN = 5
"""Rows with a wrong answer that are listed."""
TRY = "try one with --reply TEXT"


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


async def tried_rewards(
    parts: Parts, prompts: Sequence[Prompt], replies: Sequence[str] = ()
) -> list[Finding]:
    """Call each reward with rollouts that say the answer of the row, `replies`, nothing, garbage.

    The rollouts are played in the config's environment, so that rewards find its `info`.
    """
    prompt = next((p for p in prompts if p.answer is not None), prompts[0])
    texts = {f"reply {shown(reply, LABEL)}": reply for reply in replies}
    trials: list[Finding] = []
    if prompt.answer is not None:
        texts = {f"answer {shown(prompt.answer, LABEL)}": str(prompt.answer), **texts}
    elif not replies:
        advice = f"if a column has them, set prompts.answer_column; else {TRY}"
        trials.append(Finding(True, "the first rows have no answer that could be tried", advice))
    plans = [(label, prompt, text) for label, text in texts.items()]
    plans += [(EMPTY, prompt, ""), ("garbage", prompt, GARBAGE)]
    cases, others, failed = await _played(parts, plans)
    if not cases:
        return [*trials, _found(False, "rewards: not tried, as no rollout succeeds", tuple(failed))]
    if failed:
        lines = [f"{', '.join(labels)}: {error}" for error, labels in failed.items()]
        lines.append("such a rollout is not trained: catch the error in the environment")
        what = "a rollout for the rewards fails"
        trials.append(Finding(True, what, "\n".join(lines), warning=True))
    if said := [_parsed(label, t) for label, t in cases if label.startswith("reply ")]:
        trials.append(_found(True, "the replies, as the rewards get them", said))
    if _rewarded(parts, cases):
        trials += [_of_environment(cases), *_of_answers(others)]
    faults: list[str] = []
    try:
        async with parts.scorer.serving(faults.append):
            trials += [await _trial(parts.scorer, part, cases) for part in parts.scorer.rewards]
    except RunError as error:
        trials.append(_found(False, "rewards: setup", [str(error)]))
    return [*trials, *(_found(False, "rewards: close", [fault]) for fault in faults)]


async def _played(
    parts: Parts, plans: Sequence[Plan]
) -> tuple[list[Case], list[Case], Mapping[str, list[str]]]:
    """The rollouts of the plans, those that say the answers of rows if the environment gives a
    reward, and for those that fail, the labels per error."""
    script, unscored = Script(), Scorer([])
    failed: dict[str, list[str]] = {}

    async def play(plans: Iterable[Plan]) -> list[Case]:
        cases: list[Case] = []
        for label, prompt, script.reply in plans:
            for played in (await slot.play(prompt)).trajectories:
                seated = f"{label} {played.seat}".rstrip()
                if played.outcome == "ok":
                    cases.append((seated, played))
                else:
                    failed.setdefault(played.info["error"], []).append(seated)
        return cases

    async with doorway(parts.runs_agent) as door:
        rollouts = scripted(parts.config, script, door)
        slot = Slot(1, parts.environment, rollouts, unscored, fault=lambda _: None)
        try:
            cases = await play(plans)
            answered = cases and _rewarded(parts, cases) and not parts.runs_agent
            others = await play(_answers(parts)) if answered else []
        finally:
            await slot.close()
    return cases, others, failed


def _answers(parts: Parts) -> Iterator[Plan]:
    """The answers of the first rows."""
    until = time.monotonic() + SECONDS
    for index in range(min(ANSWERS, len(parts.prompts))):
        if time.monotonic() > until:
            return
        prompt = parts.prompts.prompt(Ticket(0, index), parts.config.train.seed)
        if prompt.answer is not None:
            yield parts.prompts.location(index), prompt, str(prompt.answer)


def _rewarded(parts: Parts, cases: Sequence[Case]) -> bool:
    """Whether the steps of the environment give a reward, or nothing else does."""
    return not parts.scorer.rewards or any(t.rewards.get(ENVIRONMENT) for _, t in cases)


def _parsed(label: str, played: Trajectory) -> str:
    reasoning, completion = shown(played.reasoning, LABEL), shown(played.completion, LABEL)
    return f"{label}: reasoning {reasoning}, completion {completion}"


def _of_environment(cases: Sequence[Case]) -> Finding:
    """The reward of the environment's steps: an empty text must not get all of it."""
    lines = [f"{label}: {t.rewards.get(ENVIRONMENT, 0.0):g}" for label, t in cases]
    what, single = f"reward '{ENVIRONMENT}'", [(k, t) for k, t in cases if not t.seat]
    short = {label: t for label, t in single if len(t.turns) == 1}
    values = {label: t.rewards.get(ENVIRONMENT, 0.0) for label, t in short.items()}
    empty = values.pop(EMPTY, 0.0)
    values.pop("garbage", None)
    full = max(values.values(), default=1.0)
    if empty > 0 and empty >= full:
        lines.append(
            "an empty text gets the full reward, so there is nothing to learn: check that the row "
            "has what the environment compares the reply with, such as tests or an answer"
        )
        return _found(False, what, lines)
    of_answer = [t.rewards.get(ENVIRONMENT, 0.0) for k, t in single if k.startswith("answer ")]
    wrong = bool(of_answer) and max(of_answer) <= max(empty, 0.0)
    if wrong:
        lines.append(
            "the answer gets no more than an empty text: check that it is right. If a reply must "
            f"have another form, {TRY}"
        )
    return Finding(True, what, "\n".join(lines), warning=wrong)


def _of_answers(cases: Sequence[Case]) -> Iterator[Finding]:
    """Whether the answers of several rows get the same from the environment."""
    values = {label: t.rewards.get(ENVIRONMENT, 0.0) for label, t in cases if not t.seat}
    if len(values) < 2:
        return
    full = max(values.values())
    lower = [f"{label}: {value:g}" for label, value in values.items() if value < full]
    if not lower:
        yield Finding(True, f"the answers of {len(values)} rows get {full:g} each")
        return
    more = [f"and {len(lower) - SHOWN} more"] if len(lower) > SHOWN else []
    advice = "check that these answers are right, and the rows what they are compared with"
    what = f"the answers of {len(lower)} of {len(values)} rows get less than {full:g}"
    yield Finding(True, what, "\n".join([*lower[:SHOWN], *more, advice]), warning=True)


def _found(good: bool, what: str, lines: Sequence[str] = ()) -> Finding:
    return Finding(good, what, "\n".join(lines))


async def _trial(scorer: Scorer, part: WeightedReward, cases: Sequence[Case]) -> Finding:
    """The verdicts of one reward, with the time of each call."""
    lines: list[str] = []
    calculator = part.calculator
    judge = calculator.inner if isinstance(calculator, ProcessReward) else calculator
    calls = [cases] if compares(judge) else [[case] for case in cases]
    good, failed, values = True, dict[str, list[str]](), list[float]()
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
            values += [judged.value] * (judged.outcome == "ok")
            lines.append(f"{label}: {_described(judged)} {took}")
    lines += [f"{', '.join(labels)}: {error}" for error, labels in failed.items()]
    good = good and not failed
    same = good and len(values) == len(cases) and len(set(values)) == 1
    if same:
        lines.append(f"every reply gets the same: for a reply that should get another value, {TRY}")
    return Finding(good, f"reward '{part.name}'", "\n".join(lines), warning=same)


def _described(judged: Reward) -> str:
    if judged.outcome != "ok":
        return judged.outcome
    components = ", ".join(f"{name} {value:g}" for name, value in judged.components.items())
    return f"{judged.value:g}" + (f" ({components})" if components else "")
