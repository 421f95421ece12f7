"""Rewards: what a user writes to score a rollout, and how several make one reward."""

from retrain.scoring.base import (
    NAMES,
    FunctionReward,
    Reward,
    RewardCalculator,
    is_async,
    reward,
)
from retrain.scoring.building import REWARD, term_of
from retrain.scoring.calls import compares
from retrain.scoring.composition import Combined, Term, WeightedReward
from retrain.scoring.scorer import Scorer
from retrain.scoring.verdicts import as_number, checked, fail

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
