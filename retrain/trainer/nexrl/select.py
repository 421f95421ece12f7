"""Which trainer a config means: by backend and algorithm, or the one that it names.

    custom_trainer_module_path: recipe/my_task/my_trainer.py     # or type: path.py:Class
    custom_trainer_class_name: MyTrainer                         # or type: package.module:Class

A path is looked up in the config's folder, then in the working folder; relative imports inside the
file work. Without either, `self-hosted` means SelfHostedGrpoTrainer, and a service
RemoteApiGrpoTrainer, or RemoteApiCrossEntropyTrainer where the loss is cross_entropy.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
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
DEFAULT_CLASS = "CustomTrainer"


def build_trainer(config: Mapping[str, Any], base_dir: str | Path | None = None) -> BaseTrainer:
    """The trainer that `config` means, built of it; `base_dir` is the config file's folder.

    Raises ConfigError when there is none, or the config can't be honoured.
    """
    section = _located(config, base_dir)
    trainer: BaseTrainer = select_trainer(section)(section)
    return trainer


def select_trainer(
    config: Mapping[str, Any], base_dir: str | Path | None = None
) -> type[BaseTrainer]:
    """The class that `config` means. Raises ConfigError when there is none."""
    section = _located(config, base_dir)
    folder = section.base_dir or Path.cwd()
    path, kind = section.get("custom_trainer_module_path"), section.get("type")
    if path is not None and kind is not None:
        raise ConfigError(
            f"trainer.type is {kind!r} and trainer.custom_trainer_module_path {path!r}: keep one"
        )
    if path is not None:
        where = "trainer.custom_trainer_module_path"
        name = section.get("custom_trainer_class_name", DEFAULT_CLASS)
        found: type[BaseTrainer] = find_plugin(KIND, f"{path}:{name}", where, folder)
        return found
    if "custom_trainer_class_name" in section:
        raise ConfigError(
            "trainer.custom_trainer_class_name needs trainer.custom_trainer_module_path: the file "
            "that defines it"
        )
    if kind is None:
        return _built_in(_automatic(section))
    if ":" in kind or kind.endswith(".py"):
        named: type[BaseTrainer] = find_plugin(KIND, kind, "trainer.type", folder)
        return named
    return _built_in(kind)


def _automatic(section: Section) -> str:
    """The built-in trainer of the backend and the algorithm."""
    backend = (section.get("train_service") or {}).get("backend", "self-hosted")
    algorithm = algorithm_of(section)
    if algorithm not in ("grpo", "cross_entropy"):
        raise ConfigError(
            f"trainer.algorithm.type: got {algorithm!r}, expected grpo or cross_entropy; for an "
            "algorithm of your own name its trainer: custom_trainer_module_path and "
            "custom_trainer_class_name"
        )
    if backend == "self-hosted" and algorithm == "cross_entropy":
        raise ConfigError(
            "trainer.algorithm: there is no self-hosted cross_entropy trainer: set "
            "train_service.backend to tinker or weaver with url: local, which trains in this "
            "process too, or use retrain's own SFT (algorithm: {type: sft})"
        )
    return "self_hosted_grpo" if backend == "self-hosted" else f"remote_api_{algorithm}"


def _built_in(name: str) -> type[BaseTrainer]:
    if name not in BUILT_IN:
        raise ConfigError(
            f"trainer.type: there is no trainer {name!r}: expected one of {', '.join(BUILT_IN)}, "
            "or your own as path/file.py:Class or module:Class"
        )
    module, _, attribute = BUILT_IN[name].partition(":")
    found: type[BaseTrainer] = getattr(import_module(module), attribute)
    return found


def _located(config: Mapping[str, Any], base_dir: str | Path | None) -> Section:
    section = as_section(config)
    return section if base_dir is None else section.found_in(Path(base_dir).resolve())
