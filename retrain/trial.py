"""Rollouts with fixed replies in place of a model, and what a config's rewards make of them."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from retrain.assembly import Parts
from retrain.chat import Chat
from retrain.chat.formats.hermes import Hermes
from retrain.config import EndpointConfig, RunConfig
from retrain.environment import Environment
from retrain.errors import BudgetError, RunError, UserCodeError, alike, shown
from retrain.rewarding import Reward, Scorer, WeightedReward, checked, compares
from retrain.rewarding.processes import ProcessReward
from retrain.rollout import Rollouts, Slot
from retrain.sampler import SamplingParams, Tokenizer
from retrain.types import Completion, Prompt, Trajectory

if TYPE_CHECKING:
    from retrain.endpoint.server import EndpointServer

GARBAGE = "]]}> \\boxed{ </think> 1e999 \x00 \ufffd \U0001f642 {{ ((" + "x" * 200
"""No answer to anything, and a trap for parsers."""
Case = tuple[str, Trajectory]
Say = Callable[[str], object]
"""Tells the user what takes long, at once."""
NO_ROLLOUT = "the agent plays 0 "
"""How the trial of an agent begins that plays no rollout."""
PATIENCE = 2.0
"""Seconds until the user gets to know what is being waited for."""


@dataclass(frozen=True)
class Trial:
    """What one reward returned for each reply, one line per reply."""

    good: bool
    what: str
    lines: tuple[str, ...] = ()


@contextmanager
def waiting(say: Say, what: str) -> Iterator[None]:
    """Say what is being waited for, if it takes long."""
    timer = asyncio.get_running_loop().call_later(PATIENCE, say, f"waiting for {what}")
    try:
        yield
    finally:
        timer.cancel()


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
) -> list[Trial]:
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
) -> list[Trial]:
    """Whether each row was played, and whether all rollouts were; `lines` are about those that
    were not."""
    rows = len({row for row, _ in good})
    trials = [
        Trial(
            rows == prompts,
            f"the agent plays {rows} of {prompts} rows",
            tuple(lines) if rows < prompts else (),
        ),
        Trial(
            len(good) == plays and not faults,
            f"the agent ends without an error in {len(good)} of {plays} rollouts",
            (*(lines if rows == prompts else ()), *faults),
        ),
    ]
    limits = [str(t.info["truncated"]) for _, t in good if "truncated" in t.info]
    if limits:
        names = ", ".join(sorted(set(limits)))
        met = f"{len(limits)} rollouts met the limit {names}, and count as they are"
        trials.append(Trial(True, met))
    return trials


async def tried_rewards(parts: Parts, prompts: Sequence[Prompt]) -> list[Trial]:
    """Call each reward with rollouts that say the answer of the row, nothing, and garbage.

    The rollouts are played in the config's environment, so that rewards find its `info`.
    """
    if not parts.scorer.rewards:
        return []
    prompt = next((p for p in prompts if p.answer is not None), prompts[0])
    cases, trials, faults = await _played(parts, prompt), list[Trial](), list[str]()
    try:
        async with parts.scorer.serving(faults.append):
            trials = [await _trial(parts.scorer, part, cases) for part in parts.scorer.rewards]
    except RunError as error:
        trials = [Trial(False, "rewards: setup", (str(error),))]
    return [*trials, *(Trial(False, "rewards: close", (fault,)) for fault in faults)]


async def _played(parts: Parts, prompt: Prompt) -> list[Case]:
    """A rollout for each reply."""
    replies = {"empty text": "", "garbage": GARBAGE}
    if prompt.answer is not None:
        replies = {f"answer {shown(prompt.answer, 24)}": str(prompt.answer), **replies}
    script, unscored = Script(), Scorer([])
    cases: list[Case] = []
    async with doorway(parts.runs_agent) as door:
        rollouts = scripted(parts.config, script, door)
        slot = Slot(1, parts.environment, rollouts, unscored, fault=lambda _: None)
        try:
            for label, script.reply in replies.items():
                group = await slot.play(prompt)
                cases += [(f"{label} {t.seat}".rstrip(), t) for t in group.trajectories]
        finally:
            await slot.close()
    return cases


async def _trial(scorer: Scorer, part: WeightedReward, cases: Sequence[Case]) -> Trial:
    """The verdicts of one reward, with the time of each call."""
    usable = [case for case in cases if case[1].outcome == "ok"]
    lines = [f"{label}: not tried: {t.info['error']}" for label, t in cases if t.outcome != "ok"]
    calculator = part.calculator
    judge = calculator.inner if isinstance(calculator, ProcessReward) else calculator
    calls = [usable] if compares(judge) and usable else [[case] for case in usable]
    good, failed = bool(usable), dict[str, list[str]]()
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
    return Trial(good and not failed, f"reward '{part.name}'", tuple(lines))


def _described(judged: Reward) -> str:
    if judged.outcome != "ok":
        return judged.outcome
    components = ", ".join(f"{name} {value:g}" for name, value in judged.components.items())
    return f"{judged.value:g}" + (f" ({components})" if components else "")


@asynccontextmanager
async def doorway(needed: bool) -> AsyncIterator[EndpointServer | None]:
    """An endpoint for agents, on a free port of the loopback interface."""
    if not needed:
        yield None
        return
    from retrain.endpoint.server import EndpointServer

    letters = Letters()  # type: ignore[abstract]  # nothing calls apply_chat_template
    async with EndpointServer(EndpointConfig(), letters.decode).serving() as door:
        yield door


def scripted(config: RunConfig, script: Script, door: EndpointServer | None = None) -> Rollouts:
    """Rollouts whose model is a script, with one token per character and no limit of context."""
    letters = Letters()  # type: ignore[abstract]  # nothing calls apply_chat_template
    chat = Chat(letters, template="none", tools=Hermes())
    return Rollouts(config, script, chat, sys.maxsize, door=door)


class Script:
    """A sampler that always says the same."""

    reply = ""

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        ids = [ord(letter) for letter in self.reply]
        return [Completion(ids, [0.0] * len(ids), self.reply, "stop", 0)] * n


class Letters(Tokenizer):
    """One token per character."""

    eos_token_id = None
    chat_template = None

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [0] * add_special_tokens + [ord(letter) for letter in text]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return "".join(map(chr, token_ids))
