"""The keys of a run's YAML. Every default is tested; an unknown key is an error.

A plug-in's own keys are checked when it is bound (`binding.bind`): its constructor is their schema.
The strings below the fields are the keys' documentation, in docs/configuration.md and the schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    Tag,
    WrapValidator,
    field_validator,
    model_validator,
)

from retrain.losses import Normalisation
from retrain.supervision.jsonable import Named

Listed = Field(strict=False)
"""A YAML list is read into a tuple; its items are checked as strictly as other values."""


Name = Annotated[
    str, WrapValidator(lambda value, check: value if isinstance(value, Named) else check(value))
]
"""A string; from Python also a class or function, which is kept with its name."""


class Section(BaseModel):
    """Frozen, without further keys, and strict: a string or `true` is not a number."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, strict=True, use_attribute_docstrings=True
    )


class Plugin(BaseModel):
    """`type` names a class or function; the other keys are its arguments."""

    model_config = ConfigDict(
        extra="allow", frozen=True, strict=True, use_attribute_docstrings=True
    )
    type: Name
    """A built-in name, `module:Class` or `path/file.py:Class`."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The keys in addition to the declared ones."""
        return dict(self.model_extra or {})


class PromptsConfig(Plugin):
    """Where the rows come from, and what is made of them: first the rows are chosen by `filter`,
    then changed by `map`, then counted by `limit`, then split by `held_out`."""

    prompt_column: str | None = None
    """The column of the prompt, if it is not `prompt` or `messages`."""
    answer_column: str | None = None
    """The column of the answer, if it is not `answer`."""
    system: str | None = None
    """A system message that is added before every prompt."""
    filter: Name | dict[str, Any] | None = None
    """The rows to use: a condition on columns, such as {level: 3}, {level: [3, 4]},
    {level: {min: 3}} or {level: {not: 5}}, or a function of the row, as path/file.py:name."""
    map: Name | dict[str, Any] | None = None
    """New columns: {answer: {after: "####"}}, the name of a column, a template such as
    "Question: {question}"; or a function that returns the new row, as path/file.py:name."""
    limit: Annotated[int, Field(ge=1)] | None = None
    """Use only the first rows, up to this number."""
    held_out: Annotated[float, Field(gt=0, lt=1)] | None = None
    """Hold out this fraction of the rows for evaluation with `eval: {prompts: held_out}`."""

    @model_validator(mode="before")
    @classmethod
    def _of_plugin(cls, value: Any) -> Any:  # of any type: not validated yet
        given = type(value) is Plugin
        return {"type": value.type, **value.arguments} if given else value


class ScheduleConfig(Section):
    """A weight that changes over the run: `start` until the step `begin`, and `end` from `steps`
    steps later. A rollout's step is the version of the weights that sampled it, which is the number
    of optimizer steps before it. If several versions sampled a group, the oldest one counts."""

    start: Annotated[float, Field(allow_inf_nan=False)]
    """The weight at the beginning."""
    end: Annotated[float, Field(allow_inf_nan=False)]
    """The weight at the end."""
    steps: Annotated[int, Field(ge=1)]
    """The number of steps from `start` to `end`."""
    begin: Annotated[int, Field(ge=0)] = 0
    """The step at which the change begins."""
    shape: Literal["linear", "cosine", "step"] = "linear"
    """The shape of the change. `step` keeps `start` until the last step, then jumps to `end`."""


class GateConfig(Section):
    """The rollouts for which a reward counts."""

    name: str
    """The name of the reward that decides. Its raw value is used, before clip and weight."""
    at_least: Annotated[float, Field(allow_inf_nan=False)] | None = None
    """The lowest value that opens the gate; by default any value above 0."""


def _kind_of_weight(value: Any) -> str:
    return "schedule" if isinstance(value, Mapping | ScheduleConfig) else "number"


