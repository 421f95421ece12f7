"""Rollouts for a config's rewards, which say the answer of the row, given replies, or nothing.

They are played in the config's environment, so that rewards find its `info`.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from retrain.assembly import Parts
from retrain.chat.reasoning import TAGS
from retrain.check.scripted import FixedSampler, doorway, scripted
from retrain.errors import shown
from retrain.prompts import MIXTURE
from retrain.rollout import Slot
from retrain.scoring import RewardCalculator, Scorer, WeightedReward
from retrain.scoring.composition import ENVIRONMENT
from retrain.scoring.processes import ProcessReward
from retrain.types import Prompt, Ticket, Trajectory, Turn

GARBAGE = "]]}> \\boxed{ </think> 1e999 \x00 </think> \ufffd \U0001f642 {{ ((" + "x" * 200
"""No answer to anything, and a trap for parsers. A tag that appears twice has no valid form."""
EMPTY, NONSENSE = "empty reply", "garbage"
REPLY, ANSWER = "reply ", "answer "
"""How the labels of given replies and of answers begin."""
Plan = tuple[str, str, Prompt, str]
"""The label and the place of a case, and what the model says to a prompt."""
LABEL = 80
"""Characters of an answer that a line shows."""
ANSWERS = 100
"""The answers of so many rows are played, if the environment gives a reward or one checks rows."""
SECONDS = 10.0
"""After this time no further answer is played, nor scored by the same reward."""


@dataclass(frozen=True)
class Case:
    """A rollout, and what its model says."""

    label: str
    place: str
    """The place of its row, if rows of several sources are tried."""
    trajectory: Trajectory

    def __str__(self) -> str:
        return f"{self.label} ({self.place})" if self.place else self.label

    @property
    def given(self) -> float:
        """The reward of the environment's steps."""
        return self.trajectory.rewards.get(ENVIRONMENT, 0.0)

    @property
    def single(self) -> bool:
        """Whether the model says it once."""
        return len(self.trajectory.turns) == 1


def sampled_rows(prompts: Sequence[Prompt]) -> list[Prompt]:
    """A prompt of each source, with an answer if one has it."""
    sources: dict[object, Prompt] = {}
    for prompt in prompts:
        source = prompt.metadata.get(MIXTURE)
        if source not in sources or (sources[source].answer is None is not prompt.answer):
            sources[source] = prompt
    return list(sources.values())


async def played_cases(
    parts: Parts, rows: Sequence[Prompt], replies: Sequence[str]
) -> tuple[list[Case], list[Case], Mapping[str, list[str]]]:
    """Play each row with its answer, the replies, nothing and garbage.

    Returns the rollouts; those that say the answers of rows, if the environment gives a reward or a
    reward reads rows; and for those that fail, the cases per error.
    """
    sampler, opener = FixedSampler(), _opener(parts)
    failed: dict[str, list[str]] = {}

    async def play(plans: Iterable[Plan]) -> list[Case]:
        cases: list[Case] = []
        for label, place, prompt, text in plans:
            opened = opener if label.startswith(REPLY) else ""
            sampler.reply = opened + text.removeprefix(opened)
            for played in (await slot.play(prompt)).trajectories:
                case = Case(f"{label} {played.seat}".rstrip(), place, played)
                if played.outcome == "ok":
                    played.turns = [_without(opened, turn) for turn in played.turns]
                    cases.append(case)
                else:
                    failed.setdefault(played.info["error"], []).append(str(case))
        return cases

    async with doorway(parts.config, parts.runs_agent) as door:
        rollouts = scripted(parts.config, sampler, door)
        slot = Slot(1, parts.environment, rollouts, Scorer([]), fault=lambda _: None)
        try:
            cases = await play(_plans(parts, rows, replies))
            judged = rewarded(parts, cases) or solved_by_answers(parts.scorer)
            plain = cases and judged and not parts.runs_agent
            answers = await play(_answers(parts)) if plain else []
        finally:
            await slot.close()
    return cases, answers, failed


def rewarded(parts: Parts, cases: Sequence[Case]) -> bool:
    """Whether the steps of the environment give a reward, or nothing else does."""
    return not parts.scorer.rewards or any(case.given for case in cases)


def _plans(parts: Parts, rows: Sequence[Prompt], replies: Sequence[str]) -> Iterator[Plan]:
    for prompt in rows:
        place = parts.prompts.location(prompt.ticket.row) if len(rows) > 1 else ""
        texts = {f"{REPLY}{shown(reply, LABEL)}": reply for reply in replies}
        if prompt.answer is not None:
            texts = {f"{ANSWER}{shown(prompt.answer, LABEL)}": str(prompt.answer), **texts}
        for label, text in {**texts, EMPTY: "", NONSENSE: GARBAGE}.items():
            yield label, place, prompt, text


def _answers(parts: Parts) -> Iterator[Plan]:
    until = time.monotonic() + SECONDS
    for index in parts.prompts.first_rows(ANSWERS):
        if time.monotonic() > until:
            return
        prompt = parts.prompts.prompt(Ticket(0, index), parts.config.train.seed)
        if prompt.answer is not None:
            yield parts.prompts.location(index), "", prompt, str(prompt.answer)


def _opener(parts: Parts) -> str:
    """The tag with which the prompts of a run open the reasoning, as its `format` says."""
    tags = (getattr(inner(part), "opener", "") for part in parts.scorer.rewards)
    return next((tag for tag in tags if tag in TAGS), "")


def _without(opener: str, turn: Turn) -> Turn:
    """The turn as it is in a run, where the `opener` is not part of the reply."""
    said, first = turn.completion, len(opener)  # one token per character
    if not said.text.startswith(opener):  # after the call of a tool
        return turn
    ids, logprobs = said.token_ids[first:], said.logprobs[first:]
    shorter = replace(said, text=said.text[first:], token_ids=ids, logprobs=logprobs)
    return turn._replace(completion=shorter)


def inner(part: WeightedReward) -> RewardCalculator:
    """The calculator, or that of its worker processes."""
    calculator = part.calculator
    return calculator.inner if isinstance(calculator, ProcessReward) else calculator


def solved_by_answers(scorer: Scorer) -> list[WeightedReward]:
    """The rewards of which the answer of a row should get all, and that no gate keeps from some:
    the answer solves the task, or is checked for it before a run."""
    parts = [part for part in scorer.rewards if not scorer.composition.gates[part.name]]
    plain = RewardCalculator.check_row
    return [
        part
        for part in parts
        if (reward := inner(part)).solved_by_answer
        or (reward.needs_answer and type(reward).check_row is not plain)
    ]
