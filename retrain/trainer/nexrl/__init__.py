"""NexRL's trainer API on top of retrain's adapters. docs/coming-from.md maps NexRL's names.

A trainer has `train(trajectories) -> dict`, a method for the algorithm, and a loop in a thread.
Names are imported on first use, so the remote trainers need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_NAMES = {
    "advantages": "compute_grpo_advantage_for_trajectories",
    "base": "BaseTrainer",
    "batch": "Batch apply_kl_penalty compute_position_id_with_mask padding_data",
    "datums": "convert_trajectories_to_datums",
    "holders": "ServiceHolder TinkerServiceHolder WeaverServiceHolder",
    "metrics": "log_grpo_metrics log_rollout_metrics",
    "pool": "ActivityTracker TrajectoryPool WeightSyncController",
    "recipe": "Recipe load_recipe",
    "remote": "RemoteApiCrossEntropyTrainer RemoteApiGrpoTrainer RemoteApiTrainer",
    "select": "build_trainer select_trainer",
    "self_hosted": "SelfHostedGrpoTrainer SelfHostedTrainer",
    "trajectory": "Trajectory",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}

__all__ = sorted(_MODULE_OF)


def __getattr__(name: str) -> Any:  # any: any of the public names
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
