"""NexRL's `trainer:` section as a RunConfig. Reads no files, so building a trainer does no I/O.

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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retrain.config import RunConfig, parse_config
from retrain.config.problems import problems_of
from retrain.errors import ConfigError
from retrain.losses import Normalisation, row_of
from retrain.trainer.nexrl.trajectory import Fields

Backend = Literal["self-hosted", "tinker", "weaver"]
ADAPTERS: Mapping[Backend, str] = {"self-hosted": "trl", "tinker": "tinker", "weaver": "weaver"}
DEFAULTS: Mapping[bool, Mapping[str, float]] = {
    False: {"learning_rate": 2e-6, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8},
    True: {"learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8},
}
"""The optimizer's numbers on NexRL's pages: of GRPO, and (True) of cross-entropy."""
TRL_ARGUMENTS = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
TRAINER_KEYS = (
    "total_train_steps",
    "train_service",
    "type",
    "custom_trainer_module_path",
    "custom_trainer_class_name",
)
ALGORITHM_KEYS = ("group_size", "loss", "loss_config")
"""Keys of `algorithm` that the run reads; a custom trainer reads all others."""


class Section(Fields):
    """A section of a config: `section.key`, `section["key"]` and `section.get("key", default)`."""

    _title = "config"
    base_dir: Path | None = None
    """Where relative paths are resolved first; None means the working directory."""

    def found_in(self, base_dir: Path | None) -> Self:
        """The same section, with its `base_dir`."""
        object.__setattr__(self, "base_dir", base_dir)
        return self


class ServiceConfig(BaseModel):
    """`trainer.train_service.config`; further keys are options of the backend."""

    model_config = ConfigDict(extra="allow", frozen=True)
    loss_fn: str | None = None
    """None means importance_sampling on a service, and ppo in this process."""
    loss_config: dict[str, Any] = {}
    normalisation: Normalisation | None = None
    """What a shared loss is averaged over; `token` by default."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None
    """Gradients are scaled down to this norm; None means the default of the backend."""
    lora_rank: Annotated[int, Field(ge=1)] | None = None
    """The rank of LoRA weights; None means the default of the backend."""


class TrainService(BaseModel):
    """`trainer.train_service`."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    backend: Backend = "self-hosted"
    """`self-hosted` trains with TRL in this process, the others on a service."""
    url: str = "local"
    """The URL of the service; `local` runs one in this process."""
    world_size: Annotated[int, Field(ge=1)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    config: ServiceConfig = ServiceConfig()


@dataclass(frozen=True, slots=True)
class Settings:
    """A trainer's config, validated."""

    section: Section
    """A trainer's `_config`: the keys of `trainer:`, with `algorithm`."""
    service: TrainService
    run: RunConfig
    """The run that the config describes; `prompts` is a placeholder if the config has none."""

    def with_url(self, url: str) -> Settings:
        """The same settings for a service at another URL."""
        backend = self.run.backend.model_copy(update={"url": url})
        run = self.run.model_copy(update={"backend": backend})
        return replace(self, run=run, service=self.service.model_copy(update={"url": url}))


