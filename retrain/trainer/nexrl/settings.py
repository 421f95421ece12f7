"""What NexRL's `trainer:` section means here; pure, so that a trainer is built without any I/O.

    trainer:
      total_train_steps: 100
      train_service:
        {backend: self-hosted | tinker | weaver, url: ..., world_size: 1, config: {...}}
      algorithm: {...}        # custom trainers read it; `algorithm:` beside `trainer:` is the same

The sections of a retrain YAML (`model`, `prompts`, `environment`, `rewards`, `sampling`, ...) may
stand beside `trainer:`; a config may be any Mapping. `read_settings` turns it into a RunConfig, and
raises one ConfigError that lists every problem.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from retrain.config import RunConfig, parse_config
from retrain.config.problems import problems_of
from retrain.errors import ConfigError
from retrain.losses import Normalisation, row_of

Backend = Literal["self-hosted", "tinker", "weaver"]
ADAPTERS: Mapping[Backend, str] = MappingProxyType(
    {"self-hosted": "trl", "tinker": "tinker", "weaver": "weaver"}
)
GRPO_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"learning_rate": 2e-6, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
)
CROSS_ENTROPY_DEFAULTS: Mapping[str, Any] = MappingProxyType(
    {"learning_rate": 1e-5, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
)
TRAINER_KEYS = (
    "total_train_steps",
    "train_service",
    "type",
    "custom_trainer_module_path",
    "custom_trainer_class_name",
)
ALGORITHM_KEYS = ("group_size", "loss", "loss_config")
"""Keys of `algorithm` that the run reads; all others are a custom trainer's own."""


