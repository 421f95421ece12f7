"""Playing groups of rollouts: a group, its slot, and the playback of given rows."""

from retrain.rollout.group import Rollouts
from retrain.rollout.playback import Playback
from retrain.rollout.slot import Slot

__all__ = [
    "Playback",
    "Rollouts",
    "Slot",
]
