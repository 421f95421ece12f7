"""Credit per turn or per token: an action is judged by the rewards that follow it.

    G_t = r_t + discount x G_(t+1)                  the return of turn (or token) t
    A_t = relative(G_t among its peers)

This is the policy gradient with reward-to-go (Williams 1992; Sutton et al. 2000). The peers of a
turn are the turns with the same number in the other rollouts, as in MT-GRPO (Zeng et al. 2025,
arXiv:2505.11821), which compares turn by turn too. Turns with a number that only one rollout has
reached join the last number that several have.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import chain, islice
from typing import Literal

from retrain.types import Trajectory

CreditUnit = Literal["whole", "turns", "tokens"]
Relative = Callable[[Sequence[float]], Sequence[float]]
"""From the returns of peers to their advantages."""
Returns = list[list[float]]
"""Of one rollout: for each turn its return, or those of its tokens."""


def check_credit(credit: CreditUnit, discount: float) -> None:
    """Raises ValueError for a discount outside of [0, 1], or without an effect."""
    if not 0.0 <= discount <= 1.0:
        raise ValueError(f"discount is {discount}, expected a number from 0 to 1")
    if credit == "whole" and discount != 1.0:
        raise ValueError(
            f"discount is {discount}, but with `credit: whole` it has no effect; set credit to "
            "turns or tokens, or remove discount"
        )


def returns_of(trajectory: Trajectory, credit: CreditUnit, discount: float) -> Returns:
    """The discounted returns of a rollout. The last turn earns what no turn or token has earned.

    A turn without sampled tokens has one return too.
    """
    turns, by_token = trajectory.turns, iter(trajectory.token_rewards)
    earned = list(trajectory.turn_rewards) or [0.0] * len(turns)
    if turns:
        parts = math.fsum(earned) + math.fsum(trajectory.token_rewards)
        earned[-1] += trajectory.reward - parts
    rewards: Returns = []
    for turn, reward in zip(turns, earned, strict=True):
        size = len(turn.completion.token_ids)
        own = list(islice(by_token, size)) or [0.0] * max(1, size)
        own = [math.fsum(own)] if credit == "turns" else own
        own[-1] += reward
        rewards.append(own)
    following = 0.0
    for own in reversed(rewards):
        for index in reversed(range(len(own))):
            following = own[index] = own[index] + discount * following
    return rewards


def per_token(
    trajectories: Sequence[Trajectory], returns: Sequence[Returns], relative: Relative
) -> list[list[float]]:
    """The advantage of each sampled token of rollouts that are compared with each other."""
    last = _last_shared(returns)
    if last < 0:  # a single rollout has no peers
        return [[0.0] * trajectory.sampled_tokens for trajectory in trajectories]
    numbered = [[(min(number, last), own) for number, own in enumerate(turns)] for turns in returns]
    peers: defaultdict[int, list[float]] = defaultdict(list)
    for number, own in chain(*numbered):
        peers[number] += own
    credit = {number: iter(relative(values)) for number, values in peers.items()}
    return [
        _spread(trajectory, [list(islice(credit[number], len(own))) for number, own in turns])
        for trajectory, turns in zip(trajectories, numbered, strict=True)
    ]


def _last_shared(returns: Sequence[Returns]) -> int:
    """The highest turn number that several rollouts have; -1 if there is none."""
    reached = Counter(number for rollout in returns for number in range(len(rollout)))
    return max((number for number, count in reached.items() if count > 1), default=-1)


def _spread(trajectory: Trajectory, credit: Sequence[list[float]]) -> list[float]:
    """The advantage of each token; one of a whole turn is that of each of its tokens."""
    tokens: list[float] = []
    for turn, own in zip(trajectory.turns, credit, strict=True):
        tokens += own * len(turn.completion.token_ids) if len(own) == 1 else own
    return tokens
