"""Rewards: what a user writes to score a rollout, and how several make one reward."""

from retrain.scoring.base import NAMES as NAMES
from retrain.scoring.base import FunctionReward as FunctionReward
from retrain.scoring.base import Reward as Reward
from retrain.scoring.base import RewardCalculator as RewardCalculator
from retrain.scoring.base import is_async as is_async
from retrain.scoring.base import reward as reward
from retrain.scoring.building import REWARD as REWARD
from retrain.scoring.building import term_of as term_of
from retrain.scoring.calls import compares as compares
from retrain.scoring.composition import Combined as Combined
from retrain.scoring.composition import Term as Term
from retrain.scoring.composition import WeightedReward as WeightedReward
from retrain.scoring.scorer import Scorer as Scorer
from retrain.scoring.verdicts import as_number as as_number
from retrain.scoring.verdicts import checked as checked
from retrain.scoring.verdicts import fail as fail
