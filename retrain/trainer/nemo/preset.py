"""What the preset trainers share: arguments in, a RunConfig and Parts out.

What they train by is the pipe, its algorithms and its adapters, so that whatever those can do is a
key away (`backend={"type": "tinker"}`, `staleness={"target": 2}`, ...).
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from pydantic import ValidationError

from retrain.assembly import Given
from retrain.concurrency.threads import DaemonPool
from retrain.config import Plugin, RewardConfig, RunConfig, parse_config, plain
from retrain.config.problems import problems_of
from retrain.environment import Environment
from retrain.errors import ConfigError, shown
from retrain.observe.callbacks import Callback, TrainingResult
from retrain.rewarding import Scorer, WeightedReward
from retrain.trainer.base import BaseTrainer, Plan, Task, check_model
from retrain.trainer.data import Data, read_data
from retrain.trainer.environments import (
    MessageLogEnvironment,
    Review,
    environment_factory,
    environment_label,
)
from retrain.trainer.nemo.columns import Wanted
from retrain.trainer.nemo.scoring import NAME, Judge, as_calculator
from retrain.trainer.settings import (
    Rollouts,
    Settings,
    flat_keys,
)

T = TypeVar("T")
USER_THREADS = 64
_LATER = {"type": "given", "source": "what fit() is given"}


class PresetTrainer(BaseTrainer):
    """A trainer made from NeMo RL's nested config, or by `from_pretrained`.

    Raises ConfigError with every problem of the config, NotFoundError for a model folder that
    doesn't exist; loads nothing.
    """

    settings_type: ClassVar[type[Settings]]
    wanted: ClassVar[Wanted] = "rollouts"

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        if not isinstance(config, Mapping):
            raise TypeError(
                f"{type(self).__name__}: got {type(config).__name__}, expected the nested config; "
                f"for a model's name use {type(self).__name__}.from_pretrained(name)"
            )
        kind = self.settings_type
        try:
            self._settings = kind.model_validate(plain(config))
        except ValidationError as error:
            raise ConfigError(*problems_of(error, kind)) from None
        check_model(self._run_config())

    @property
    def config(self) -> dict[str, Any]:
        """The nested config with every default; another trainer can be made of it."""
        return self._settings.model_dump(mode="json", exclude_none=True)

    @classmethod
    def _from_keys(cls, model: str | Path, keys: Mapping[str, Any]) -> Self:
        """The nested config of flat keywords. Raises TypeError for an unknown one."""
        model = str(model) if isinstance(model, Path) else model
        if not isinstance(model, str) or not model.strip():
            raise ValueError(
                f"{cls.__name__}.from_pretrained: got {shown(model)} for the model, expected "
                "`tiny`, a folder or a Hugging Face id"
            )
        paths = flat_keys(cls.settings_type)
        nested: dict[str, Any] = {"policy": {"model_name": model}}
        for key, value in keys.items():
            if key not in paths:
                near = difflib.get_close_matches(key, paths, n=1)
                hint = f"did you mean {near[0]}?" if near else f"known: {', '.join(sorted(paths))}"
                raise TypeError(f"{cls.__name__}.from_pretrained: unknown keyword {key!r}; {hint}")
            if value is None or (key == "learning_rate" and value == cls._default_rate()):
                continue  # the default leaves room for backend.learning_rate
            *sections, last = paths[key].split(".")
            place = nested
            for section in sections:
                place = place.setdefault(section, {})
            place[last] = {**place.get(last, {}), **value} if key == "data" else value
        return cls(nested)

    @classmethod
    def _default_rate(cls) -> float:
        policy: Any = cls.settings_type.model_fields["policy"].annotation  # a subclass of Policy
        rate: float = policy.model_fields["learning_rate"].default
        return rate

    def _run_config(self) -> RunConfig:
        held_out = plain(self._settings.eval)
        if isinstance(held_out, dict):  # a DataModule may bring the prompts
            return self._with(_LATER, {"eval": {"prompts": _LATER, **held_out}})
        return self._with(_LATER, {})

    def _with(self, prompts: Mapping[str, Any], further: Mapping[str, Any]) -> RunConfig:
        return parse_config({**self._settings.run_mapping(), "prompts": prompts, **further})

    def _plan(self, task: Task) -> Plan:
        data = read_data(task.dataset, self.wanted, self._settings.data)
        closing: list[Callable[[], None]] = [data.close]
        try:
            return self._plan_on(data, task, closing)
        except BaseException:
            for close in closing:
                close()
            raise

    def _plan_on(self, data: Data, task: Task, closing: list[Callable[[], None]]) -> Plan:
        given: dict[str, Any] = {"prompts": data.prompts}
        further: dict[str, Any] = {}
        review = self._scoring(task, data, given, further, closing)
        if data.eval_prompts is not None:
            given["eval_prompts"] = data.eval_prompts
            label = {"type": "given", "rows": len(data.eval_prompts)}
            further["eval"] = {**(plain(self._settings.eval) or {}), "prompts": label}
        limits = self._settings.limits
        steps, epochs = task.max_steps, task.max_epochs
        if steps is None:
            steps = limits.max_num_steps
        if epochs is None:
            epochs = limits.max_num_epochs
        if steps is None and epochs is None:
            epochs = 1
        config = self._further(self._with(data.label, further), data)
        return Plan(config, Given(**given), steps, epochs, close=closing, review=review)

    def _scoring(
        self,
        task: Task,
        data: Data,
        given: dict[str, Any],
        further: dict[str, Any],
        closing: list[Callable[[], None]],
    ) -> Review | None:
        """Add what scores rollouts to the given parts, and its labels to the config."""
        return None

    def _further(self, config: RunConfig, data: Data) -> RunConfig:
        """Adapt the config to the data."""
        return config


class RewardTrainer(PresetTrainer):
    """Learns from rewards: of a function, or of an environment."""

    def fit(
        self,
        dataset: Any,
        reward_fn: Callable[..., Any] | None = None,
        environment: Any = None,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> TrainingResult:
        """Train on `dataset`, scored by `reward_fn(prompt, response[, row])` or `environment`.

        A RewardCalculator, such as an `@reward` function, is called as it is: by name.
        `max_steps` and `max_epochs` count from the beginning of training, an earlier `fit` or a
        loaded checkpoint included; whichever comes first ends it (neither: one epoch). Raises
        RuntimeError inside a running event loop, ConfigError, TypeError or ValueError before any
        model loads, RewardError when `reward_fn` fails.
        """
        return self._fit(
            Task(dataset, reward_fn, environment, max_steps, max_epochs, callbacks or ())
        )

    async def train(
        self,
        dataset: Any,
        reward_fn: Callable[..., Any] | None = None,
        environment: Any = None,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        callbacks: Sequence[Callback] | None = None,
    ) -> TrainingResult:
        """The same inside an event loop."""
        return await self._train(
            Task(dataset, reward_fn, environment, max_steps, max_epochs, callbacks or ())
        )

    def _plan(self, task: Task) -> Plan:
        if (task.reward_fn is None) == (task.environment is None):
            got = "both" if task.reward_fn is not None else "neither"
            raise ValueError(
                f"{type(self).__name__}: got {got} of reward_fn and environment, expected one: "
                "a function that scores a response, or an environment that gives the reward"
            )
        return super()._plan(task)

    def _scoring(
        self,
        task: Task,
        data: Data,
        given: dict[str, Any],
        further: dict[str, Any],
        closing: list[Callable[[], None]],
    ) -> Review | None:
        pool = DaemonPool(USER_THREADS)
        closing.append(pool.close)
        if task.environment is not None:
            return self._environment(task.environment, data, given, further, pool)
        limits = self._settings.limits
        assert isinstance(limits, Rollouts)
        failed = self._reward_failed if limits.on_reward_error == "raise" else _counted
        judge = Judge(task.reward_fn, data.row_of, limits.reward_weights, failed)
        config = self._run_config()
        given["scorer"] = Scorer(
            [WeightedReward(NAME, 1.0, as_calculator(judge, pool))],
            deadline=config.deadlines.reward,
            concurrency=config.rollout.reward_concurrency,
        )
        further["rewards"] = [RewardConfig(type=NAME).model_dump()]
        return None

    def _environment(
        self,
        environment: Any,
        data: Data,
        given: dict[str, Any],
        further: dict[str, Any],
        pool: DaemonPool,
    ) -> Review | None:
        make = environment_factory(environment)
        further["environment"] = Plugin(type=environment_label(environment)).model_dump()
        one = make()
        if isinstance(one, Environment):
            given["environment"] = make
            return None
        given["environment"] = lambda: MessageLogEnvironment(make(), data.row_of, pool)
        hook = getattr(one, "global_post_process_and_metrics", None)
        return Review(one, data.row_of, pool) if callable(hook) else None


class ExampleTrainer(PresetTrainer):
    """Learns from the data set's rows as they stand."""

    scored: ClassVar[bool] = False

    def fit(
        self,
        dataset: Any,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        **scoring: Any,
    ) -> TrainingResult:
        """Train on `dataset`; the limits count from the beginning of training.

        Raises RuntimeError inside a running event loop, ConfigError or TypeError before any model
        loads.
        """
        self._refuse(scoring)
        return self._fit(Task(dataset, None, None, max_steps, max_epochs, callbacks or ()))

    async def train(
        self,
        dataset: Any,
        max_steps: int | None = None,
        max_epochs: int | None = None,
        callbacks: Sequence[Callback] | None = None,
        **scoring: Any,
    ) -> TrainingResult:
        """The same inside an event loop."""
        self._refuse(scoring)
        return await self._train(Task(dataset, None, None, max_steps, max_epochs, callbacks or ()))

    def _refuse(self, scoring: Mapping[str, Any]) -> None:
        if scoring:
            raise TypeError(
                f"{type(self).__name__} takes no {' or '.join(scoring)}: it learns from the rows "
                "themselves; GRPOTrainer and RLOOTrainer learn from rewards"
            )


def _counted(error: Exception) -> None:
    """The pipe writes it down as its rollout's outcome; nothing more is to be done."""
