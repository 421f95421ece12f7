"""GRPOTrainer, RLOOTrainer, SFTTrainer and DPOTrainer: their arguments become a run.

They train with the pipe, so every key of a retrain YAML works here too
(`backend={"type": "tinker"}`, `staleness={"target": 2}`, ...).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, ClassVar, Self

from pydantic import ValidationError

from retrain.assembly import Given
from retrain.config import RunConfig, parse_config, plain
from retrain.config.paths import find_model
from retrain.config.problems import problems_of
from retrain.environment import Environment
from retrain.errors import ConfigError, nearest, shown
from retrain.observe.callbacks import Callback, TrainingResult
from retrain.supervision.threads import DaemonPool
from retrain.trainer.base import BaseTrainer, Plan, Task, blocking, one_reward
from retrain.trainer.columns import Wanted
from retrain.trainer.data import Data, read_data
from retrain.trainer.environments import environment_factory
from retrain.trainer.nemo.environments import HOOK, MessageLogEnvironment, Review, takes_batch
from retrain.trainer.nemo.scoring import NAME, RewardReader, as_calculator
from retrain.trainer.nemo.settings import (
    DPOSettings,
    GRPOSettings,
    PresetSettings,
    RLOOSettings,
    RolloutLimits,
    SFTSettings,
    flat_keys,
)

USER_THREADS = 64
_LATER = {"type": "given", "source": "the dataset of fit()"}
Scoring = tuple[dict[str, Any], dict[str, Any]]
"""Parts of the run, and sections of its config."""


class PresetTrainer(BaseTrainer):
    """A trainer made from NeMo RL's nested config, or with `from_pretrained`.

    Loads nothing. Raises ConfigError with every problem of the config, NotFoundError for a missing
    model folder.
    """

    settings_type: ClassVar[type[PresetSettings]]
    wanted: ClassVar[Wanted] = "rollouts"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if not isinstance(config, Mapping):
            raise TypeError(
                f"{type(self).__name__}: got {type(config).__name__}, expected the nested config; "
                f"with a model's name, use {type(self).__name__}.from_pretrained(name)"
            )
        kind = self.settings_type
        try:
            self._settings = kind.model_validate(plain(config))
        except ValidationError as error:
            raise ConfigError(*problems_of(error, kind)) from None
        run = self._run_config()
        find_model(run.model, run.base_dir)

    @property
    def config(self) -> dict[str, Any]:
        """The nested config with every default. Another trainer can be made from it."""
        return self._settings.model_dump(mode="json", exclude_none=True)

    @classmethod
    def _from_keys(cls, model: str | Path, keys: Mapping[str, Any]) -> Self:
        """Make a trainer from flat keywords. Raises TypeError for an unknown one."""
        paths = flat_keys(cls.settings_type)
        name = str(model) if isinstance(model, Path) else model
        nested: dict[str, Any] = {"policy": {"model_name": name}}
        for key, value in keys.items():
            if key not in paths:
                hint = nearest(key, paths) or f"; known: {', '.join(sorted(paths))}"
                raise TypeError(f"{cls.__name__}.from_pretrained: unknown keyword {key!r}{hint}")
            if value is None:
                continue
            *sections, last = paths[key].split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = {**place.get(last, {}), **value} if key == "data" else value
        return cls(nested)

    def _run_config(self) -> RunConfig:
        held_out = plain(self._settings.eval)
        if isinstance(held_out, dict):  # its prompts may come with a DataModule
            return self._with(_LATER, {"eval": {"prompts": _LATER, **held_out}})
        return self._with(_LATER, {})

    def _with(self, prompts: Mapping[str, Any], further: Mapping[str, Any]) -> RunConfig:
        return parse_config({**self._settings.run_mapping(), "prompts": prompts, **further})

    def _plan(self, task: Task) -> Plan:
        with ExitStack() as closing:
            data = read_data(task.dataset, self.wanted, self._settings.data)
            closing.callback(data.close)
            pool = DaemonPool(USER_THREADS)
            closing.callback(pool.close)
            given, sections = self._scoring(task, data, pool)
            given["prompts"] = data.prompts
            if data.eval_prompts is not None:
                given["eval_prompts"] = data.eval_prompts
                label = {"type": "given", "rows": len(data.eval_prompts)}
                sections["eval"] = {**(plain(self._settings.eval) or {}), "prompts": label}
            limits = self._settings.limits
            steps, epochs = task.max_steps, task.max_epochs
            steps = limits.max_num_steps if steps is None else steps
            epochs = limits.max_num_epochs if epochs is None else epochs
            if steps is None and epochs is None:
                epochs = 1
            config = self._with(data.label, sections)
            return Plan(config, Given(**given), steps, epochs, close=closing.pop_all().close)

    def _scoring(self, task: Task, data: Data, pool: DaemonPool) -> Scoring:
        return {}, {}


class RewardTrainer(PresetTrainer):
    """Learns from the rewards of a function or of an environment."""

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | Path,
        num_prompts_per_step: int = 32,
        num_generations_per_prompt: int = 16,
        learning_rate: float = 1e-6,
        max_sequence_length: int = 512,
        tensor_parallel_size: int = 1,
        **kwargs: Any,
    ) -> Self:
        """A trainer of this model. Nothing loads until `fit`.

        Further keywords are keys of the config (`normalize_rewards`, `seed`, `max_steps`,
        `column_mapping`, ...) and sections of a retrain YAML (`backend`, `sampling`, ...).
        """
        keys = {
            "num_prompts_per_step": num_prompts_per_step,
            "num_generations_per_prompt": num_generations_per_prompt,
            "learning_rate": learning_rate,
            "max_sequence_length": max_sequence_length,
            "tensor_parallel_size": tensor_parallel_size,
        }
        return cls._from_keys(model_name_or_path, {**keys, **kwargs})

    async def train(
        self,
        dataset: Any,
        reward_fn: Callable[..., Any] | None = None,
        environment: Any = None,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> TrainingResult:
        """Train on `dataset`, scored by `reward_fn(prompt, response[, row])` or `environment`.

        A RewardCalculator, such as an `@reward` function, is called by name. `max_steps` and
        `max_epochs` count from the beginning of training, with an earlier `fit` or a loaded
        checkpoint included. The first one that is reached ends it (without either: one epoch).

        Raises ConfigError, TypeError or ValueError before any model loads, RewardError when
        `reward_fn` fails. `fit` is the same for code without an event loop.
        """
        return await self._train(
            Task(dataset, reward_fn, environment, max_steps, max_epochs, callbacks)
        )

    fit = blocking(train)

    def _plan(self, task: Task) -> Plan:
        if (task.reward_fn is None) == (task.environment is None):
            got = "both" if task.reward_fn is not None else "neither"
            raise ValueError(
                f"{type(self).__name__}: got {got} of reward_fn and environment, expected one: "
                "a function that scores a response, or an environment that returns the reward"
            )
        return super()._plan(task)

    def _scoring(self, task: Task, data: Data, pool: DaemonPool) -> Scoring:
        if task.environment is not None:
            return _played(task.environment, pool)
        limits, config = self._settings.limits, self._run_config()
        assert isinstance(limits, RolloutLimits)
        raises = limits.on_reward_error == "raise"  # otherwise the pipe only counts the failure
        failed = self._reward_failed if raises else lambda error: None
        judge = RewardReader(limits.reward_weights, failed)
        scorer = one_reward(NAME, as_calculator(task.reward_fn, judge, pool), config)
        return {"scorer": scorer}, {"rewards": [{"type": NAME}]}


class GRPOTrainer(RewardTrainer):
    """Group relative policy optimization (arXiv:2402.03300); config sections policy and grpo."""

    settings_type: ClassVar[type[PresetSettings]] = GRPOSettings


class RLOOTrainer(RewardTrainer):
    """The leave-one-out credit of RLOO (arXiv:2402.14740), by the loss dapo; section rloo.

    `algorithm={"loss": "reinforce"}` is the paper's loss.
    """

    settings_type: ClassVar[type[PresetSettings]] = RLOOSettings


class ExampleTrainer(PresetTrainer):
    """Learns from the rows of the dataset themselves."""

    scored: ClassVar[bool] = False

    async def train(
        self,
        dataset: Any,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> TrainingResult:
        """Train on `dataset`. The limits count from the beginning of training.

        Raises ConfigError or TypeError before any model loads. `fit` is the same for code without
        an event loop.
        """
        return await self._train(Task(dataset, None, None, max_steps, max_epochs, callbacks))

    fit = blocking(train)


class SFTTrainer(ExampleTrainer):
    """Supervised fine-tuning on demonstrations; config sections policy and sft."""

    settings_type: ClassVar[type[PresetSettings]] = SFTSettings
    wanted: ClassVar[Wanted] = "demonstrations"

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | Path,
        batch_size: int = 32,
        learning_rate: float = 2e-5,
        max_sequence_length: int = 512,
        **kwargs: Any,
    ) -> Self:
        """A trainer of this model. Nothing loads until `fit`."""
        keys = {"batch_size": batch_size, "learning_rate": learning_rate, **kwargs}
        keys["max_sequence_length"] = max_sequence_length
        return cls._from_keys(model_name_or_path, keys)


class DPOTrainer(ExampleTrainer):
    """Direct preference optimization (arXiv:2305.18290); config sections policy and dpo."""

    settings_type: ClassVar[type[PresetSettings]] = DPOSettings
    wanted: ClassVar[Wanted] = "pairs"

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | Path,
        batch_size: int = 32,
        learning_rate: float = 1e-6,
        beta: float = 0.1,
        **kwargs: Any,
    ) -> Self:
        """A trainer of this model. Nothing loads until `fit`. `batch_size` counts pairs."""
        keys = {"batch_size": batch_size, "learning_rate": learning_rate, "beta": beta, **kwargs}
        return cls._from_keys(model_name_or_path, keys)

    def _scoring(self, task: Task, data: Data, pool: DaemonPool) -> Scoring:
        """Pair a known dataset of scored responses by its usual score."""
        algorithm = self._settings.run_mapping()["algorithm"]
        usual = {} if data.pair_by is None else {"pair_by": data.pair_by}
        return {}, {"algorithm": {**usual, **algorithm}}


def _played(environment: Any, pool: DaemonPool) -> Scoring:
    """The environment as a part, retrain's or NeMo RL's, and its label in the config."""
    make, one, label = environment_factory(environment)
    sections: dict[str, Any] = {"environment": {"type": label}}
    if isinstance(one, Environment):
        return {"environment": make}, sections
    if not takes_batch(one):
        raise TypeError(
            f"environment: got {shown(one)}, expected a retrain.Environment or an object with NeMo "
            "RL's step(message_log_batch, metadata)"
        )
    given: dict[str, Any] = {"environment": lambda: MessageLogEnvironment(make(), pool)}
    if callable(getattr(one, HOOK, None)):
        given["learner"] = Review(one, pool)
    return given, sections