def as_section(config: Mapping[str, Any]) -> Section:
    """A trainer's config as a Section: of a `trainer:` section, or of a whole file with one.

    `algorithm` is always there. Raises ConfigError for anything that is not a mapping.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"a trainer's config: got a {type(config).__name__}, expected a mapping (a dict, an "
            "omegaconf DictConfig, ...)"
        )
    base_dir = config.base_dir if isinstance(config, Section) else None
    plain: Section = _plain(config)
    trainer = plain.pop("trainer", None) or Section()
    algorithm = {**(plain.get("algorithm") or {}), **(trainer.get("algorithm") or {})}
    section = Section({**plain, **trainer, "algorithm": Section(algorithm)})
    return section.found_in(base_dir)


def read_settings(config: Mapping[str, Any]) -> Settings:
    """The settings of a trainer. Raises ConfigError with every problem."""
    section = as_section(config)
    problems: list[str] = []
    try:
        service = TrainService.model_validate(section.get("train_service") or {})
    except ValidationError as error:
        problems += problems_of(error, TrainService, prefix="trainer.train_service")
        service = TrainService()
    for key in ("world_size", "tensor_parallel_size"):
        if (size := getattr(service, key)) > 1:
            problems.append(
                f"trainer.train_service.{key}: got {size}, but self-hosted training runs in one "
                "process on one device, and a service distributes its model itself: set it to 1"
            )
    asked, loss_fn = section.algorithm.get("loss"), service.config.loss_fn
    if asked and loss_fn and asked != loss_fn:
        problems.append(
            f"trainer.algorithm.loss is {asked!r} and trainer.train_service.config.loss_fn is "
            f"{loss_fn!r}: keep one of them"
        )
    loss = asked or loss_fn or _default_loss(section, service.backend)
    try:
        run = parse_config(_run_mapping(section, service, loss), section.base_dir)
    except ConfigError as error:
        problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return Settings(section, service, run)


def algorithm_of(section: Section) -> str:
    """`algorithm.type` (or `name`); without it `cross_entropy` or `grpo`, by the loss."""
    named = section.algorithm.get("type") or section.algorithm.get("name")
    if named is not None:
        return str(named)
    config = (section.get("train_service") or {}).get("config") or {}
    loss = section.algorithm.get("loss") or config.get("loss_fn")
    return "cross_entropy" if loss == "cross_entropy" else "grpo"


def _default_loss(section: Section, backend: Backend) -> str:
    if algorithm_of(section) == "cross_entropy":
        return "cross_entropy"
    return "ppo" if backend == "self-hosted" else "importance_sampling"


def _run_mapping(section: Section, service: TrainService, loss: str) -> dict[str, Any]:
    """The mapping of a RunConfig. Unknown keys are kept: RunConfig's checks report them."""
    algorithm = {key: section.algorithm[key] for key in ALGORITHM_KEYS if key in section.algorithm}
    supervised, summed = loss == "cross_entropy", not row_of(loss).normalises_itself
    steps = section.get("total_train_steps")
    return {
        "prompts": ["-"],
        **{k: v for k, v in section.items() if k not in (*TRAINER_KEYS, "algorithm")},
        "algorithm": {
            "loss_config": service.config.loss_config,
            **algorithm,
            "type": "sft" if supervised else "grpo",
            "loss": loss,
            "group_size": 1 if supervised else algorithm.get("group_size", 8),
            "normalisation": service.config.normalisation or ("token" if summed else None),
        },
        "backend": _backend(service, loss),
        "train": {
            **(section.get("train") or {}),
            **({} if steps is None else {"total_train_steps": steps}),
        },
    }


def _backend(service: TrainService, loss: str) -> dict[str, Any]:
    """The `backend:` section of a retrain YAML."""
    hosted = service.backend == "self-hosted"
    given = service.config.model_dump(exclude={"loss_fn", "loss_config", "normalisation"})
    own = ServiceConfig.model_fields
    keys = {k: value for k, value in given.items() if value is not None or k not in own}
    keys = {"type": ADAPTERS[service.backend], **DEFAULTS[loss == "cross_entropy"], **keys}
    if "grad_clip_norm" in keys:
        keys["max_grad_norm"] = keys.pop("grad_clip_norm")
    if "lora_rank" in keys:
        keys["lora"] = {"r" if hosted else "rank": keys.pop("lora_rank")}
    if not hosted:
        return {"url": service.url, **keys}
    adam = {theirs: keys.pop(ours) for ours, theirs in TRL_ARGUMENTS.items()}
    return {**keys, "args": {**adam, **keys.get("args", {})}}


def _plain(value: Any) -> Any:
    """Mappings as Sections with string keys, sequences as lists."""
    if isinstance(value, Mapping):
        return Section({str(key): _plain(inner) for key, inner in value.items()})
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(inner) for inner in value]
    return value
