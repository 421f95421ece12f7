"""Choose the trainer of a config: by backend and algorithm, or the class that the config names.

    custom_trainer_module_path: recipe/my_task/my_trainer.py
    custom_trainer_class_name: MyTrainer

The class name may be missing if the file defines one trainer. The path is resolved in the folder of
the config, then in the working directory. The file may use relative imports. Without these keys,
`self-hosted` selects SelfHostedGrpoTrainer, and a service selects RemoteApiGrpoTrainer, or
RemoteApiCrossEntropyTrainer if the loss is cross_entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.config.plugins import Kind, find_plugin
from retrain.errors import ConfigError
from retrain.trainer.nexrl import remote
from retrain.trainer.nexrl.base import BaseTrainer
from retrain.trainer.nexrl.settings import RecipeSection, algorithm_of, as_section

KIND = Kind("trainer", BaseTrainer)
CUSTOM = "trainer.custom_trainer_module_path"
CLASS = "custom_trainer_class_name"


def build_trainer(config: Mapping[str, Any], base_dir: str | Path | None = None) -> BaseTrainer:
    """Build the trainer of `config`; `base_dir` is the folder of the config's file.

    Raises ConfigError when no trainer fits, and for every problem of the config.
    """
    section = as_section(config, base_dir)
    return select_trainer(section)(section)


def select_trainer(config: Mapping[str, Any]) -> type[BaseTrainer]:
    """The trainer class of `config`. Raises ConfigError when no class fits."""
    section = as_section(config)
    if path := section.get("custom_trainer_module_path"):
        name = f"{path}:{section[CLASS]}" if CLASS in section else str(path)
        found: type[BaseTrainer] = find_plugin(KIND, name, CUSTOM, section.base_dir or Path.cwd())
        return found
    if CLASS in section:
        raise ConfigError(f"trainer.{CLASS} needs {CUSTOM}: the file that defines the class")
    return _automatic(section)


def _automatic(section: RecipeSection) -> type[BaseTrainer]:
    algorithm = algorithm_of(section)
    if algorithm not in ("grpo", "cross_entropy"):
        raise ConfigError(
            f"trainer.algorithm.type: got {algorithm!r}, expected grpo or cross_entropy; for your "
            f"own algorithm, set custom_trainer_module_path and {CLASS}"
        )
    supervised = algorithm == "cross_entropy"
    if (section.get("train_service") or {}).get("backend", "self-hosted") != "self-hosted":
        return remote.RemoteApiCrossEntropyTrainer if supervised else remote.RemoteApiGrpoTrainer
    if supervised:
        raise ConfigError(
            "trainer.algorithm: no self-hosted trainer for cross_entropy; set "
            "train_service.backend to tinker or weaver with url: local, which also trains in this "
            "process, or use retrain's SFT (algorithm: {type: sft})"
        )
    from retrain.trainer.nexrl.self_hosted import SelfHostedGrpoTrainer  # needs torch

    return SelfHostedGrpoTrainer
