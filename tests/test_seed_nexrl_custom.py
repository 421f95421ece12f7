"""Every example of NexRL's page on custom trainers, as in `test_seed_nexrl.py`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import yaml

from retrain.errors import ConfigError
from retrain.trainer.nexrl import build_trainer
from retrain.trainer.nexrl.__main__ import main
from tests.nexrl_kit import REST, metrics_of, text_trajectories, write

MY_TRAINER = '''
# recipe/my_task/my_trainer.py
from retrain.trainer.nexrl import SelfHostedTrainer
from retrain.trainer.nexrl import Batch
import torch

class MyCustomTrainer(SelfHostedTrainer):
    """Custom trainer implementing MyAlgorithm."""

    def __init__(self, config):
        super().__init__(config)

        # Algorithm-specific initialization
        self._my_param = config.algorithm.get("my_param", 0.5)
        self._use_custom_advantage = config.algorithm.get("use_custom_advantage", True)

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict]:
        """Implement custom algorithm logic."""
        metrics = {}

        # 1. Log rollout metrics
        self._log_rollout_metrics(batch)

        # 2. Remove redundant padding (optional but recommended)
        batch = Batch.remove_redundant_left_padding(
            batch,
            pad_token_id=self._pad_token_id,
            anchor_field="input_ids",
            fields=["input_ids", "attention_mask", "position_ids", "loss_mask"]
        )

        # 3. Compute rewards
        rewards = self._compute_custom_rewards(batch)
        batch.values["token_level_scores"] = rewards

        # 4. Compute advantages (custom algorithm)
        if self._use_custom_advantage:
            batch = self._compute_custom_advantages(batch)
            metrics["advantage_mean"] = float(torch.mean(batch.values["advantages"]))

        # 5. Add any other custom fields
        batch.values["my_custom_field"] = self._compute_custom_field(batch)

        return batch, metrics

    def _compute_custom_advantages(self, batch: Batch) -> Batch:
        """Implement your advantage computation logic."""
        # Example: simple per-trajectory advantage
        rewards = batch.metadata["rewards"]
        advantages = []

        for reward in rewards:
            # Your custom advantage calculation
            advantage = reward * self._my_param
            advantages.append(advantage)

        # Store advantages in batch
        batch.metadata["advantages"] = advantages
        return batch

    def _compute_custom_rewards(self, batch: Batch) -> torch.Tensor:
        """Convert scalar rewards to token-level rewards."""
        # Similar to SelfHostedGrpoTrainer._reward_fn()
        rewards = batch.metadata["rewards"]
        loss_mask = batch.values["loss_mask"]

        reward_tensor = torch.zeros_like(loss_mask, dtype=torch.float32)

        for i, reward in enumerate(rewards):
            # Assign reward to last valid token
            valid_positions = torch.where(loss_mask[i] == 1)[0]
            if len(valid_positions) > 0:
                last_pos = valid_positions[-1]
                reward_tensor[i, last_pos] = reward

        return reward_tensor

    def _compute_custom_field(self, batch: Batch) -> torch.Tensor:
        """Add any custom processing."""
        # Your custom logic here
        return torch.zeros(len(batch))
'''

MY_TASK = """
# recipe/my_task/my_task.yaml
trainer:
  # Custom trainer registration
  custom_trainer_module_path: "recipe/my_task/my_trainer.py"
  custom_trainer_class_name: "MyCustomTrainer"

  # Standard trainer config
  total_train_steps: 2
  train_service:
    backend: "self-hosted"
    world_size: 1

  # Your custom algorithm config
  algorithm:
    my_param: 0.5
    use_custom_advantage: true
"""


def nexrl(*arguments: str) -> int:
    """The page's command, `nexrl ...`."""
    return main(list(arguments))


def test_pattern_1_runs_by_the_pages_command(own_folder: Path) -> None:
    write("recipe/my_task/my_trainer.py", MY_TRAINER)
    write("recipe/my_task/my_task.yaml", MY_TASK + REST)
    command = "-m self-hosted -c recipe/my_task/my_task.yaml --run-nexrl"
    assert nexrl(*command.split()) == 0
    rows = metrics_of(own_folder / "runs" / "my_task")
    assert [row["step"] for row in rows] == [1, 2]
    for row in rows:
        assert row["advantage_mean"] == pytest.approx(0.5 * row["rollout/reward_mean"])


