"""Rewards: what a user writes to score a rollout, and how several make one reward."""

from retrain.rewarding.base import (
    NAMES,
    FunctionReward,
    Reward,
    RewardCalculator,
    is_async,
    reward,
)
from retrain.rewarding.building import REWARD, weighted_reward
from retrain.rewarding.scorer import Scorer, WeightedReward
from retrain.rewarding.verdicts import as_number, fail

__all__ = [
    "NAMES",
    "REWARD",
    "FunctionReward",
    "Reward",
    "RewardCalculator",
    "Scorer",
    "WeightedReward",
    "as_number",
    "fail",
    "is_async",
    "reward",
    "weighted_reward",
]
