"""The older retrain's GRPOTrainer: a model, an algorithm and the parts, trained by TRL.

    trainer = GRPOTrainer("tiny", {"group_size": 8}, environment=MyEnvironment,
                          reward_calculator=my_reward, prompts=["a=", "b="])
    result = await trainer.train(total_steps=100)

The environment rules the interaction, the reward calculator scores it, the trainer turns both into
updates by `backend: trl`. The rollouts that the environment played are the ones that are trained.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from retrain.assembly import Given, Parts
from retrain.config import Plugin, RunConfig, parse_config, plain
from retrain.environment import Environment
from retrain.errors import ConfigError, shown
from retrain.observe.callbacks import Callback, TrainingResult
from retrain.pipeline.run import Run
from retrain.rewarding import FunctionReward, RewardCalculator, Scorer, WeightedReward
from retrain.sampler import Tokenizer
from retrain.trainer.base import BaseTrainer, Plan, Task, check_model
from retrain.trainer.data import read_data
from retrain.trainer.environments import environment_factory, environment_label
from retrain.trainer.settings import Data
from retrain.types import Metrics

_PROBE = "The quick brown fox: 3 + 4 = 7?\n"
"""Two tokenizers that agree on it are taken for one."""


class GRPOTrainerAdapter(BaseTrainer):
    """GRPO through TRL, made of parts.

    `model` is `tiny`, a folder or a Hugging Face id; `algorithm` holds the keys of the YAML's
    `algorithm:`. `environment` is a retrain Environment (class, factory or instance), by default
    the single-turn one; `reward_calculator` a RewardCalculator, a `@reward` or a plain function;
    `prompts` a PromptSource, a list, a path or a Hub id. `tokenizer` lends its chat template; it
    must be the model's own, since a token is never encoded again. Further sections of the YAML
    (`backend`, `sampling`, `train`, ...) are keywords. Raises ConfigError or TypeError.
    """

    def __init__(
        self,
        model: str = "tiny",
        algorithm: Mapping[str, Any] | None = None,
        *,
        environment: Any = None,
        reward_calculator: Any = None,
        prompts: Any = None,
        tokenizer: Tokenizer | None = None,
        **sections: Any,
    ) -> None:
        super().__init__()
        if not isinstance(model, str | Path):
            raise TypeError(
                f"model: got {type(model).__name__}, expected a name or a folder: save a model "
                "with save_pretrained(folder) and give the folder"
            )
        self._mapping = plain({"model": str(model), "name": "grpo", **sections})
        self._mapping["algorithm"] = {"type": "grpo", **plain(algorithm or {})}
        if isinstance(backend := self._mapping.get("backend"), dict):
            self._mapping["backend"] = {"type": "trl", **backend}
        self.environment = Environment if environment is None else environment
        self.reward_calculator = reward_calculator
        self.prompts = prompts
        self.tokenizer = tokenizer
        if prompts is None:
            raise ConfigError("prompts: missing; expected a PromptSource, a list of rows or a path")
        config = self._run_config()
        if config.backend.type != "trl" or config.algorithm.type != "grpo":
            raise ConfigError(
                f"{type(self).__name__} is grpo by trl, got {config.algorithm.type} by "
                f"{config.backend.type}: any pair of them runs by retrain.train(config), or with "
                "the trainers of retrain.trainer"
            )
        check_model(config)

    @property
    def config(self) -> dict[str, Any]:
        return self._run_config().model_dump(mode="json", exclude_none=True)

    async def train(
        self, total_steps: int | None = None, callbacks: Sequence[Callback] | None = None
    ) -> TrainingResult:
        """Train up to `total_steps` optimizer steps in all (default: train.total_train_steps)."""
        return await self._train(Task(max_steps=total_steps, callbacks=callbacks or ()))

    def fit(
        self, total_steps: int | None = None, callbacks: Sequence[Callback] | None = None
    ) -> TrainingResult:
        """The same for callers without an event loop."""
        return self._fit(Task(max_steps=total_steps, callbacks=callbacks or ()))

    async def step(self) -> Metrics:
        """One cycle: rollouts, rewards, one update; the metrics of metrics.jsonl.

        The model stays loaded until `close`. Raises RuntimeError after train.total_train_steps.
        """
        return await super().step()

    def _run_config(self) -> RunConfig:
        return parse_config({"prompts": {"type": "given"}, **self._mapping})

    def _plan(self, task: Task) -> Plan:
        data = read_data(self.prompts, "rollouts", Data())
        make = environment_factory(self.environment)
        if not isinstance(make(), Environment):
            raise TypeError(
                "environment: expected a retrain.Environment; an object with NeMo RL's face trains "
                "by retrain.trainer.GRPOTrainer.fit(environment=...)"
            )
        given: dict[str, Any] = {"prompts": data.prompts, "environment": make}
        labels: dict[str, Any] = {"prompts": data.label}
        labels["environment"] = Plugin(type=environment_label(self.environment)).model_dump()
        if self.reward_calculator is not None:
            calculator = _calculator(self.reward_calculator)
            config = self._run_config()
            name = calculator.name or type(calculator).__name__
            given["scorer"] = Scorer(
                [WeightedReward(name, 1.0, calculator)],
                deadline=config.deadlines.reward,
                concurrency=config.rollout.reward_concurrency,
            )
            labels["rewards"] = [{"type": name}]
        config = parse_config({**self._mapping, **labels})
        return Plan(
            config, Given(**given), task.max_steps, None, [data.close], tweak=self._templated
        )

    def _templated(self, parts: Parts) -> Parts:
        template = getattr(self.tokenizer, "chat_template", None)
        if not isinstance(template, str) or parts.config.chat.template != "auto":
            return parts
        return replace(parts, chat_template=template)

    def _check_run(self, run: Run) -> None:
        if self.tokenizer is None:
            return
        own = run.adapter.tokenizer
        if self.tokenizer.encode(_PROBE) != own.encode(_PROBE):
            raise ConfigError(
                "tokenizer: it encodes otherwise than the model's own, so its tokens would mean "
                "nothing to the model: leave it out, or give the one in the model's folder"
            )


GRPOTrainer = GRPOTrainerAdapter
"""The page calls it both."""


def _calculator(given: Any) -> RewardCalculator:
    if isinstance(given, RewardCalculator):
        return given
    if isinstance(given, type) and issubclass(given, RewardCalculator):
        return given()
    if callable(given):
        return FunctionReward(given)
    raise TypeError(
        f"reward_calculator: got {shown(given)}, expected a RewardCalculator or a function of any "
        "of prompt, completion, answer, messages, metadata, trajectory"
    )