MY_REMOTE_TRAINER = '''
# recipe/my_task/my_remote_trainer.py
from retrain.trainer.nexrl import RemoteApiTrainer
from retrain.trainer.nexrl import Trajectory
from typing import Any

class MyRemoteTrainer(RemoteApiTrainer):
    """Custom trainer for remote API with custom algorithm."""

    def __init__(self, config):
        super().__init__(config)

        # Algorithm parameters
        self._advantage_weight = config.algorithm.get("advantage_weight", 1.0)

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        """Add custom fields to trajectories."""

        # 1. Group trajectories by run_id (if needed)
        groups = self._group_by_run_id(trajectories)

        # 2. Compute custom advantages
        for run_id, group in groups.items():
            # Your custom grouping/advantage logic
            group_advantages = self._compute_group_advantages(group)

            for traj, adv in zip(group, group_advantages):
                traj.advantage = adv * self._advantage_weight

        # 3. Log metrics
        avg_advantage = sum(t.advantage for t in trajectories) / len(trajectories)
        metrics["custom/advantage_mean"] = avg_advantage

        return trajectories

    def _group_by_run_id(self, trajectories: list[Trajectory]) -> dict:
        """Group trajectories by run_id."""
        groups = {}
        for traj in trajectories:
            run_id = traj.get("run_id", "default")
            if run_id not in groups:
                groups[run_id] = []
            groups[run_id].append(traj)
        return groups

    def _compute_group_advantages(self, group: list[Trajectory]) -> list[float]:
        """Compute advantages for a group of trajectories."""
        # Your custom advantage logic
        rewards = [traj.reward for traj in group]
        mean_reward = sum(rewards) / len(rewards)

        # Simple advantage: reward - mean
        advantages = [r - mean_reward for r in rewards]
        return advantages
'''

MY_REMOTE_TASK = """
# recipe/my_task/my_task.yaml
trainer:
  custom_trainer_module_path: "recipe/my_task/my_remote_trainer.py"
  custom_trainer_class_name: "MyRemoteTrainer"

  total_train_steps: 2
  train_service:
    backend: "tinker"
    url: "local"
    config:
      loss_fn: "importance_sampling"
      learning_rate: 2e-6

  algorithm:
    advantage_weight: 1.0
"""


def test_pattern_2_trains_what_the_page_writes_as_an_attribute(own_folder: Path) -> None:
    write("recipe/my_task/my_remote_trainer.py", MY_REMOTE_TRAINER)
    with build_trainer(yaml.safe_load(MY_REMOTE_TASK)) as trainer:
        trajectories = text_trajectories()
        metrics = trainer.advance(trajectories)
    assert [t["advantage"] for t in trajectories] == [0.5, -0.5, -0.5, 0.5]
    assert metrics["custom/advantage_mean"] == 0.0
    assert metrics["grad_norm"] > 0
    write("recipe/my_task/my_task.yaml", MY_REMOTE_TASK + REST)
    assert nexrl("-m", "training-service", "-c", "recipe/my_task/my_task.yaml", "--run-nexrl") == 0
    rows = metrics_of(own_folder / "runs" / "my_task")
    assert all(row["custom/advantage_mean"] == pytest.approx(0.0, abs=1e-9) for row in rows)


MY_ALGORITHM = '''
# recipe/my_task/my_algorithm.py
import torch
from retrain.trainer.nexrl import Batch

def compute_my_advantages(
    batch: Batch,
    discount_factor: float = 0.99,
    gae_lambda: float = 0.95
) -> Batch:
    """
    Compute advantages using custom algorithm (e.g., GAE).

    Args:
        batch: Batch with rewards and values
        discount_factor: Discount factor gamma
        gae_lambda: GAE lambda parameter

    Returns:
        Batch with advantages added
    """
    rewards = batch.metadata["rewards"]
    # Each trajectory is one step whose value is predicted as 0.
    advantages = [float(reward) - 0.0 for reward in rewards]  # Computed advantages
    batch.metadata["advantages"] = advantages
    return batch

def compute_custom_loss(
    log_probs: torch.Tensor,
    advantages: torch.Tensor,
    clip_range: float = 0.2
) -> torch.Tensor:
    """Compute custom loss (e.g., PPO clipped loss)."""
    ratio = torch.exp(log_probs - log_probs.detach())
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    return -torch.minimum(ratio * advantages, clipped * advantages).sum()
'''

