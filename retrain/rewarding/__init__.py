"""Rewards: what a user writes to score a rollout, and how several make one reward."""

from retrain.rewarding.base import (
    NAMES,
    FunctionReward,
    Reward,
    RewardCalculator,
    is_async,
    reward,
)
from retrain.rewarding.building import REWARD, term_of
from retrain.rewarding.calls import compares
from retrain.rewarding.composition import Combined, Term, WeightedReward
from retrain.rewarding.scorer import Scorer
from retrain.rewarding.verdicts import as_number, checked, fail

__all__ = [
    "NAMES",
    "REWARD",
    "Combined",
    "FunctionReward",
    "Reward",
    "RewardCalculator",
    "Scorer",
    "Term",
    "WeightedReward",
    "as_number",
    "checked",
    "compares",
    "fail",
    "is_async",
    "reward",
    "term_of",
]
