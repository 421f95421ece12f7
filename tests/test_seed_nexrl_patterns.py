"""The patterns and utilities of NexRL's page on custom trainers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from omegaconf import OmegaConf

from retrain.trainer.nexrl import (
    Batch,
    SelfHostedGrpoTrainer,
    SelfHostedTrainer,
    log_rollout_metrics,
    padding_data,
)
from tests.nexrl_kit import text_trajectories


class Patterns(SelfHostedTrainer):
    """The page's common patterns as methods, and its best practices."""

    def _apply_kl_penalty(self, batch: Batch, beta: float) -> Batch:
        """Apply KL penalty to rewards."""
        # Compute KL divergence
        log_probs = batch.values["log_probs"]
        ref_log_probs = batch.values["ref_log_probs"]
        kl = log_probs - ref_log_probs

        # Apply penalty
        rewards = batch.values["token_level_scores"]
        penalized_rewards = rewards - beta * kl
        batch.values["token_level_scores"] = penalized_rewards

        return batch

    def _compute_values(self, batch: Batch) -> torch.Tensor:
        """Compute value estimates using value network."""
        # Call inference service to get value estimates
        values = self._value_network.predict(batch.values["input_ids"])
        return values  # noqa: RET504 - the page's own lines

    def _compute_nstep_returns(self, rewards: list[float], n: int, gamma: float) -> list[float]:
        """Compute n-step returns."""
        returns = []
        for i in range(len(rewards)):
            n_step_return = 0
            for j in range(min(n, len(rewards) - i)):
                n_step_return += (gamma**j) * rewards[i + j]
            returns.append(n_step_return)
        return returns

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict]:
        metrics = {}

        # Compute things
        advantages = self._compute_advantages(batch)

        # Log statistics
        metrics["algorithm/advantage_mean"] = float(advantages.mean())
        metrics["algorithm/advantage_std"] = float(advantages.std())
        metrics["algorithm/advantage_max"] = float(advantages.max())

        return batch, metrics

    def _compute_advantages(self, batch: Batch) -> torch.Tensor:
        """Compute advantages with proper handling."""
        rewards = batch.metadata["rewards"]

        # Handle empty batch
        if len(rewards) == 0:
            return torch.zeros(0)

        # Handle single sample (no std)
        if len(rewards) == 1:
            return torch.zeros(1)

        # Normal computation
        mean = torch.mean(rewards)
        std = torch.std(rewards)
        advantages = (rewards - mean) / (std + 1e-8)  # Avoid division by zero

        return advantages  # noqa: RET504 - the page's own lines


def test_the_common_patterns_agree_with_the_library() -> None:
    from retrain.trainer.nexrl import apply_kl_penalty

    trainer = Patterns({})
    values = {
        "log_probs": torch.tensor([[-1.0, -2.0]]),
        "ref_log_probs": torch.tensor([[-2.0, -1.5]]),
        "token_level_scores": torch.tensor([[0.0, 1.0]]),
        "loss_mask": torch.ones(1, 2),
        "input_ids": torch.tensor([[5, 6]]),
    }
    library = apply_kl_penalty(Batch(values), beta=0.1)
    page = trainer._apply_kl_penalty(Batch(values), beta=0.1)
    assert torch.allclose(page.values["token_level_scores"], library.values["token_level_scores"])
    rewards = [1.0, 0.0, 2.0, 3.0]
    expected = [1.0, 0.9 * 2.0, 2.0 + 0.9 * 3.0, 3.0]
    assert trainer._compute_nstep_returns(rewards, 2, 0.9) == pytest.approx(expected)

    class Network:
        def predict(self, input_ids: torch.Tensor) -> torch.Tensor:
            return input_ids / 10

    trainer._value_network = Network()
    assert trainer._compute_values(Batch(values)).tolist() == [[0.5, pytest.approx(0.6)]]


def test_the_best_practices_hold_at_the_edges_and_train() -> None:
    trainer = Patterns({})
    for rewards, expected in (([], []), ([1.0], [0.0]), ([0.0, 1.0], [-0.7071, 0.7071])):
        batch = Batch(metadata={"rewards": rewards})
        assert trainer._compute_advantages(batch).tolist() == pytest.approx(expected, abs=1e-4)
    with trainer, pytest.raises(KeyError, match="'advantages'"):
        trainer.advance(text_trajectories())  # the page's example keeps them to itself

    class Storing(Patterns):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict]:
            batch.values["advantages"] = self._compute_advantages(batch)
            return super()._prepare_batch(batch)

    with Storing({}) as storing:
        metrics = storing.advance(text_trajectories())
    assert metrics["algorithm/advantage_mean"] == pytest.approx(0.0, abs=1e-6)
    assert metrics["algorithm/advantage_max"] == pytest.approx(0.866, abs=1e-3)


def test_the_required_fields_are_those_of_the_page() -> None:
    class Careless(SelfHostedTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict]:
            batch.values["advantages"] = torch.ones(len(batch))
            del batch.values["position_ids"]
            return batch, {}

    with Careless({}) as trainer, pytest.raises(KeyError, match="'position_ids'"):
        trainer.train(text_trajectories())


def test_the_existing_utilities_work_in_a_trainer() -> None:
    class Utilities(SelfHostedTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict]:
            # Use in your trainer
            batch = padding_data(batch, pad_token_id=self._pad_token_id)
            batch.values["advantages"] = batch.metadata["rewards"]
            metrics: dict[str, Any] = {}
            log_rollout_metrics(batch.metadata["trajectories"], metrics)
            return batch, metrics

    with Utilities({}) as trainer:
        assert trainer.advance(text_trajectories())["rollout/reward_mean"] == 0.5


def test_the_grpo_trainers_patterns_can_be_reused() -> None:
    class Reusing(SelfHostedTrainer):
        def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict]:
            # Padding removal
            batch = Batch.remove_redundant_left_padding(batch, pad_token_id=self._pad_token_id)
            batch = Batch.remove_redundant_right_padding(batch, pad_token_id=self._pad_token_id)

            # Token-level rewards
            reward_tensor = self._reward_fn(batch)
            batch.values["token_level_scores"] = reward_tensor

            # Old log probabilities
            old_log_probs = self._compute_old_log_probs(batch)
            batch.values["old_log_probs"] = old_log_probs

            # Advantage computation
            batch = self._compute_advantage(batch)
            return batch, {}

    with Reusing({}) as mine, SelfHostedGrpoTrainer({}) as built_in:
        own, theirs = mine.advance(text_trajectories()), built_in.advance(text_trajectories())
    for name in ("loss", "grad_norm", "entropy"):
        assert own[name] == pytest.approx(theirs[name], abs=1e-6)


def test_a_config_may_be_any_mapping_in_attribute_and_item_access() -> None:
    plain = {"algorithm": {"my_param": 0.25}, "train_service": {"world_size": 1}}

    class Custom(SelfHostedGrpoTrainer):
        def __init__(self, config):
            super().__init__(config)
            algorithm = self._config.algorithm
            self.seen = (algorithm.my_param, self._config["algorithm"]["my_param"])

    for config in (plain, OmegaConf.create(plain), OmegaConf.create({"trainer": plain})):
        assert Custom(config).seen == (0.25, 0.25)
