"""The nested config of the preset trainers: NeMo RL's sections, checked before anything loads.

    {"policy": {"model_name": ..., "learning_rate": ..., "dtensor_cfg": {...}},
     "grpo": {"num_prompts_per_step": ..., ...}, "data": {...}}

Sections of a retrain YAML (`backend`, `sampling`, `staleness`, ...) may stand beside them and win
over what a preset would write there. `run_mapping` makes the mapping of a RunConfig; a key that two
places set differently is an error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from retrain.config import Section
from retrain.errors import ConfigError

Rate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=1)]
Limit = Annotated[int, Field(ge=0)] | None


class TensorParallel(Section):
    """Here for the keys' sake: a run is one process, so only the size 1 can be honoured."""

    enabled: bool = False
    tensor_parallel_size: Count = 1


class OptimizerArguments(Section):
    lr: Rate | None = None
    weight_decay: Annotated[float, Field(ge=0)] | None = None


class Optimizer(Section):
    kwargs: OptimizerArguments = OptimizerArguments()


class Policy(Section):
    model_name: str
    """`tiny`, a local folder, or a Hugging Face id."""
    learning_rate: Rate = 1e-6
    max_total_sequence_length: Annotated[int, Field(ge=2)] = 512
    """Tokens of prompt and response together; a longer prompt is left out and counted."""
    dtensor_cfg: TensorParallel = TensorParallel()
    optimizer: Optimizer = Optimizer()


class SFTPolicy(Policy):
    learning_rate: Rate = 2e-5


class Data(Section):
    """How a data set is read."""

    split: str = "train"
    name: str | None = None
    """The configuration of a data set on the Hub."""
    column_mapping: dict[str, str] = Field(default_factory=dict)
    """From the data set's columns to ours: prompt, messages, answer, response, chosen, rejected."""
    system: str | None = None
    """Put before every prompt as a system message."""
    limit: Count | None = None
    """Take the first rows alone."""


class Limits(Section):
    """`max_num_steps` counts optimizer steps, `max_num_epochs` passes over the rows, both from the
    beginning of training; whichever is reached first ends it. Without either: one epoch."""

    max_num_steps: Limit = None
    max_num_epochs: Limit = None
    seed: int = 0


class Rollouts(Limits):
    num_prompts_per_step: Count = 32
    num_generations_per_prompt: Annotated[int, Field(ge=2)] = 16
    """Rollouts a prompt; one alone has nothing to be compared with."""
    max_rollout_turns: Count | None = None
    reward_weights: dict[str, float] | None = None
    """Weights of a dict that `reward_fn` returns; None: the plain sum."""
    on_reward_error: Literal["raise", "drop"] = "raise"
    """A reward that fails ends training with its error, or leaves its rollout out, counted."""


class GRPO(Rollouts):
    normalize_rewards: bool = True
    """Divide by the group's standard deviation."""
    use_leave_one_out_baseline: bool = True
    """Compare with the mean of the others rather than of all."""


class SFT(Limits):
    batch_size: Count = 32


class DPO(Limits):
    batch_size: Count = 32
    """Pairs a step."""
    beta: Rate = 0.1
    """Weight of the distance to the reference model."""
    pair_by: str | None = None
    """The score by which single responses are paired: of each prompt the best with the worst."""


PASSED_ON = (
    "algorithm",
    "backend",
    "chat",
    "checkpoint",
    "deadlines",
    "eval",
    "loggers",
    "name",
    "rollout",
    "run_dir",
    "sampling",
    "staleness",
    "train",
)
"""Sections and keys of a retrain YAML."""