class Section(dict[str, Any]):
    """A section of a config: `section.key`, `section["key"]` and `section.get("key", default)`."""

    base_dir: Path | None = None
    """Where relative paths are looked up first; the working folder where it is None."""

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        near = difflib.get_close_matches(name, self, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise AttributeError(
            f"the config has no key {name!r}{hint} (it has {', '.join(self) or 'none'}); "
            f"config.get({name!r}, default) allows it to be missing"
        )

    def __setattr__(self, name: str, value: Any) -> None:
        self[name] = value

    def found_in(self, base_dir: Path | None) -> Self:
        """The same section, with its `base_dir`."""
        object.__setattr__(self, "base_dir", base_dir)
        return self


class TrainService(BaseModel):
    """`trainer.train_service`: who trains."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    backend: Backend = "self-hosted"
    """`self-hosted`: this process, by TRL; the others speak to a service."""
    url: str = "local"
    """Of a service; `local` is one inside this process."""
    world_size: Annotated[int, Field(ge=1)] = 1
    tensor_parallel_size: Annotated[int, Field(ge=1)] = 1
    config: ServiceConfig = Field(default_factory=lambda: ServiceConfig())


class ServiceConfig(BaseModel):
    """`trainer.train_service.config`; further keys are the backend's own options."""

    model_config = ConfigDict(extra="allow", frozen=True)
    loss_fn: str | None = None
    """None: importance_sampling on a service, ppo in this process."""
    loss_config: dict[str, Any] = {}
    normalisation: Normalisation | None = None
    """What a shared loss is averaged over; `token` by default."""
    learning_rate: Annotated[float, Field(gt=0)] | None = None
    beta1: float | None = None
    beta2: float | None = None
    eps: float | None = None
    weight_decay: float | None = None
    grad_clip_norm: float | None = None
    """Gradients are scaled down to this norm; the backend's default without it."""
    lora_rank: Annotated[int, Field(ge=1)] | None = None
    """Low-rank adapters of this rank; None is the backend's default."""


@dataclass(frozen=True, slots=True)
class Settings:
    """A trainer's config, read."""

    section: Section
    """What a trainer sees as its config: the keys of `trainer:` and, in `algorithm`, its own."""
    service: TrainService
    run: RunConfig
    """The run that it describes; `prompts` is a stand-in where the config has none."""
    loss: str
    normalisation: Normalisation | None

    def with_url(self, url: str) -> Settings:
        """The same on a service that is elsewhere."""
        backend = self.run.backend.model_copy(update={"url": url})
        run = self.run.model_copy(update={"backend": backend})
        return replace(self, run=run, service=self.service.model_copy(update={"url": url}))


def as_section(config: Mapping[str, Any]) -> Section:
    """A trainer's config of any mapping: a `trainer:` section, or a whole file with one.

    `algorithm` is always there. Raises ConfigError when it is no mapping.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(
            f"a trainer's config must be a mapping (a dict, an omegaconf DictConfig, ...), got "
            f"{type(config).__name__}"
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
    service = _service(section.get("train_service") or {}, problems)
    problems += _refused(service)
    loss = section.algorithm.get("loss") or service.config.loss_fn or _default_loss(section)
    given = section.algorithm.get("loss"), service.config.loss_fn
    if None not in given and given[0] != given[1]:
        problems.append(
            f"trainer.algorithm.loss is {given[0]!r} and trainer.train_service.config.loss_fn "
            f"{given[1]!r}: keep one of them"
        )
    run = None
    try:
        run = parse_config(_run_mapping(section, service, loss), section.base_dir)
    except ConfigError as error:
        problems += error.problems
    if problems or run is None:
        raise ConfigError(*problems)
    wanted = service.config.normalisation
    default: Normalisation | None = None if row_of(loss).normalises_itself else "token"
    return Settings(section, service, run, loss, wanted or default)


def algorithm_of(section: Section) -> str:
    """What `algorithm.type` (or `name`) says, or else `grpo` or `cross_entropy` by the loss."""
    named = section.algorithm.get("type") or section.algorithm.get("name")
    if named is not None:
        return str(named)
    config = (section.get("train_service") or {}).get("config") or {}
    loss = section.algorithm.get("loss") or config.get("loss_fn")
    return "cross_entropy" if loss == "cross_entropy" else "grpo"


def _default_loss(section: Section) -> str:
    if algorithm_of(section) == "cross_entropy":
        return "cross_entropy"
    hosted = (section.get("train_service") or {}).get("backend", "self-hosted") == "self-hosted"
    return "ppo" if hosted else "importance_sampling"


def _service(keys: Mapping[str, Any], problems: list[str]) -> TrainService:
    try:
        return TrainService.model_validate(keys)
    except ValidationError as error:
        problems += problems_of(error, TrainService, prefix="trainer.train_service")
        return TrainService()


def _refused(service: TrainService) -> list[str]:
    """What one process on one machine can't honour."""
    place = "in one process on one device"
    return [
        f"trainer.train_service.{key}: got {value}, but self-hosted training runs {place}, and a "
        "service places its model itself: set it to 1"
        for key, value in (
            ("world_size", service.world_size),
            ("tensor_parallel_size", service.tensor_parallel_size),
        )
        if value > 1
    ]


def _run_mapping(section: Section, service: TrainService, loss: str) -> dict[str, Any]:
    """The mapping of a RunConfig; keys that are nobody's go along, to be named by its checks."""
    algorithm = {key: section.algorithm[key] for key in ALGORITHM_KEYS if key in section.algorithm}
    supervised = loss == "cross_entropy"
    steps = section.get("total_train_steps")
    return {
        "prompts": ["-"],
        **{k: v for k, v in section.items() if k not in (*TRAINER_KEYS, "algorithm")},
        "algorithm": {
            **algorithm,
            "type": "sft" if supervised else "grpo",
            "loss": loss,
            "loss_config": algorithm.get("loss_config", service.config.loss_config),
            "group_size": 1 if supervised else algorithm.get("group_size", 8),
            "normalisation": service.config.normalisation,
        },
        "backend": _backend(service, loss),
        "train": {
            **(section.get("train") or {}),
            **({} if steps is None else {"total_train_steps": steps}),
        },
    }


def _backend(service: TrainService, loss: str) -> dict[str, Any]:
    """The `backend:` section of a retrain YAML."""
    wanted = service.config
    defaults = CROSS_ENTROPY_DEFAULTS if loss == "cross_entropy" else GRPO_DEFAULTS
    own = {name: getattr(wanted, name) for name in defaults}
    adam = {name: defaults[name] if value is None else value for name, value in own.items()}
    keys: dict[str, Any] = {
        "type": ADAPTERS[service.backend],
        "learning_rate": adam.pop("learning_rate"),
    }
    if wanted.weight_decay is not None:
        keys["weight_decay"] = wanted.weight_decay
    if wanted.grad_clip_norm is not None:
        keys["max_grad_norm"] = wanted.grad_clip_norm
    if service.backend == "self-hosted":
        named = {"beta1": "adam_beta1", "beta2": "adam_beta2", "eps": "adam_epsilon"}
        keys["args"] = {named[name]: value for name, value in adam.items()}
    else:
        keys |= {"url": service.url, **adam}
    if wanted.lora_rank is not None:
        keys["lora"] = {"r" if service.backend == "self-hosted" else "rank": wanted.lora_rank}
    extra = dict(wanted.model_extra or {})
    args = {**keys.get("args", {}), **extra.pop("args", {})}
    return {**keys, **extra, **({"args": args} if args else {})}


def _plain(value: Any) -> Any:
    """Mappings as Sections with text keys, sequences as lists."""
    if isinstance(value, Mapping):
        return Section({str(key): _plain(inner) for key, inner in value.items()})
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [_plain(inner) for inner in value]
    return value
