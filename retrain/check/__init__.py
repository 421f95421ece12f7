"""`retrain check`: scripted replies to environments, agents and rewards, without a model.

- `subject`: what ENVIRONMENT|CONFIG names is loaded, and checked by:
- `environments`: the contract of environments; `replay` plays the same replies again and compares
- `agents`: an agent must end without an error, whatever the model says
- `rewards`: what a config's rewards make of the rollouts of `cases`
- `scripted`: the sampler that says fixed replies, and example calls of tools
- `bench`: what they share: findings, deadlines, the watch of the loop, the environment

Authors can call `check_environment` in their own tests.
"""

from retrain.check.bench import Finding
from retrain.check.environments import check_environment
from retrain.check.rewards import tried_rewards
from retrain.check.subject import check_subject

__all__ = ["Finding", "check_environment", "check_subject", "tried_rewards"]
