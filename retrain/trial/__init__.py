"""Scripted rollouts of agents, and what a config's rewards make of scripted replies."""

from retrain.trial.agents import NO_ROLLOUT, tried_agent
from retrain.trial.rewards import tried_rewards

__all__ = ["NO_ROLLOUT", "tried_agent", "tried_rewards"]
