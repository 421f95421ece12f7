"""Scripted rollouts of agents, and what a config's rewards make of scripted replies."""

from retrain.check.agents import NO_ROLLOUT, tried_agent
from retrain.check.rewards import tried_rewards

__all__ = ["NO_ROLLOUT", "tried_agent", "tried_rewards"]
