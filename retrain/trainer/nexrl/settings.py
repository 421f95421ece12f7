"""A trainer's config and the run that it describes. Reads no files.

    trainer:
      total_train_steps: 100
      train_service:
        {backend: self-hosted | tinker | weaver, url: ..., world_size: 1, config: {...}}
      algorithm: {...}        # read by custom trainers; may also be beside `trainer:`

The sections of a retrain YAML (`model`, `prompts`, `environment`, `rewards`, `sampling`, ...) may
be beside `trainer:`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from retrain.config import RunConfig, parse_config
from retrain.config.problems import problems_of
from retrain.errors import ConfigError
from retrain.losses import Normalisation, row_of
from retrain.trainer.base import Single
from retrain.trainer.nexrl.trajectory import Fields

Backend = Literal["self-hosted", "tinker", "weaver"]
DEFAULTS: Mapping[bool, Mapping[str, float]] = {
    False: {"learning_rate": 2e-6, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    True: {"learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
}
"""The optimizer's numbers on NexRL's pages: of GRPO, and (True) of cross-entropy."""
LOSS_KEYS = {"loss_fn", "loss_config", "normalisation"}
TRAINER_KEYS = (
    "total_train_steps",
    "train_service",
    "algorithm",
    "custom_trainer_module_path",
    "custom_trainer_class_name",
)


class RecipeSection(Fields):
    """A section of a config: `section.key`, `section["key"]` and `section.get("key", default)`."""

    _title = "config"
    base_dir: Path | None = None
    """Where relative paths are resolved first; None means the working directory."""


class ServiceConfig(BaseModel):
    """`trainer.train_service.config`; the other keys are options of the backend."""

    model_config = ConfigDict(extra="allow", frozen=True)
    loss_fn: str | None = None
    """None means importance_sampling on a service, and ppo in this process."""
    loss_config: dict[str, Any] = {}
    normalisation: Normalisation | None = None
    """What a shared loss is averaged over; by default as in the YAML."""
    # PyYAML reads 2e-6 as a string: these are converted.
    learning_rate: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None


class TrainService(BaseModel):
    """`trainer.train_service`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    backend: Backend = "self-hosted"
    """`self-hosted` trains with TRL in this process, the others on a service."""
    url: str = "local"
    """The URL of the service; `local` runs one in this process."""
    world_size: Annotated[int, Field(ge=1)] = 1
    """The number of processes that train together: `backend.processes` of a retrain YAML. A service
    distributes its model itself, so it is 1 there."""
    tensor_parallel_size: Single = 1
    config: ServiceConfig = ServiceConfig()

    @model_validator(mode="after")
    def _one_size(self) -> Self:
        if self.backend != "self-hosted" and self.world_size > 1:
            raise ValueError(
                f"world_size: got {self.world_size}, but a service distributes its model itself; "
                "set it to 1"
            )
        if self.config.model_extra and "processes" in self.config.model_extra:
            raise ValueError("config.processes: got a value, but its name here is world_size")
        return self


@dataclass(frozen=True, slots=True)
class RecipeSettings:
    """A trainer's config, validated."""

    section: RecipeSection
    """A trainer's `_config`: the keys of `trainer:`, with `algorithm`."""
    service: TrainService
    run: RunConfig
    """The run that the config describes; `prompts` is a placeholder if the config has none."""


def as_section(config: Mapping[str, Any], base_dir: str | Path | None = None) -> RecipeSection:
    """A trainer's config as a RecipeSection: of a `trainer:` section, or of a whole file with one.

    `algorithm` is always there. Raises ConfigError for anything that is not a mapping.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"a trainer's config: got a {type(config).__name__}, expected a mapping (a dict, an "
            "omegaconf DictConfig, ...)"
        )
    plain: RecipeSection = _plain(config)
    trainer = plain.pop("trainer", None) or RecipeSection()
    algorithm = {**(plain.get("algorithm") or {}), **(trainer.get("algorithm") or {})}
    section = RecipeSection({**plain, **trainer, "algorithm": RecipeSection(algorithm)})
    if base_dir is None and isinstance(config, RecipeSection):
        base_dir = config.base_dir
    object.__setattr__(section, "base_dir", Path(base_dir).resolve() if base_dir else None)
    return section


def read_settings(config: Mapping[str, Any]) -> RecipeSettings:
    """The settings of a trainer. Raises ConfigError with every problem."""
    section = as_section(config)
    problems: list[str] = []
    try:
        service = TrainService.model_validate(section.get("train_service") or {})
    except ValidationError as error:
        problems += problems_of(error, TrainService, prefix="trainer.train_service")
        service = TrainService()
    try:
        run = parse_config(_run_mapping(section, service), section.base_dir)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return RecipeSettings(section, service, run)


def algorithm_of(section: RecipeSection) -> str:
    """`algorithm.type`; without it `cross_entropy` or `grpo`, by the loss."""
    config = (section.get("train_service") or {}).get("config") or {}
    by_loss = "cross_entropy" if config.get("loss_fn") == "cross_entropy" else "grpo"
    return str(section.algorithm.get("type") or by_loss)


def _run_mapping(section: RecipeSection, service: TrainService) -> dict[str, Any]:
    """The mapping of a RunConfig. Unknown keys are kept: RunConfig's checks report them."""
    loss = service.config.loss_fn or _loss_of(algorithm_of(section), service.backend)
    supervised, row = loss == "cross_entropy", row_of(loss)
    average = None if row.normalises_itself else row.normalisation
    steps = section.get("total_train_steps")
    return {
        "prompts": ["-"],
        **{k: v for k, v in section.items() if k not in TRAINER_KEYS},
        "algorithm": {
            "type": "sft" if supervised else "grpo",
            "loss": loss,
            "loss_config": service.config.loss_config,
            "group_size": 1 if supervised else section.algorithm.get("group_size", 8),
            "normalisation": service.config.normalisation or average,
        },
        "backend": _backend(service, DEFAULTS[supervised]),
        "train": {
            **(section.get("train") or {}),
            **({} if steps is None else {"total_train_steps": steps}),
        },
    }


def _loss_of(algorithm: str, backend: Backend) -> str:
    """The loss of a recipe that names none."""
    if algorithm == "cross_entropy":
        return algorithm
    return "ppo" if backend == "self-hosted" else "importance_sampling"


def _backend(service: TrainService, defaults: Mapping[str, float]) -> dict[str, Any]:
    """The `backend:` section of a retrain YAML."""
    given = service.config.model_dump(exclude=LOSS_KEYS, exclude_none=True)
    keys: dict[str, Any] = {**defaults, **given}
    if service.backend != "self-hosted":
        return {"type": service.backend, "url": service.url, **keys}
    if "world_size" in service.model_fields_set:
        keys["processes"] = service.world_size
    return {"type": "trl", **keys}


def _plain(value: Any) -> Any:
    """Mappings as Sections with string keys, sequences as lists."""
    if isinstance(value, Mapping):
        return RecipeSection({str(key): _plain(inner) for key, inner in value.items()})
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(inner) for inner in value]
    return value