Weight = Annotated[
    Annotated[float, Field(allow_inf_nan=False), Tag("number")]
    | Annotated[ScheduleConfig, Tag("schedule")],
    Discriminator(_kind_of_weight),
]


class RewardConfig(Plugin):
    """What scores a rollout; the reward is the weighted sum of all entries."""

    type: Name
    """A built-in name, `module:Class` or `path/file.py:Class`. `environment` is the reward of the
    environment's steps; `sum`, `product` and `min` combine the rewards in `of`."""
    weight: Weight = 1.0
    """The factor of this reward, or a schedule for it."""
    name: str | None = None
    """The name in metrics and rollouts; by default the last part of the type."""
    processes: Annotated[int, Field(ge=1)] | None = None
    """Run the reward in this many worker processes; by default it runs in a thread, or on the event
    loop if it is async."""
    clip: Annotated[tuple[float, float], Listed] | None = None
    """Clip its value to [low, high] before the weight is applied."""
    only_if: GateConfig | None = None
    """Call the reward only for rollouts for which another reward is above 0, or is `at_least` a
    value, and skip it for others. A string is the name of that other reward."""
    of: Annotated[tuple[RewardConfig, ...], Listed] = ()
    """The rewards that `sum`, `product` or `min` combines, each with its weight."""

    @field_validator("only_if", mode="before")
    @classmethod
    def _short_gate(cls, value: Any) -> Any:  # of any type: not validated yet
        return {"name": value} if isinstance(value, str) else value

    @field_validator("clip")
    @classmethod
    def _ordered(cls, value: tuple[float, float] | None) -> tuple[float, float] | None:
        if value is not None and not value[0] < value[1]:
            raise ValueError("expected [low, high], with low below high")
        return value


class MismatchConfig(Section):
    """Weight the tokens of the loss by w, the trainer's probability divided by the sampler's. The
    two differ because of staleness and of different arithmetic. The ratio in the loss then compares
    with the trainer's probabilities before the update, as in decoupled PPO."""

    type: Literal["tis", "mask"] = "tis"
    """`tis` (truncated importance sampling): w is clipped to [low, high]. `mask` (IcePop): a w
    outside [low, high] becomes 0."""
    level: Literal["token", "sequence"] = "token"
    """`token`: each token has its own w. `sequence`: w is the geometric mean over the sampled
    tokens of a rollout (as in GSPO)."""
    low: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None
    """The lowest w; by default 0 for tis, and 0.5 for mask."""
    high: Annotated[float, Field(gt=0)] | None = None
    """The highest w, or `.inf` for no limit; by default 2 for tis, and 5 for mask."""

    @property
    def bounds(self) -> tuple[float, float]:
        """The lowest and the highest w. The defaults are those of the two papers."""
        low, high = {"tis": (0.0, 2.0), "mask": (0.5, 5.0)}[self.type]
        return (low if self.low is None else self.low, high if self.high is None else self.high)

    @model_validator(mode="after")
    def _ordered(self) -> MismatchConfig:
        low, high = self.bounds
        if low > high:
            raise ValueError(f"low is {low:g}, expected at most high ({high:g})")
        return self


