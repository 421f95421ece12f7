"""Every example of NexRL's pages on trainers and on remote ones, with its import lines.

Model, data and sizes are changed. Files of a recipe are written into a workspace, as the pages lay
them out. Where an example is pseudo-code, the smallest completion that means something stands
beside it.
"""

from __future__ import annotations

import inspect
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import yaml

from retrain.errors import ConfigError
from retrain.trainer.nexrl import (
    BaseTrainer,
    RemoteApiCrossEntropyTrainer,
    RemoteApiGrpoTrainer,
    RemoteApiTrainer,
    SelfHostedGrpoTrainer,
    SelfHostedTrainer,
    TinkerServiceHolder,
    Trajectory,
    TrajectoryPool,
    WeaverServiceHolder,
    build_trainer,
    compute_grpo_advantage_for_trajectories,
    convert_trajectories_to_datums,
    load_recipe,
    log_grpo_metrics,
    log_rollout_metrics,
    select_trainer,
)
from retrain.trainer.nexrl.settings import read_settings
from tests.nexrl_kit import REST, ROWS, metrics_of, text_trajectories, write

pytestmark = pytest.mark.usefixtures("own_folder")  # of its service

logger = logging.getLogger(__name__)


SUPERVISED = f"""
model: tiny
prompts: {json.dumps(ROWS)}
train: {{groups_per_step: 4}}
"""
"""That of a supervised one, which plays nothing."""


# --- trainers-overview.md


def test_the_base_trainer_has_the_pages_signatures() -> None:
    assert inspect.isabstract(BaseTrainer)
    assert BaseTrainer.__abstractmethods__ == {"train"}
    for name, parameters in {
        "__init__": ["self", "config"],
        "train": ["self", "trajectories"],
        "initialize_workers": ["self"],
        "run": ["self"],
        "set_module_references": ["self", "trajectory_pool", "weight_sync_controller"],
    }.items():
        assert list(inspect.signature(getattr(BaseTrainer, name)).parameters)[:3] == parameters
    assert callable(BaseTrainer.stop)
    assert SelfHostedTrainer.__abstractmethods__ == {"_prepare_batch"}
    assert RemoteApiTrainer.__abstractmethods__ == {"_prepare_trajectories"}


def test_the_pages_main_loop_runs_as_it_stands() -> None:
    class Loop(BaseTrainer):
        def train(self, trajectories):
            return {"seen": float(len(trajectories))}

        def _main_loop(self):
            while not self._stop_event.is_set() and self._train_step < self._total_train_steps:
                # 1. Get batch from trajectory pool
                trajectories = self._trajectory_pool.get_batch_blocking()

                # 2. Train on trajectories (algorithm-specific)
                metrics = self.train(trajectories)

                # 3. Update step counter
                self._train_step += 1

                # 4. Log metrics
                self._activity_tracker.log_train_step(metrics, self._train_step)

    trainer = Loop({"total_train_steps": 3})
    pool = TrajectoryPool(batch_size=2)
    trainer.set_module_references(pool, None)
    trainer.run()
    pool.put_batch([{"reward": 0.0}] * 6)
    trainer.wait(10)
    trainer.stop()
    assert trainer._activity_tracker.history == [{"step": step, "seen": 2.0} for step in (1, 2, 3)]


OVERVIEW = """
trainer:
  # Training duration
  total_train_steps: 100

  # Trainer class selection (auto-selected based on backend)
  # - SelfHostedGrpoTrainer (for self-hosted + GRPO)
  # - RemoteApiGrpoTrainer (for remote + GRPO)
  # - RemoteApiCrossEntropyTrainer (for remote + supervised)

  # Backend configuration
  train_service:
    backend: "self-hosted"  # or "tinker", "weaver"
    url: "http://localhost:5000"
    world_size: 8  # for self-hosted
"""


def test_the_overviews_config_asks_for_eight_processes() -> None:
    config = yaml.safe_load(OVERVIEW)
    assert read_settings(config["trainer"]).run.backend.model_extra["processes"] == 8
    config["trainer"]["train_service"]["backend"] = "tinker"
    with pytest.raises(ConfigError, match="world_size: got 8"):
        build_trainer(config)


@pytest.mark.parametrize(
    ("backend", "cls"),
    [
        ("self-hosted", SelfHostedGrpoTrainer),
        ("tinker", RemoteApiGrpoTrainer),
        ("weaver", RemoteApiGrpoTrainer),
    ],
)
def test_the_overviews_config_selects_its_trainer(backend, cls) -> None:
    config = yaml.safe_load(OVERVIEW)
    config["trainer"]["train_service"]["backend"] = backend
    if backend != "self-hosted":
        config["trainer"]["train_service"]["world_size"] = 1
    trainer = build_trainer(config)
    assert type(trainer) is cls is select_trainer(config)
    assert trainer._total_train_steps == 100


# --- remote-api-trainers.md

REMOTE_GRPO = """
trainer:
  total_train_steps: 100

  train_service:
    backend: "tinker"  # or "weaver"
    url: "local"

    config:
      # Training hyperparameters
      loss_fn: "importance_sampling"
      learning_rate: 2e-6
      beta1: 0.9
      beta2: 0.95
      eps: 1e-8

algorithm:
  # Trainer is auto-selected as RemoteApiGrpoTrainer
  # GRPO uses run_id grouping automatically
"""

REMOTE_CROSS_ENTROPY = """
trainer:
  total_train_steps: 100

  train_service:
    backend: "weaver"
    url: "local"

    config:
      loss_fn: "cross_entropy"
      learning_rate: 1e-5
      beta1: 0.9
      beta2: 0.999

algorithm:
  # Trainer is auto-selected as RemoteApiCrossEntropyTrainer
"""


