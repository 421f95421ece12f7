"""The older retrain's GRPOTrainer: a model, an algorithm and the parts, trained by TRL.

    trainer = GRPOTrainer("tiny", {"group_size": 8}, environment=MyEnvironment,
                          reward_calculator=my_reward, prompts=["a=", "b="])
    result = await trainer.train(total_steps=100)

The environment defines the interaction, the reward calculator scores it, and `backend: trl` trains
the rollouts that the environment played.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from retrain.adapters.base import Adapter
from retrain.assembly import Given, Learner
from retrain.config import RunConfig, parse_config, plain
from retrain.config.paths import find_model
from retrain.environment import Environment
from retrain.errors import ConfigError, shown
from retrain.observe.callbacks import Callback, TrainingResult
from retrain.sampler import Tokenizer
from retrain.scoring import FunctionReward, RewardCalculator
from retrain.trainer.base import BaseTrainer, Plan, Task, blocking, one_reward
from retrain.trainer.data import DataOptions, read_data
from retrain.trainer.environments import environment_factory

_PROBE = "The quick brown fox: 3 + 4 = 7?\n"
"""Two tokenizers that encode it the same are considered the same."""


class GRPOTrainerAdapter(BaseTrainer):
    """GRPO with TRL, made of parts.

    `model` is `tiny`, a folder or a Hugging Face id, and `algorithm` has the keys of the YAML's
    `algorithm:`. `environment` is a retrain Environment (class, function or instance), by default
    the single-turn one. `reward_calculator` is a RewardCalculator, a `@reward` or a plain function.
    `prompts` is a PromptSource, a list, a path or a Hub id. `tokenizer` overrides the chat
    template; it must be the model's own. Further keywords are sections of the YAML (`backend`,
    `sampling`, `train`, ...). Raises ConfigError or TypeError.
    """

    def __init__(
        self,
        model: str = "tiny",
        algorithm: Mapping[str, Any] | None = None,
        *,
        prompts: Any,
        environment: Any = Environment,
        reward_calculator: Any = None,
        tokenizer: Tokenizer | None = None,
        **sections: Any,
    ) -> None:
        super().__init__()
        if not isinstance(model, str | Path):
            raise TypeError(
                f"model: got {type(model).__name__}, expected a name or a folder; save the model "
                "with save_pretrained(folder) and pass the folder"
            )
        self._mapping = plain({"model": str(model), "name": "grpo", **sections})
        self._mapping["algorithm"] = {"type": "grpo", **plain(algorithm or {})}
        if isinstance(backend := self._mapping.get("backend"), dict):
            self._mapping["backend"] = {"type": "trl", **backend}
        self.environment = environment
        self.reward_calculator = reward_calculator
        self.prompts = prompts
        self.tokenizer = tokenizer
        config = self._run_config()
        if config.backend.type != "trl" or config.algorithm.type != "grpo":
            raise ConfigError(
                f"{type(self).__name__}: got {config.algorithm.type} on {config.backend.type}, "
                "expected grpo on trl; for other combinations use retrain.train(config) or the "
                "trainers of retrain.trainer"
            )
        find_model(config.model, config.base_dir)

    @property
    def config(self) -> dict[str, Any]:
        return self._run_config().model_dump(mode="json", exclude_none=True)

    async def train(
        self, total_steps: int | None = None, callbacks: Sequence[Callback] | None = None
    ) -> TrainingResult:
        """Train up to step `total_steps` (default: train.total_train_steps).

        `fit` is the same for code without an event loop.
        """
        return await self._train(Task(max_steps=total_steps, callbacks=callbacks))

    fit = blocking(train)

    def _run_config(self) -> RunConfig:
        return parse_config({"prompts": {"type": "given"}, **self._mapping})

    def _plan(self, task: Task) -> Plan:
        data = read_data(self.prompts, "rollouts", DataOptions())
        make, one, label = environment_factory(self.environment)
        if not isinstance(one, Environment):
            raise TypeError(
                f"environment: got {shown(one)}, expected a retrain.Environment; an object with "
                "NeMo RL's interface works with retrain.trainer.GRPOTrainer.fit(environment=...)"
            )
        given: dict[str, Any] = {"prompts": data.prompts, "environment": make}
        labels: dict[str, Any] = {"prompts": data.label, "environment": {"type": label}}
        config = self._run_config()
        if self.reward_calculator is not None:
            calculator = _calculator(self.reward_calculator)
            name = calculator.name or type(calculator).__name__
            given["scorer"] = one_reward(name, calculator, config)
            labels["rewards"] = [{"type": name}]
        if self.tokenizer is not None:
            given["learner"] = _SameTokenizer(self.tokenizer)
        template = getattr(self.tokenizer, "chat_template", None)
        if isinstance(template, str) and config.chat.template == "auto":
            given["chat_template"] = template
        config = parse_config({**self._mapping, **labels})
        return Plan(config, Given(**given), task.max_steps, close=data.close)


GRPOTrainer = GRPOTrainerAdapter
"""The page uses both names."""


class _SameTokenizer(Learner):
    """Checks that a tokenizer is the model's own."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def attach(self, adapter: Adapter) -> None:
        super().attach(adapter)
        if self._tokenizer.encode(_PROBE) != adapter.tokenizer.encode(_PROBE):
            raise ConfigError(
                "tokenizer: it encodes differently from the model's own tokenizer, so the model "
                "can't read its tokens; drop it, or pass the tokenizer of the model's folder"
            )


def _calculator(given: Any) -> RewardCalculator:
    if isinstance(given, RewardCalculator):
        return given
    if callable(given) and not isinstance(given, type):
        return FunctionReward(given)
    raise TypeError(
        f"reward_calculator: got {shown(given)}, expected a RewardCalculator or a function of any "
        "of prompt, completion, answer, messages, metadata, trajectory"
    )
