"""The nested config of the preset trainers: NeMo RL's sections, checked before anything loads.

    {"policy": {"model_name": ..., "learning_rate": ..., "dtensor_cfg": {...}},
     "grpo": {"num_prompts_per_step": ..., ...}, "data": {...}}

Sections of a retrain YAML (`backend`, `sampling`, `staleness`, ...) may be beside them, and
override the preset's values. `run_mapping` returns the mapping of a RunConfig. A value that has a
key in NeMo RL's sections is set there only.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, FiniteFloat, model_validator

from retrain.config import Section
from retrain.errors import ConfigError
from retrain.trainer.base import Single
from retrain.trainer.data import DataOptions

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=0)] | None


class TensorParallel(Section):
    """NeMo RL's keys. 1 is the only size; `backend.processes` trains in several processes."""

    enabled: bool = False
    tensor_parallel_size: Single = 1


class OptimizerArguments(Section):
    lr: Rate | None = None
    """Another name of `policy.learning_rate`."""
    weight_decay: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


class Optimizer(Section):
    kwargs: OptimizerArguments = OptimizerArguments()


class Policy(Section):
    model_name: str
    """`tiny`, a local folder, or a Hugging Face id."""
    learning_rate: Rate = 1e-6
    max_total_sequence_length: Annotated[int, Field(ge=2)] = 512
    """Tokens of prompt and response together; a longer prompt is dropped and counted."""
    dtensor_cfg: TensorParallel = TensorParallel()
    optimizer: Optimizer = Optimizer()

    @model_validator(mode="after")
    def _one_learning_rate(self) -> Self:
        rate = self.optimizer.kwargs.lr
        if rate is None or rate == self.learning_rate:
            return self
        if "learning_rate" in self.model_fields_set:
            raise ValueError(
                f"learning_rate is {self.learning_rate} and optimizer.kwargs.lr is {rate}: remove "
                "one of them"
            )
        return self.model_copy(update={"learning_rate": rate})


class SFTPolicy(Policy):
    learning_rate: Rate = 2e-5


class RunLimits(Section):
    """`max_num_steps` limits the optimizer steps, `max_num_epochs` the passes over the rows.

    Both count from the beginning of training, and the first limit that is reached ends it. Without
    either: one epoch.
    """

    batch: ClassVar[str] = "batch_size"
    """The key of the batch size."""
    max_num_steps: Limit = None
    max_num_epochs: Limit = None
    seed: int = 0

    def algorithm(self) -> dict[str, Any]:
        """Keys of the run's `algorithm:`."""
        return {}