def remote_config(text: str = REMOTE_GRPO, backend: str | None = None) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(text)
    if backend:
        config["trainer"]["train_service"]["backend"] = backend
    return config


class PageTrainer(RemoteApiTrainer):
    """`train` and `_prepare_trajectories` as the page shows them, `train_config` completed."""

    def train(self, trajectories: list[Trajectory]) -> dict:
        metrics: dict[str, Any] = {}

        # 1. Prepare trajectories (algorithm-specific)
        trajectories = self._prepare_trajectories(trajectories, metrics)

        # 2. Log rollout metrics
        log_rollout_metrics(trajectories, metrics, prefix="rollout/")

        # 3. Convert trajectories to service datums
        datums = convert_trajectories_to_datums(trajectories)

        # 4. Call remote API
        train_config = {"loss_fn": "importance_sampling", "learning_rate": 2e-6}
        response = self._service_holder.train(datums, config=train_config)

        # 5. Update metrics and counters
        metrics.update(response.get("metrics", {}))
        self._train_step += 1

        return metrics

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        # Compute GRPO advantages (groups by run_id)
        trajectories = compute_grpo_advantage_for_trajectories(
            trajectories, logger=logger, use_run_ids=True
        )

        # Log GRPO statistics
        log_grpo_metrics(trajectories, metrics)

        return trajectories


def holder_of(backend: str, url: str = "local") -> Any:
    # Controller sets the service holder
    if backend == "tinker":
        service_holder = TinkerServiceHolder(url)
    elif backend == "weaver":
        service_holder = WeaverServiceHolder(url)
    return service_holder


@pytest.mark.parametrize("backend", ["tinker", "weaver"])
def test_the_pages_train_with_the_holder_pattern_trains_and_counts_once(backend) -> None:
    with PageTrainer(remote_config(backend=backend)) as trainer:
        trainer.set_service_holder(holder_of(backend))
        metrics = trainer.advance(text_trajectories())
        assert trainer.step == 1
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["critic/grpo_num_groups"] == 2
    assert metrics["training/num_datums"] == 4
    assert metrics["tokens/trained"] > 0
    # on-policy, so the loss of centred advantages of equal lengths is 0
    assert metrics["loss"] == pytest.approx(0.0, abs=1e-5)


def test_the_grpo_config_selects_its_trainer_and_sets_its_numbers() -> None:
    trainer = build_trainer(remote_config())
    assert type(trainer) is RemoteApiGrpoTrainer
    assert trainer.train_config == {
        "loss_fn": "importance_sampling",
        "learning_rate": 2e-6,
        "beta1": 0.9,
        "beta2": 0.95,
        "eps": 1e-8,
    }


def test_the_cross_entropy_config_selects_its_trainer_which_trains_end_to_end() -> None:
    trainer = build_trainer(remote_config(REMOTE_CROSS_ENTROPY))
    assert type(trainer) is RemoteApiCrossEntropyTrainer
    trajectories = [
        Trajectory(prompt="a=", response="aaaa"),
        Trajectory(prompt="b=", response="bbbb"),
    ]
    assert trainer._prepare_trajectories(trajectories, {}) is trajectories
    with trainer:
        losses = [trainer.advance(trajectories)["loss"] for _ in range(3)]
    assert losses[0] > losses[1] > losses[2]


def test_a_datum_has_the_pages_fields() -> None:
    # Trajectory format
    trajectories = [
        {
            "prompt": "What is 2+2?",
            "response": "The answer is 4.",
            "reward": 1.0,
            "run_id": "uid_123_run_0",
            "advantage": 0.5,  # Added by _prepare_trajectories
        }
    ]
    datums = convert_trajectories_to_datums(trajectories)
    assert datums == [
        {
            "prompt": "What is 2+2?",
            "response": "The answer is 4.",
            "advantage": 0.5,
            "metadata": {"reward": 1.0, "run_id": "uid_123_run_0"},
        }
    ]


async def test_the_examples_run_from_their_config_alone(own_folder: Path) -> None:
    for index, text in enumerate((REMOTE_GRPO, REMOTE_CROSS_ENTROPY)):
        short = text.replace("total_train_steps: 100", "total_train_steps: 2")
        recipe = load_recipe(write(f"usage{index}.yaml", short + (REST, SUPERVISED)[index]))
        result = await recipe.train()
        assert result.status == "completed"
        assert result.total_steps == 2
        rows = metrics_of(result.run_dir)
        assert all(row["training/num_datums"] == (16, 4)[index] for row in rows if "loss" in row)
        assert [row["step"] for row in rows] == [1, 2]
    assert rows[1]["loss"] < rows[0]["loss"]  # the supervised one


def compute_custom_value(traj: Trajectory) -> float:
    return 2 * traj.reward


def test_a_custom_remote_trainer_sets_fields_of_its_own() -> None:
    class MyCustomRemoteTrainer(RemoteApiTrainer):
        def _prepare_trajectories(
            self, trajectories: list[Trajectory], metrics: dict
        ) -> list[Trajectory]:
            # Your custom algorithm logic
            for traj in trajectories:
                # Add custom fields
                traj.custom_field = compute_custom_value(traj)

            return trajectories

    prepared = MyCustomRemoteTrainer(remote_config())._prepare_trajectories(text_trajectories(), {})
    assert [traj["custom_field"] for traj in prepared] == [2.0, 0.0, 0.0, 2.0]
    datums = convert_trajectories_to_datums(prepared)
    assert datums[0]["metadata"]["custom_field"] == 2.0
