"""Groups, and the lines that a run directory holds of them."""

from __future__ import annotations

from typing import Any

from retrain.config import RunConfig
from retrain.types import Completion, Group, Prompt, Trajectory, Turn


def config(**sections: Any) -> RunConfig:
    return RunConfig.model_validate({"prompts": {"type": "list"}, **sections})


def group(*outcomes: str, ticket: str = "0.7.0", **prompt: Any) -> Group:
    asked = Prompt(ticket, [{"role": "user", "content": "2+2"}], **prompt)
    made = [trajectory(asked, outcome, index) for index, outcome in enumerate(outcomes)]
    return Group(asked, made)


def trajectory(prompt: Prompt, outcome: Any, index: int = 0) -> Trajectory:
    completion = Completion([5, 6, 7], [-0.1, -0.2, -0.3], "4!", "length", 2)
    return Trajectory(
        prompt,
        [Turn([1, 2], completion)],
        rewards={"exact": 0.5},
        info={} if outcome == "ok" else {"error": "it broke\nat line 3"},
        outcome=outcome,
        reward=0.25,
        messages=[*prompt.messages, {"role": "assistant", "content": "4!"}],
        tools=[{"type": "function", "function": {"name": "search", "description": "Finds."}}],
        seconds={"sample": 1.5},
        index=index,
    )
