"""GRPOTrainer, RLOOTrainer, SFTTrainer and DPOTrainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from retrain.config import RunConfig
from retrain.trainer.columns import Wanted
from retrain.trainer.data import Data
from retrain.trainer.nemo.preset import ExampleTrainer, RewardTrainer
from retrain.trainer.nemo.settings import (
    DPOSettings,
    GRPOSettings,
    RLOOSettings,
    Settings,
    SFTSettings,
)


class GRPOTrainer(RewardTrainer):
    """Group relative policy optimization (arXiv:2402.03300); config sections policy and grpo."""

    settings_type: ClassVar[type[Settings]] = GRPOSettings

    @classmethod
    def from_pretrained(
        cls,
        model_name_or_path: str | Path,
        num_prompts_per_step: int = 32,
        num_generations_per_prompt: int = 16,
        learning_rate: float = 1e-6,
        max_sequence_length: int = 512,
        tensor_parallel_size: int = 1,
        normalize_rewards: bool = True,
        use_leave_one_out_baseline: bool = True,
        **kwargs: Any,
    ) -> Self:
        """A trainer of this model: see `RewardTrainer.from_pretrained`."""
        return super().from_pretrained(
            model_name_or_path,
            num_prompts_per_step,
            num_generations_per_prompt,
            learning_rate,
            max_sequence_length,
            tensor_parallel_size,
            normalize_rewards=normalize_rewards,
            use_leave_one_out_baseline=use_leave_one_out_baseline,
            **kwargs,
        )


class RLOOTrainer(RewardTrainer):
    """REINFORCE with the mean of the others as baseline (arXiv:2402.14740); section rloo."""

    settings_type: ClassVar[type[Settings]] = RLOOSettings


class SFTTrainer(ExampleTrainer):
    """Supervised fine-tuning on demonstrations; config sections policy and sft."""

    settings_type: ClassVar[type[Settings]] = SFTSettings
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

    settings_type: ClassVar[type[Settings]] = DPOSettings
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

    def _adapted(self, config: RunConfig, data: Data) -> RunConfig:
        """Pair a known data set of scored responses by its usual score."""
        if data.pair_by is None or "pair_by" in config.algorithm.arguments:
            return config
        algorithm = {**config.algorithm.model_dump(), "pair_by": data.pair_by}
        section = type(config.algorithm).model_validate(algorithm)
        return config.model_copy(update={"algorithm": section})
