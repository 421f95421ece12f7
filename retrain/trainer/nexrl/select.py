"""Choose the trainer of a config: by backend and algorithm, or the class that the config names.

    custom_trainer_module_path: recipe/my_task/my_trainer.py     # or type: path.py:Class
    custom_trainer_class_name: MyTrainer                         # or type: package.module:Class

A path is resolved in the folder of the config, then in the working directory. The file may use
relative imports. Without either key, `self-hosted` selects SelfHostedGrpoTrainer, and a service
selects RemoteApiGrpoTrainer, or RemoteApiCrossEntropyTrainer if the loss is cross_entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from retrain.config.plugins import Kind, find_plugin
from retrain.errors import ConfigError
from retrain.trainer.nexrl.base import BaseTrainer
from retrain.trainer.nexrl.settings import Section, algorithm_of, as_section

KIND = Kind("trainer", BaseTrainer)
BUILT_IN = {
    "self_hosted_grpo": "retrain.trainer.nexrl.self_hosted:SelfHostedGrpoTrainer",
    "remote_api_grpo": "retrain.trainer.nexrl.remote:RemoteApiGrpoTrainer",
    "remote_api_cross_entropy": "retrain.trainer.nexrl.remote:RemoteApiCrossEntropyTrainer",
}


def build_trainer(config: Mapping[str, Any], base_dir: str | Path | None = None) -> BaseTrainer:
    """Build the trainer of `config`; `base_dir` is the folder of the config's file.

    Raises ConfigError when no trainer fits, and for every problem of the config.
    """
    section = _located(config, base_dir)
    return select_trainer(section)(section)


def select_trainer(
    config: Mapping[str, Any], base_dir: str | Path | None = None
) -> type[BaseTrainer]:
    """The trainer class of `config`. Raises ConfigError when no class fits."""
    section = _located(config, base_dir)
    where, name = _named(section)
    found: type[BaseTrainer] = find_plugin(KIND, name, where, section.base_dir or Path.cwd())
    return found


def _named(section: Section) -> tuple[str, str]:
    """The key that chooses the class, and the class as `module:Class` or a path."""
    path, kind = section.get("custom_trainer_module_path"), section.get("type")
    if path is not None and kind is not None:
        raise ConfigError(
            f"trainer.type is {kind!r} and trainer.custom_trainer_module_path is {path!r}: keep "
            "one of them"
        )
    if path is not None:
        name = section.get("custom_trainer_class_name", "CustomTrainer")
        return "trainer.custom_trainer_module_path", f"{path}:{name}"
    if "custom_trainer_class_name" in section:
        raise ConfigError(
            "trainer.custom_trainer_class_name needs trainer.custom_trainer_module_path: the file "
            "that defines the class"
        )
    if kind is None:
        return "trainer.type", BUILT_IN[_automatic(section)]
    if kind not in BUILT_IN and ":" not in kind and not kind.endswith(".py"):
        raise ConfigError(
            f"trainer.type: no trainer {kind!r}; expected one of {', '.join(BUILT_IN)}, or a class "
            "of your own as path/file.py:Class or module:Class"
        )
    return "trainer.type", BUILT_IN.get(kind, kind)


def _automatic(section: Section) -> str:
    """The built-in trainer for the backend and the algorithm."""
    backend = (section.get("train_service") or {}).get("backend", "self-hosted")
    algorithm = algorithm_of(section)
    if algorithm not in ("grpo", "cross_entropy"):
        raise ConfigError(
            f"trainer.algorithm.type: got {algorithm!r}, expected grpo or cross_entropy; for an "
            "algorithm of your own, set custom_trainer_module_path and custom_trainer_class_name"
        )
    if backend == "self-hosted" and algorithm == "cross_entropy":
        raise ConfigError(
            "trainer.algorithm: no self-hosted trainer for cross_entropy; set "
            "train_service.backend to tinker or weaver with url: local, which also trains in this "
            "process, or use retrain's SFT (algorithm: {type: sft})"
        )
    return "self_hosted_grpo" if backend == "self-hosted" else f"remote_api_{algorithm}"


def _located(config: Mapping[str, Any], base_dir: str | Path | None) -> Section:
    section = as_section(config)
    return section if base_dir is None else section.found_in(Path(base_dir).resolve())