class RolloutLimits(RunLimits):
    batch: ClassVar[str] = "num_prompts_per_step"
    num_prompts_per_step: Count = 32
    num_generations_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Rollouts per prompt. At least 2, since their rewards are compared."""
    max_rollout_turns: Count | None = None
    reward_weights: dict[str, FiniteFloat] | None = None
    """Weights of the numbers in a dict that `reward_fn` returns; None for the plain sum."""
    on_reward_error: Literal["raise", "drop"] = "raise"
    """What a failing reward does: end training with its error, or drop and count its rollout."""

    def algorithm(self) -> dict[str, Any]:
        return {"group_size": self.num_generations_per_prompt}


class GRPOSection(RolloutLimits):
    normalize_rewards: bool = True
    """Divide by the standard deviation of the group."""
    use_leave_one_out_baseline: bool = True
    """Compare with the mean of the other rollouts instead of the mean of all."""

    def algorithm(self) -> dict[str, Any]:
        return {
            **super().algorithm(),
            "baseline": "leave_one_out" if self.use_leave_one_out_baseline else "mean",
            "scale": "group" if self.normalize_rewards else "none",
        }


class SFTSection(RunLimits):
    batch_size: Count = 32


class DPOSection(RunLimits):
    batch_size: Count = 32
    """Pairs per step."""
    beta: Rate = 0.1
    """Weight of the distance to the reference model."""
    pair_by: str | None = None
    """The score by which single responses are paired: per prompt, the best with the worst."""

    def algorithm(self) -> dict[str, Any]:
        return {"beta": self.beta, **_given({"pair_by": self.pair_by})}


class PresetSettings(Section):
    """What all presets have. A subclass adds a section with the name of its algorithm."""

    own: ClassVar[str] = ""
    """The algorithm, and the name of its section."""
    policy: Policy
    data: DataOptions = DataOptions()
    # Passed on unchanged: RunConfig and the plug-ins check them.
    algorithm: dict[str, Any] | None = None
    backend: Any = None
    chat: Any = None
    checkpoint: Any = None
    deadlines: Any = None
    eval: Any = None
    loggers: Any = None
    name: Any = None
    rollout: Any = None
    run_dir: Any = None
    sampling: Any = None
    staleness: Any = None
    train: Any = None

    @property
    def limits(self) -> RunLimits:
        section: RunLimits = getattr(self, self.own)
        return section

    def run_mapping(self) -> dict[str, Any]:
        """The mapping of a RunConfig, without prompts, environment and rewards.

        Raises ConfigError when a key is set in two places.
        """
        if problems := list(self._twice()):
            raise ConfigError(*problems)
        limits, length = self.limits, self.policy.max_total_sequence_length
        decay = _given({"weight_decay": self.policy.optimizer.kwargs.weight_decay})
        preset: dict[str, Any] = {
            "model": self.policy.model_name,
            "name": self.own,
            "algorithm": {"type": self.own, **limits.algorithm()},
            "backend": {"type": "trl", "learning_rate": self.policy.learning_rate, **decay},
            "train": {"seed": limits.seed, "groups_per_step": getattr(limits, limits.batch)},
        }
        if isinstance(limits, RolloutLimits):
            turns = _given({"max_turns": limits.max_rollout_turns})
            preset["sampling"] = {"max_tokens": length}
            preset["rollout"] = {"max_sequence_length": length, **turns}
        else:
            preset["algorithm"]["max_length"] = length
        for key in PASSED_ON:
            value = getattr(self, key)
            if key == "backend" and isinstance(value, str):
                value = {"type": value}
            if isinstance(value, Mapping) and isinstance(preset.get(key), Mapping):
                preset[key] = {**preset[key], **value}
            elif value is not None:
                preset[key] = value
        return preset

    def _twice(self) -> Iterator[str]:
        """Problems with keys of passed-on sections that are set by a key of the preset."""
        homes = {
            "train.groups_per_step": f"{self.own}.{self.limits.batch}",
            "train.seed": f"{self.own}.seed",
            "train.total_train_steps": f"{self.own}.max_num_steps",
            "algorithm.type": f"the trainer class (this one is {self.own})",
            "algorithm.group_size": f"{self.own}.num_generations_per_prompt",
            "backend.learning_rate": "policy.learning_rate",
        }
        if self.policy.optimizer.kwargs.weight_decay is not None:
            homes["backend.weight_decay"] = "policy.optimizer.kwargs.weight_decay"
        for path, home in homes.items():
            section, _, key = path.partition(".")
            given = getattr(self, section)
            if isinstance(given, Mapping) and key in given:
                yield f"{path}: set twice; remove it and use {home}"


PASSED_ON = tuple(name for name in PresetSettings.model_fields if name not in ("policy", "data"))
"""Sections and keys of a retrain YAML."""


class GRPOSettings(PresetSettings):
    own: ClassVar[str] = "grpo"
    grpo: GRPOSection = GRPOSection()


class RLOOSettings(PresetSettings):
    own: ClassVar[str] = "rloo"
    rloo: RolloutLimits = RolloutLimits()


class SFTSettings(PresetSettings):
    own: ClassVar[str] = "sft"
    policy: SFTPolicy
    sft: SFTSection = SFTSection()


class DPOSettings(PresetSettings):
    own: ClassVar[str] = "dpo"
    dpo: DPOSection = DPOSection()


def flat_keys(settings: type[PresetSettings]) -> dict[str, str]:
    """The keywords of `from_pretrained`, each with its dotted path in the nested config."""
    section = settings.model_fields[settings.own].annotation
    assert section is not None
    return {
        "max_sequence_length": "policy.max_total_sequence_length",
        "tensor_parallel_size": "policy.dtensor_cfg.tensor_parallel_size",
        "learning_rate": "policy.learning_rate",
        "max_steps": f"{settings.own}.max_num_steps",
        "max_epochs": f"{settings.own}.max_num_epochs",
        **{name: f"data.{name}" for name in ("split", "column_mapping")},
        **{name: f"{settings.own}.{name}" for name in section.model_fields},
        **{name: name for name in (*PASSED_ON, "data")},
    }


def _given(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}
