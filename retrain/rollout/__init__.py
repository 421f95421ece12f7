"""Play groups of rollouts, or the rows of a dataset: group, slot and playback."""

from retrain.rollout.group import Rollouts
from retrain.rollout.playback import Playback
from retrain.rollout.slot import Slot

__all__ = ["Playback", "Rollouts", "Slot"]
