"""GRPOTrainer, RLOOTrainer, SFTTrainer, DPOTrainer: each a signature and a table of defaults."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar, Self

from retrain.config import RunConfig
from retrain.trainer.data import Data
from retrain.trainer.nemo.columns import Wanted
from retrain.trainer.nemo.preset import ExampleTrainer, RewardTrainer
from retrain.trainer.settings import (
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
        """A trainer of this model; nothing loads until `fit`.

        Further keywords: the config's keys (`seed`, `max_steps`, `column_mapping`, ...) and
        sections of a retrain YAML (`backend`, `sampling`, ...).
        """
        return cls._from_keys(
            model_name_or_path,
            {
                "num_prompts_per_step": num_prompts_per_step,
                "num_generations_per_prompt": num_generations_per_prompt,
                "learning_rate": learning_rate,
                "max_sequence_length": max_sequence_length,
                "tensor_parallel_size": tensor_parallel_size,
                "normalize_rewards": normalize_rewards,
                "use_leave_one_out_baseline": use_leave_one_out_baseline,
                **kwargs,
            },
        )


class RLOOTrainer(RewardTrainer):
    """REINFORCE with the mean of the others as baseline (arXiv:2402.14740); section rloo."""

    settings_type: ClassVar[type[Settings]] = RLOOSettings

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
        """A trainer of this model; nothing loads until `fit`."""
        return cls._from_keys(
            model_name_or_path,
            {
                "num_prompts_per_step": num_prompts_per_step,
                "num_generations_per_prompt": num_generations_per_prompt,
                "learning_rate": learning_rate,
                "max_sequence_length": max_sequence_length,
                "tensor_parallel_size": tensor_parallel_size,
                **kwargs,
            },
        )


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
        """A trainer of this model; nothing loads until `fit`."""
        return cls._from_keys(
            model_name_or_path,
            {
                "batch_size": batch_size,
                "learning_rate": learning_rate,
                "max_sequence_length": max_sequence_length,
                **kwargs,
            },
        )


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
        """A trainer of this model; nothing loads until `fit`. `batch_size` counts pairs."""
        return cls._from_keys(
            model_name_or_path,
            {"batch_size": batch_size, "learning_rate": learning_rate, "beta": beta, **kwargs},
        )

    def _further(self, config: RunConfig, data: Data) -> RunConfig:
        """A data set that is known to hold scored responses is paired by its usual score."""
        if data.pair_by is None or "pair_by" in config.algorithm.arguments:
            return config
        algorithm = {**config.algorithm.model_dump(), "pair_by": data.pair_by}
        section = type(config.algorithm).model_validate(algorithm)
        return config.model_copy(update={"algorithm": section})
