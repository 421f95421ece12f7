"""Rollouts with fixed replies in place of a model, and what a config's rewards make of them."""

from __future__ import annotations

import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from retrain.assembly import Parts
from retrain.chat import Chat
from retrain.chat.formats.hermes import Hermes
from retrain.config import EndpointConfig, RunConfig
from retrain.errors import BudgetError, RunError, UserCodeError, shown
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


@dataclass(frozen=True)
class Trial:
    """What one reward returned for each reply, one line per reply."""

    good: bool
    what: str
    lines: tuple[str, ...] = ()


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
