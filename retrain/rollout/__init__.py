"""Play groups of rollouts, or the rows of a dataset: group, slot and playback."""

from retrain.rollout.group import Rollouts as Rollouts
from retrain.rollout.playback import Playback as Playback
from retrain.rollout.slot import Slot as Slot
