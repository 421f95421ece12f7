"""A rollout, and a built-in reward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from retrain.config import DeadlinesConfig, RewardConfig
from retrain.scoring import Scorer
from retrain.scoring.building import calculator_of, weighted_reward
from retrain.types import Completion, Group, Prompt, Trajectory, Turn


def rollout(text: str, answer: Any = None, **metadata: Any) -> Trajectory:
    """One turn; each character is a token."""
    prompt = Prompt("0.0.0", [{"role": "user", "content": "?"}], answer, metadata)
    ids = [ord(character) for character in text]
    turn = Turn([1], Completion(ids, [0.0] * len(ids), text, "stop", 0))
    said = [*prompt.messages, {"role": "assistant", "content": text}]
    return Trajectory(prompt, [turn], messages=said)


def built(type: str, **keys: Any) -> Any:
    return calculator_of(RewardConfig(type=type, **keys), "rewards.0", Path())


async def scored(group: Group, folder: Path, *sections: dict[str, Any]) -> list[Trajectory]:
    parts = [
        weighted_reward(RewardConfig(**keys), f"rewards.{i}", folder, DeadlinesConfig())
        for i, keys in enumerate(sections)
    ]
    scorer = Scorer(parts)
    async with scorer.serving(pytest.fail):
        await scorer.score(group)
    return group.trajectories
