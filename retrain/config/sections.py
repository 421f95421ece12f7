"""What a run is: the YAML's models. Every default is a vetted run; an unknown key is an error.

A plug-in's own keys are checked when it is bound (`binding.bind`): its constructor is their schema.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

Listed = Field(strict=False)
"""A YAML list is read into a tuple, its items as strictly as the rest."""


class Section(BaseModel):
    """Frozen, and closed: extra keys are forbidden, and a text or `true` is no number."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Plugin(BaseModel):
    """`type` names a class or function; the other keys are its constructor's arguments."""

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)
    type: str

    @property
    def arguments(self) -> dict[str, Any]:
        """The keys beside the declared ones."""
        return dict(self.model_extra or {})


class RewardConfig(Plugin):
    weight: float = 1.0
    name: str | None = None
    """The component's name in metrics and rollouts; by default the type's last part."""


class AlgorithmConfig(Plugin):
    type: str = "grpo"
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts a prompt."""
    loss: str | None = None
    """What the adapter executes; by default the algorithm's own."""
    loss_config: dict[str, Any] = {}
    """The loss's keys: epsilon, epsilon_high, delta, beta, ..."""
    normalisation: Literal["token", "sequence", "batch"] | None = None
    """What a shared loss is averaged over; TRL's own loss names carry theirs."""
    kl_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Charged to each sampled token: kl_penalty x log(p / reference), the reference being the
    weights that the run started from. It means the same on every backend."""


class SamplingConfig(Section):
    max_tokens: Annotated[int, Field(ge=1)] = 256
    """Tokens a turn."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Field(ge=0)] = 0
    stop: Annotated[tuple[str, ...], Listed] = ()


class ChatConfig(Section):
    template: str = "auto"
    """`auto`: the tokenizer's own; `none`: texts are joined as they are; else a Jinja file."""
    arguments: dict[str, Any] = {}
    """Variables for the template, such as enable_thinking."""


class RolloutConfig(Section):
    max_turns: Annotated[int, Field(ge=1)] = 16
    max_sequence_length: Annotated[int, Field(ge=2)] | None = None
    """Tokens of prompt and replies together; by default as many as the model's context."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """Groups in flight at once; by default as many as staleness admits."""
    setup_concurrency: Annotated[int, Field(ge=1)] = 64
    """Environments that may be in `setup` at once."""
    reward_concurrency: Annotated[int, Field(ge=1)] = 64
    """Groups that one reward may be scoring at once."""


class StalenessConfig(Section):
    target: Annotated[int, Field(ge=0)] = 1
    """Work starts while untrained groups < (target + 1) x groups_per_step; 0 is synchronous."""
    max: Annotated[int, Field(ge=0)] | None = None
    """A group with a token more versions behind than this is never trained; default 2 x target."""

    @property
    def bound(self) -> int:
        return 2 * self.target if self.max is None else self.max

    @model_validator(mode="after")
    def _ordered(self) -> StalenessConfig:
        if self.max is not None and self.max < self.target:
            raise ValueError(f"max ({self.max}) must be at least target ({self.target})")
        return self


class TrainConfig(Section):
    total_train_steps: Annotated[int, Field(ge=0)] = 100
    """Optimizer steps, counted from the run's start, resumes included."""
    groups_per_step: Annotated[int, Field(ge=1)] = 8
    seed: int = 0
    shuffle: bool = True
    order: Literal["ready", "in_order"] = "ready"
    """`ready` trains groups as they finish; `in_order` as they were issued: reproducible, at the
    price that `trl` decodes each request apart."""
    no_signal: Literal["keep", "refill"] = "keep"
    """Groups whose rewards are all equal: train them with advantage 0, or replace them."""
    max_refill: Annotated[int, Field(ge=0)] = 3
    """Batches' worth of groups that one step may replace."""
    stop_after_flat_steps: Annotated[int, Field(ge=1)] = 25
    """Steps in a row without any signal end the run: solved at the top reward, else an error."""
    max_failed_groups: Annotated[int, Field(ge=1)] = 16
    """Groups in a row without one good rollout end the run with the first cause."""


class CheckpointConfig(Section):
    every: Annotated[int, Field(ge=0)] = 50
    """Steps between checkpoints; 0 writes none but the last."""
    keep: Annotated[int, Field(ge=1)] = 3
    merge_lora: bool = False
    """`final/` holds the merged model rather than the LoRA weights."""


class EvalConfig(Section):
    prompts: Plugin
    every: Annotated[int, Field(ge=1)] = 50
    samples: Annotated[int, Field(ge=1)] = 4
    """Rollouts a prompt: k of pass@k."""
    pass_threshold: float = 1.0
    """A rollout passes at this reward or more."""


class DeadlinesConfig(Section):
    """Seconds that an await may take. User code past its deadline is the outcome `timeout`."""

    setup: Annotated[float, Field(gt=0)] = 300.0
    reset: Annotated[float, Field(gt=0)] = 120.0
    step: Annotated[float, Field(gt=0)] = 300.0
    reward: Annotated[float, Field(gt=0)] = 120.0
    close: Annotated[float, Field(gt=0)] = 30.0
    sample: Annotated[float, Field(gt=0)] = 1800.0
    update: Annotated[float, Field(gt=0)] = 3600.0
    publish: Annotated[float, Field(gt=0)] = 1800.0
    checkpoint: Annotated[float, Field(gt=0)] = 1800.0
    blocked: Annotated[float, Field(gt=0)] = 120.0
    """User code that blocks the event loop for this long ends the process."""
    stall: Annotated[float, Field(gt=0)] = 3600.0
    """No progress for this long ends the run and names what it waits for."""


class RunConfig(Section):
    name: str | None = None
    """The run directory's name under `runs/`; by default the config file's."""
    model: str = "tiny"
    """`tiny`, a local folder, or a Hugging Face id."""
    prompts: Plugin
    environment: Plugin = Plugin(type="single_turn")
    rewards: Annotated[tuple[RewardConfig, ...], Listed] = ()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    backend: Plugin = Plugin(type="trl")
    sampling: SamplingConfig = SamplingConfig()
    chat: ChatConfig = ChatConfig()
    rollout: RolloutConfig = RolloutConfig()
    staleness: StalenessConfig = StalenessConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig | None = None
    checkpoint: CheckpointConfig = CheckpointConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    loggers: Annotated[tuple[Plugin, ...], Listed] = ()
    """Further sinks of the metrics: tensorboard, wandb, or your own."""
    run_dir: Annotated[Path, Field(strict=False)] | None = None
    """Overrides runs/NAME."""
    base_dir: Path = Field(default=Path(), exclude=True)
    """The config file's folder: relative paths are looked up there, then in the working folder."""