class Settings(Section):
    """What all presets have; a subclass adds the section that is called like its algorithm."""

    own: ClassVar[str] = ""
    """The algorithm's section."""
    policy: Policy
    data: Data = Data()
    # Passed on as they are: RunConfig and the plug-ins check them.
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
    def limits(self) -> Limits:
        section: Limits = getattr(self, self.own)
        return section

    def run_mapping(self) -> dict[str, Any]:
        """The mapping of a RunConfig, but for prompts, environment and rewards.

        Raises ConfigError when two keys say different things, or something can't be honoured.
        """
        problems = [*self._parallel(), *self._taken()]
        rate = self._learning_rate(problems)
        if problems:
            raise ConfigError(*problems)
        backend = {"type": self.backend} if isinstance(self.backend, str) else self.backend
        optimizer = self.policy.optimizer.kwargs.model_dump(include={"weight_decay"})
        preset: dict[str, Any] = {
            "model": self.policy.model_name,
            "name": self.own,
            "algorithm": {"type": self.own, **self._algorithm()},
            "backend": {"type": "trl", **_given(optimizer)},
            "train": {"seed": self.limits.seed, "groups_per_step": self._batch()},
            **self._playing(),
        }
        for key in PASSED_ON:
            value = backend if key == "backend" else getattr(self, key)
            if value is None:
                continue
            both = isinstance(value, Mapping) and isinstance(preset.get(key), Mapping)
            preset[key] = {**preset[key], **value} if both else value
        preset["backend"]["learning_rate"] = rate
        return preset

    def _algorithm(self) -> dict[str, Any]:
        return {}

    def _playing(self) -> dict[str, Any]:
        """Sections that only rollouts need."""
        return {}

    def _batch(self) -> int:
        raise NotImplementedError

    def _parallel(self) -> list[str]:
        size = self.policy.dtensor_cfg.tensor_parallel_size
        if size == 1:
            return []
        problem = (
            f"policy.dtensor_cfg.tensor_parallel_size: got {size}, but no backend can split a "
            "model's layers: trl trains in one process on one device, and a service places the "
            "model by itself; leave it at 1"
        )
        return [problem]

    def _taken(self) -> list[str]:
        """Keys of passed-on sections that have a place in the preset's own."""
        places = {
            "train.groups_per_step": next(
                f"{self.own}.{key}"
                for key in ("num_prompts_per_step", "batch_size")
                if key in type(self.limits).model_fields
            ),
            "train.seed": f"{self.own}.seed",
            "train.total_train_steps": f"{self.own}.max_num_steps",
            "algorithm.type": f"the trainer class (this one is {self.own})",
            "algorithm.group_size": f"{self.own}.num_generations_per_prompt",
        }
        return [
            f"{path}: set twice; that is {home} here"
            for path, home in places.items()
            if path.partition(".")[2] in _mapping(getattr(self, path.partition(".")[0]))
        ]

    def _learning_rate(self, problems: list[str]) -> float:
        """The one that was set, wherever; the preset's default when none was."""
        rates = {
            "policy.optimizer.kwargs.lr": self.policy.optimizer.kwargs.lr,
            "backend.learning_rate": _mapping(self.backend).get("learning_rate"),
        }
        if "learning_rate" in self.policy.model_fields_set:
            rates["policy.learning_rate"] = self.policy.learning_rate
        rates = _given(rates)
        if len(set(rates.values())) > 1:
            listed = ", ".join(f"{path} {rate}" for path, rate in rates.items())
            problems.append(f"the learning rate is set to different values: {listed}; keep one")
        return next(iter(rates.values()), self.policy.learning_rate)


class RolloutSettings(Settings):
    """Of an algorithm that plays rollouts."""

    def _playing(self) -> dict[str, Any]:
        assert isinstance(self.limits, Rollouts)
        length = self.policy.max_total_sequence_length
        turns = _given({"max_turns": self.limits.max_rollout_turns})
        return {
            "sampling": {"max_tokens": length},
            "rollout": {"max_sequence_length": length, **turns},
        }

    def _batch(self) -> int:
        assert isinstance(self.limits, Rollouts)
        return self.limits.num_prompts_per_step


class GRPOSettings(RolloutSettings):
    own: ClassVar[str] = "grpo"
    grpo: GRPO = GRPO()

    def _algorithm(self) -> dict[str, Any]:
        return {
            "group_size": self.grpo.num_generations_per_prompt,
            "baseline": "leave_one_out" if self.grpo.use_leave_one_out_baseline else "mean",
            "scale": "group" if self.grpo.normalize_rewards else "none",
        }


class RLOOSettings(RolloutSettings):
    own: ClassVar[str] = "rloo"
    rloo: Rollouts = Rollouts()

    def _algorithm(self) -> dict[str, Any]:
        return {"group_size": self.rloo.num_generations_per_prompt}


class SFTSettings(Settings):
    own: ClassVar[str] = "sft"
    policy: SFTPolicy
    sft: SFT = SFT()

    def _algorithm(self) -> dict[str, Any]:
        return {"max_length": self.policy.max_total_sequence_length}

    def _batch(self) -> int:
        return self.sft.batch_size


class DPOSettings(Settings):
    own: ClassVar[str] = "dpo"
    dpo: DPO = DPO()

    def _algorithm(self) -> dict[str, Any]:
        keys = {"beta": self.dpo.beta, "max_length": self.policy.max_total_sequence_length}
        return {**keys, **_given({"pair_by": self.dpo.pair_by})}

    def _batch(self) -> int:
        return self.dpo.batch_size


def flat_keys(settings: type[Settings]) -> dict[str, str]:
    """The keywords of `from_pretrained`, each with its dotted path in the nested config."""
    section = settings.model_fields[settings.own].annotation
    assert section is not None
    return {
        "max_sequence_length": "policy.max_total_sequence_length",
        "tensor_parallel_size": "policy.dtensor_cfg.tensor_parallel_size",
        "learning_rate": "policy.learning_rate",
        "max_steps": f"{settings.own}.max_num_steps",
        "max_epochs": f"{settings.own}.max_num_epochs",
        **{name: f"data.{name}" for name in ("split", "column_mapping", "system", "limit")},
        **{name: f"{settings.own}.{name}" for name in section.model_fields},
        **{name: name for name in (*PASSED_ON, "data")},
    }


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _given(keys: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in keys.items() if value is not None}
