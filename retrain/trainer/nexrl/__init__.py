"""NexRL's trainer API over retrain's adapters; docs/coming-from.md maps every name of its pages.

Its trainers block: `train(trajectories) -> dict`, a hook for the algorithm, a loop in a thread.
Names load when they are first used, so that the remote trainers need no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

_HOMES = {
    "advantages": ("compute_grpo_advantage_for_trajectories",),
    "base": ("BaseTrainer",),
    "batch": ("Batch", "compute_position_id_with_mask", "padding_data"),
    "datums": ("convert_trajectories_to_datums",),
    "holders": ("ServiceHolder", "TinkerServiceHolder", "WeaverServiceHolder"),
    "metrics": ("log_grpo_metrics", "log_rollout_metrics"),
    "patterns": (
        "apply_kl_penalty",
        "compute_gae",
        "compute_nstep_returns",
        "grpo_advantages",
        "kl_penalty",
        "ppo_clipped_loss",
        "token_level_rewards",
    ),
    "pool": ("ActivityTracker", "TrajectoryPool", "WeightSyncController"),
    "recipe": ("Recipe", "load_recipe"),
    "remote": ("RemoteApiCrossEntropyTrainer", "RemoteApiGrpoTrainer", "RemoteApiTrainer"),
    "select": ("build_trainer", "select_trainer"),
    "self_hosted": ("SelfHostedGrpoTrainer", "SelfHostedTrainer"),
    "trajectory": ("Trajectory",),
}
_HOME_OF = {name: f"{__name__}.{module}" for module, names in _HOMES.items() for name in names}

__all__ = sorted(_HOME_OF)


def __getattr__(name: str) -> Any:  # any: whichever public name
    if name not in _HOME_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_HOME_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
