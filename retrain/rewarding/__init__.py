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
from retrain.rewarding.calls import compares
from retrain.rewarding.scorer import Scorer, WeightedReward
from retrain.rewarding.verdicts import as_number, checked, fail

__all__ = [
    "NAMES",
    "REWARD",
    "FunctionReward",
    "Reward",
    "RewardCalculator",
    "Scorer",
    "WeightedReward",
    "as_number",
    "checked",
    "compares",
    "fail",
    "is_async",
    "reward",
    "weighted_reward",
]