MY_MODULAR_TRAINER = """
# recipe/my_task/my_trainer.py
import torch
from retrain.trainer.nexrl import SelfHostedTrainer
from retrain.trainer.nexrl import Batch
from .my_algorithm import compute_my_advantages

class MyTrainer(SelfHostedTrainer):
    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict]:
        metrics = {}

        # Use algorithm module
        batch = compute_my_advantages(
            batch,
            discount_factor=self._config.algorithm.discount_factor,
            gae_lambda=self._config.algorithm.gae_lambda
        )

        metrics["advantage_mean"] = float(torch.mean(batch.metadata["advantages"]))
        return batch, metrics
"""


def test_pattern_3_imports_its_algorithm_module_and_trains(own_folder: Path) -> None:
    write("recipe/my_task/my_algorithm.py", MY_ALGORITHM)
    write("recipe/my_task/my_trainer.py", MY_MODULAR_TRAINER)
    config = {
        "custom_trainer_module_path": "recipe/my_task/my_trainer.py",
        "custom_trainer_class_name": "MyTrainer",
        "algorithm": {"discount_factor": 0.99, "gae_lambda": 0.95},
    }
    with build_trainer(config) as trainer:
        metrics = trainer.advance(text_trajectories())
        module = sys.modules[type(trainer).__module__.replace("my_trainer", "my_algorithm")]
    assert metrics["advantage_mean"] == 0.5
    assert metrics["grad_norm"] > 0
    log_probs = torch.tensor([[-1.0, -2.0]], requires_grad=True)
    module.compute_custom_loss(log_probs, torch.tensor([[1.0, -1.0]])).backward()
    assert log_probs.grad.tolist() == [[-1.0, 1.0]]


TEST_MY_TRAINER = """
# recipe/my_task/test_my_trainer.py
import pytest
from omegaconf import OmegaConf
from retrain.trainer.nexrl import Batch, Trajectory
from .my_trainer import MyCustomTrainer

def create_dummy_batch():
    rows = [([7, 8, 9], [0, 1, 1], 1.0), ([7, 8], [0, 1], 0.0)]
    return Batch.from_trajectories(
        [Trajectory(tokens=t, loss_mask=m, reward=r) for t, m, r in rows]
    )

def test_custom_trainer_prepare_batch():
    config = OmegaConf.create({
        "algorithm": {"my_param": 0.5},
        "train_service": {"world_size": 1, "backend": "self-hosted", "url": "http://localhost"}
    })

    trainer = MyCustomTrainer(config)

    # Create dummy batch
    batch = create_dummy_batch()

    # Test _prepare_batch
    prepared_batch, metrics = trainer._prepare_batch(batch)

    assert "advantages" in prepared_batch.values
    assert "advantage_mean" in metrics
"""


def test_the_pages_unit_test_passes_under_pytest(
    own_folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    write("recipe/my_task/__init__.py", "")
    write("recipe/my_task/my_trainer.py", MY_TRAINER)
    write("recipe/my_task/test_my_trainer.py", TEST_MY_TRAINER)
    monkeypatch.setattr(sys, "path", [str(own_folder), *sys.path])  # as `python -m pytest` does
    without = [
        word for name in ("cacheprovider", "xdist", "asyncio") for word in ("-p", f"no:{name}")
    ]
    code = pytest.main(["-q", *without, "recipe/my_task"])
    assert code == 0, capfd.readouterr()
    assert "1 passed" in capfd.readouterr().out


def test_a_wrong_class_name_or_path_is_told(own_folder: Path) -> None:
    write("recipe/my_task/my_trainer.py", MY_TRAINER)
    config = yaml.safe_load(MY_TASK)["trainer"]
    with pytest.raises(ConfigError, match=r"MyTrainer.*did.*MyCustomTrainer"):
        build_trainer({**config, "custom_trainer_class_name": "MyTrainer"})
    with pytest.raises(ConfigError, match=r"my_trainr\.py.*did"):
        build_trainer({**config, "custom_trainer_module_path": "recipe/my_task/my_trainr.py"})
    write("recipe/my_task/broken.py", "import nonsense_module")
    with pytest.raises(ConfigError, match=r"broken\.py.*broken\.py:1"):
        build_trainer({**config, "custom_trainer_module_path": "recipe/my_task/broken.py"})
