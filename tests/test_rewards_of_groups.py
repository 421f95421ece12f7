"""Built-in rewards on groups: TRL's results, deadlines, and rewards of whole replies."""

from __future__ import annotations

from pathlib import Path

import pytest
from trl.rewards import (
    get_cosine_scaled_reward,
    get_repetition_penalty_reward,
    get_soft_overlong_punishment,
)

from retrain.errors import ConfigError
from retrain.types import Group
from tests.reward_kit import built, rollout, scored


async def test_a_comparison_that_takes_too_long_is_no_reward() -> None:
    hard = r"\boxed{\int_0^1 e^{\sin(x^{17}) + \cos(x^{x})} dx}"
    calculator = built("math", timeout=1)
    await calculator.setup()
    assert (
        await calculator.calculate(rollout(hard, hard.replace("17", "19")))
    ).outcome == "timeout"


async def test_cosine_overlong_and_repetition_agree_with_trl() -> None:
    texts = ["x" * n + r"\boxed{4}" for n in (0, 1, 5, 20, 50)] + ["x" * n for n in (0, 9, 30, 99)]
    ids = [list(text) for text in texts]
    said = [[{"role": "assistant", "content": text}] for text in texts]
    theirs = [
        get_cosine_scaled_reward(max_len=40)(said, ["$4$"] * len(texts), ids),
        get_soft_overlong_punishment(max_completion_len=40, soft_punish_cache=30)(ids),
        get_repetition_penalty_reward(ngram_size=2)(ids),
    ]
    group = Group(rollout("", 4).prompt, [rollout(text, 4) for text in texts])
    ours = await scored(
        group,
        Path(),
        {"type": "length_cosine", "max": 40, "correct_if": "numeric"},
        {"type": "numeric", "marker": "\\boxed"},
        {"type": "length_overlong", "max": 40, "cache": 30},
        {"type": "repetition", "ngram": 2},
    )
    for name, expected in zip(
        ("length_cosine", "length_overlong", "repetition"), theirs, strict=True
    ):
        assert [t.rewards[name] for t in ours] == pytest.approx(expected)
    assert ours[0].reward == pytest.approx(sum(ours[0].rewards.values()))


async def test_cosine_has_a_reward_for_the_limit_and_needs_the_other_reward() -> None:
    [late] = await scored(
        Group(rollout("", 4).prompt, [rollout("4" * 9, 4)]),
        Path(),
        {"type": "numeric"},
        {"type": "length_cosine", "max": 9, "correct_if": "numeric", "exceeded": -10},
    )
    assert late.rewards["length_cosine"] == -10
    with pytest.raises(ConfigError, match="'numeric'"):
        await scored(
            Group(rollout("").prompt, []),
            Path(),
            {"type": "length_cosine", "max": 9, "correct_if": "numeric"},
        )


async def test_format_and_regex_read_the_whole_reply() -> None:
    said = rollout("<think>so</think>4")
    said.result = "4"  # what `completion` is, with the reasoning split off
    assert await built("format", template="<think>...</think>...").calculate(said) == 1.0
    assert await built("regex", pattern="think", reasoning=True).calculate(said) == 1.0
    assert await built("regex", pattern="think").calculate(said) == 0.0