class AlgorithmConfig(Plugin):
    """How rewards become advantages, and which loss trains them."""

    type: Name = "grpo"
    """A built-in name, `module:Class` or `path/file.py:Class`."""
    group_size: Annotated[int, Field(ge=1)] = 8
    """Rollouts per prompt."""
    loss: Name | None = None
    """The loss that the backend computes; by default the algorithm's own."""
    loss_config: dict[str, Any] = {}
    """The keys of the loss: epsilon, epsilon_high, delta, beta, ... `force: true` allows a loss
    that does not clip its ratio (`importance_sampling`) with `staleness.target` above 1."""
    normalisation: Normalisation | None = None
    """How the loss is averaged. `token`: mean over tokens. `sequence`: mean over rollouts of the
    per-rollout token mean. `batch`: mean over rollouts of the per-rollout token sum. The default is
    token, or batch for the loss reinforce. The average of TRL's own losses is fixed."""
    kl_penalty: Annotated[float, Field(ge=0)] = 0.0
    """Subtract kl_penalty x log(p / reference) from the advantage of each sampled token. The
    reference is the model that the run started from. It works in the same way on every
    backend."""
    mismatch: MismatchConfig | None = None
    """Correct for the difference between the sampler and the trainer; off by default. A string is
    the `type`."""

    @field_validator("mismatch", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:  # of any type: not validated yet
        return {"type": value} if isinstance(value, str) else value


class SamplingConfig(Section):
    """How the model generates a turn."""

    max_tokens: Annotated[int, Field(ge=1)] = 256
    """The maximum number of tokens per turn."""
    temperature: Annotated[float, Field(ge=0)] = 1.0
    """The sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Sample only from the most likely tokens with this total probability."""
    top_k: Annotated[int, Field(ge=0)] = 0
    """Sample only from this many most likely tokens; 0: from all."""
    stop: Annotated[tuple[str, ...], Listed] = ()
    """Strings that end a turn."""


class ToolsConfig(Section):
    """How the model sees tools and calls them."""

    format: str = "auto"
    """The format of tool calls, such as `hermes`; `auto` infers it from the template."""
    show: Literal["template", "system"] = "template"
    """What shows the tools to the model: the chat template, or for templates without tools a system
    message in the format `hermes`."""


def _kind_of_tools(value: Any) -> str:
    return "mapping" if isinstance(value, Mapping | ToolsConfig) else "name"


class ChatConfig(Section):
    """How messages become tokens."""

    template: str = "auto"
    """`auto`: the tokenizer's own template; `none`: concatenated contents; any other value: a Jinja
    file."""
    arguments: dict[str, Any] = {}
    """Variables of the template, such as enable_thinking."""
    tools: Annotated[
        Annotated[str, Tag("name")] | Annotated[ToolsConfig, Tag("mapping")],
        Discriminator(_kind_of_tools),
    ] = "auto"
    """The format of tool calls, such as `hermes`; `auto` infers it from the template. A mapping
    {format, show} also says what shows the tools to the model."""


class RolloutConfig(Section):
    """Limits of a rollout, and how many run at the same time."""

    max_turns: Annotated[int, Field(ge=1)] = 16
    """The maximum number of turns; a longer rollout is truncated."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of sampled tokens of an agent's rollout. Once it is reached, further calls
    are rejected."""
    max_sequence_length: Annotated[int, Field(ge=2)] | None = None
    """The maximum number of tokens of a rollout, prompt included; by default the model's context
    length."""
    slots: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of groups in flight; by default as many as `staleness` allows."""
    setup_concurrency: Annotated[int, Field(ge=1)] = 64
    """The maximum number of environments that run `setup` at the same time."""
    reward_concurrency: Annotated[int, Field(ge=1)] = 64
    """The maximum number of groups that one reward scores at the same time."""


class EndpointConfig(Section):
    """Where an agent calls the model: an HTTP server of the run, with a URL and a key for each
    rollout. It is only started for environments that run an agent."""

    host: str = "127.0.0.1"
    """The address to listen on. With any address other than a loopback address, other machines can
    call the endpoint."""
    port: Annotated[int, Field(ge=0, le=65535)] = 0
    """The port; 0 chooses a free one."""
    public_url: str | None = None
    """The URL under which agents in containers or on other machines reach it, such as
    http://trainer.internal:8600; by default http://HOST:PORT."""
    honour: Annotated[
        tuple[Literal["max_tokens", "temperature", "top_p", "top_k", "stop", "seed"], ...], Listed
    ] = ()
    """Sampling arguments for which the agent's value is used instead of that in `sampling`."""
    reward: bool = False
    """Whether an agent can add to its reward with `POST /reward`. Any program that it runs for the
    model can then do so too: the key is in its environment."""

    @field_validator("public_url")
    @classmethod
    def _is_url(cls, url: str | None) -> str | None:
        if url is not None and not re.match(r"https?://[^/\s]+", url):
            raise ValueError("expected a URL that begins with http:// or https://")
        return url


class StalenessConfig(Section):
    """How far sampling may run ahead of training."""

    target: Annotated[int, Field(ge=0)] = 1
    """How many steps sampling may run ahead of training; 0 is synchronous."""
    max: Annotated[int, Field(ge=0)] | None = None
    """A group with a token that is more than this many versions old is dropped, and its prompt is
    issued again; by default 3 x target."""

    @property
    def bound(self) -> int:
        return 3 * self.target if self.max is None else self.max

    @model_validator(mode="after")
    def _ordered(self) -> StalenessConfig:
        if self.max is not None and self.max < self.target:
            raise ValueError(f"max is {self.max}, expected at least target ({self.target})")
        return self


class TrainConfig(Section):
    """The length of the run, and which groups make a step."""

    total_train_steps: Annotated[int, Field(ge=0)] = 100
    """The number of optimizer steps, counted from the start of the run across resumes."""
    groups_per_step: Annotated[int, Field(ge=1)] = 8
    """The number of groups, or rows of examples, per optimizer step."""
    seed: int = 0
    """The seed for the order of prompts, for sampling and for training."""
    shuffle: bool = True
    """Shuffle the prompts in every epoch."""
    order: Literal["ready", "in_order"] = "ready"
    """`ready` trains groups as they finish. `in_order` trains them in the order of their prompts,
    which is reproducible, but `trl` then decodes each request separately."""
    no_signal: Literal["keep", "refill"] = "keep"
    """Groups with equal rewards: `keep` trains them with advantage 0, `refill` replaces them."""
    max_refill: Annotated[int, Field(ge=0)] = 3
    """How much `refill` may replace per step, as a number of batches."""
    stop_after_flat_steps: Annotated[int, Field(ge=1)] = 25
    """End the run after this many consecutive steps without any signal: as solved if every reward
    equals the highest one of the run, otherwise with an error."""
    check_publish: Literal["auto"] | bool = "auto"
    """Check after a publish that the sampler serves the trainer's weights: the trainer scores a few
    sampled tokens (`logprob/error_own_version` in the metrics). `auto`: in at most 2 % of the time,
    and not on a vendor's own service, which bills the requests; true: after every publish."""
    max_failed_groups: Annotated[int, Field(ge=1)] = 16
    """End the run with the first error after this many consecutive groups in which every rollout
    failed."""


class CheckpointConfig(Section):
    """What a run saves."""

    every: Annotated[int, Field(ge=0)] = 50
    """The number of steps between checkpoints; 0: write only the last one."""
    keep: Annotated[int, Field(ge=1)] = 3
    """How many of the newest checkpoints to keep."""
    merge_lora: bool = False
    """With LoRA, write the merged model to `final/` instead of the LoRA weights."""


class RecordsConfig(Section):
    """What rollouts.jsonl contains besides messages, rewards and versions."""

    tokens: bool = False
    """Also write the token ids, log-probs, weight versions and loss masks of every rollout, as
    `sequences`: the exact sequences that are trained."""


class EvalConfig(Section):
    """Rollouts on held-out prompts, which are reported but not used for training: before training,
    every so many steps, and at the end. Each evaluation is of one version of the weights."""

    prompts: PromptsConfig
    """The prompts to evaluate on, as in `prompts`, or `held_out` for the rows that
    `prompts.held_out` holds out."""
    every: Annotated[int, Field(ge=1)] = 50
    """The number of steps between evaluations."""
    samples: Annotated[int, Field(ge=1)] = 4
    """The number of rollouts per prompt: the k of pass@k."""
    pass_threshold: float = 1.0
    """The lowest reward with which a rollout counts as passed."""
    opponents: dict[str, Plugin] | None = None
    """The opponents to use in evaluations; by default the same as in training."""


class DeadlinesConfig(Section):
    """Time limits in seconds. If an environment or a reward exceeds one, its rollout gets the
    outcome `timeout`."""

    setup: Annotated[float, Field(gt=0)] = 300.0
    """One call of `setup`, of an environment or a reward."""
    reset: Annotated[float, Field(gt=0)] = 120.0
    """One call of the environment's `reset`."""
    step: Annotated[float, Field(gt=0)] = 300.0
    """One call of the environment's `step`."""
    agent: Annotated[float, Field(gt=0)] = 600.0
    """One rollout of an agent: a call of the environment's `run`."""
    reward: Annotated[float, Field(gt=0)] = 120.0
    """One call of a reward."""
    close: Annotated[float, Field(gt=0)] = 30.0
    """One call of `close`, of an environment or a reward."""
    sample: Annotated[float, Field(gt=0)] = 3600.0
    """One request to the sampler, including its time in the queue of a server."""
    update: Annotated[float, Field(gt=0)] = 3600.0
    """One optimizer step."""
    publish: Annotated[float, Field(gt=0)] = 1800.0
    """One transfer of new weights to the sampler."""
    checkpoint: Annotated[float, Field(gt=0)] = 1800.0
    """One save or load of a checkpoint."""
    outage: Annotated[float, Field(ge=0)] = 600.0
    """How long to wait for a reward or an environment that worked before and can no longer be
    reached: lost connections, timeouts, and the HTTP status 429 or 5xx. 0: don't wait, and treat it
    like any other error."""
    blocked: Annotated[float, Field(gt=0)] = 120.0
    """End the process if user code blocks the event loop, or all of Python, for this long."""
    stall: Annotated[float, Field(gt=0)] = 3600.0
    """End the run if nothing progresses for this long, and report what it is waiting for."""


class RunConfig(Section):
    """A run. A section without a description has that of its class."""

    name: str | None = None
    """The name of the run directory in `runs/`; by default that of the config file."""
    model: str = "tiny"
    """`tiny`, a local model folder, or a Hugging Face id."""
    prompts: PromptsConfig = PromptsConfig(type="environment")
    """The prompts or examples to train on: a source, the path of a file, or a list of rows. Not
    needed if the environment generates its own tasks."""
    environment: Plugin = Plugin(type="single_turn")
    """What answers the model until the episode ends."""
    opponents: dict[str, Plugin] = {}
    """Seats of the environment that are not trained, and what replies for each of them: a function
    as path/file.py:name, or a server with OpenAI's API (`type: openai` with url, model,
    api_key_env, max_tokens, temperature)."""
    rewards: Annotated[tuple[RewardConfig, ...], Listed] = ()
    """What scores a rollout, in addition to the environment's own reward."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    backend: Plugin = Plugin(type="trl")
    """What trains and serves the model: this machine (`trl`) or a service."""
    sampling: SamplingConfig = SamplingConfig()
    chat: ChatConfig = ChatConfig()
    rollout: RolloutConfig = RolloutConfig()
    endpoint: EndpointConfig = EndpointConfig()
    staleness: StalenessConfig = StalenessConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig | None = None
    """Evaluation on held-out prompts; by default none."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    records: RecordsConfig = RecordsConfig()
    deadlines: DeadlinesConfig = DeadlinesConfig()
    loggers: Annotated[tuple[Plugin, ...], Listed] = ()
    """Where to send the metrics in addition to the run directory, such as tensorboard or wandb."""
    run_dir: Annotated[Path, Field(strict=False)] | None = None
    """The run directory; by default runs/NAME."""
    base_dir: Path = Field(default=Path(), exclude=True)
    """The config file's folder: relative paths start there, or else in the working folder."""
