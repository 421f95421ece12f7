"""NexRL's trainers: their loop, their pool, their config and their holders."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from retrain.errors import ConfigError, DeadlineError, RunError
from retrain.trainer.nexrl import (
    BaseTrainer,
    RemoteApiCrossEntropyTrainer,
    RemoteApiGrpoTrainer,
    SelfHostedGrpoTrainer,
    TinkerServiceHolder,
    Trajectory,
    TrajectoryPool,
    WeaverServiceHolder,
    build_trainer,
)
from tests.nexrl_kit import LOCAL, replies

pytestmark = pytest.mark.usefixtures("own_folder")  # of its service


class Counting(BaseTrainer):
    """Trains nothing."""

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        return {"reward": sum(t.reward for t in trajectories)}


# --- the loop


def test_run_trains_every_batch_and_tells_of_new_weights() -> None:
    class Told:
        times = 0

        def train_worker_notify_weight_update(self) -> None:
            self.times += 1

    controller, pool = Told(), TrajectoryPool(batch_size=1)
    trainer = Counting({"total_train_steps": 3})
    trainer.set_module_references(pool, controller)
    trainer.run()
    pool.put_batch([{"reward": float(number)} for number in range(3)])
    trainer.wait(10)
    assert [row["reward"] for row in trainer._activity_tracker.history] == [0, 1, 2]
    assert controller.times == trainer.step == 3


def test_run_needs_a_pool_and_runs_once() -> None:
    trainer = Counting({})
    with pytest.raises(RunError, match="set_module_references"):
        trainer.run()
    trainer.set_module_references(TrajectoryPool())
    trainer.run()
    with pytest.raises(RunError, match="already running"):
        trainer.run()
    trainer.stop(timeout=10)  # wakes the loop, which waits for its batch
    assert trainer.step == 0


def test_what_the_loop_fails_with_is_raised_by_wait_and_stop() -> None:
    class Failing(BaseTrainer):
        def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
            raise ZeroDivisionError("in train")

    for method in ("wait", "stop"):
        trainer = Failing({})
        pool = TrajectoryPool(batch_size=1)
        trainer.set_module_references(pool)
        pool.put_trajectory({"reward": 1.0})
        trainer.run()
        with pytest.raises(ZeroDivisionError, match="in train"):
            getattr(trainer, method)()


def test_a_pool_that_never_answers_ends_stop_with_a_deadline() -> None:
    release = threading.Event()

    class Deaf:
        def get_batch_blocking(self) -> list[Trajectory]:
            release.wait()
            return []

    trainer = Counting({"total_train_steps": 5})
    trainer.set_module_references(Deaf())
    trainer.run()
    with pytest.raises(DeadlineError, match=r"0\.01.*step 0.*5"):
        trainer.stop(timeout=0.01)
    release.set()
    trainer.wait(10)


# --- the pool


def test_a_pool_hands_out_whole_groups() -> None:
    pool = TrajectoryPool(batch_size=3, group_size=2)
    for group in ("a", "b", "a", "b"):
        pool.put_trajectory({"group_id": group, "reward": 0.0})
    assert [t.group_id for t in pool.get_batch_blocking(1)] == ["a", "a", "b", "b"]
    with pytest.raises(TimeoutError):
        pool.get_batch_blocking(timeout=0.0)


def test_a_closed_pool_gives_what_is_left_and_then_nothing() -> None:
    pool = TrajectoryPool(batch_size=8)
    pool.put_trajectory({"reward": 1.0})
    pool.close()
    assert len(pool.get_batch_blocking()) == 1
    assert pool.get_batch_blocking() == []
    with pytest.raises(RuntimeError, match="closed"):
        pool.put_trajectory({"reward": 1.0})
    with pytest.raises(ConfigError, match="at least 1"):
        TrajectoryPool(batch_size=0)


# --- what a config may say


def remote(**keys: Any) -> dict[str, Any]:
    return {"train_service": {**LOCAL, "config": keys}}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_service": {"backend": "http"}}, r"train_service\.backend: got 'http'"),
        ({"train_service": {"bakend": "tinker"}}, "bakend.*backend"),
        ({"total_train_steps": -1}, "total_train_steps: got -1"),
        ({"nonsense": 1}, "nonsense"),
        ([], "got a list"),
        ({"algorithm": {"epps": 1.0}}, "SelfHostedGrpoTrainer"),
        ({"algorithm": {"type": "ppo"}}, "cross_entropy"),
        ({"algorithm": {"type": "cross_entropy"}}, "cross_entropy"),
        ({"custom_trainer_class_name": "X"}, r"trainer\.custom_trainer_module_path"),
        ({"train_service": {"world_size": 0, "tensor_parallel_size": 2}}, "2 problems"),
        (remote(loss_fn="nonsense"), "loss_fn.*'nonsense'"),
        (remote(learnin_rate=1.0), "learnin_rate.*learning_rate"),
        (remote(beta1=2.0), r"beta1: got 2\.0"),
    ],
)
def test_a_config_that_can_not_be_honoured_is_refused_when_the_trainer_is_built(
    config, message
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_trainer(config)


def test_a_missing_key_of_the_config_is_named_with_the_others() -> None:
    trainer = Counting({"algorithm": {"gamma": 0.9}})
    assert trainer._config.algorithm.gamma == 0.9
    with pytest.raises(AttributeError, match=r"'gama'\."):
        _ = trainer._config.algorithm.gama


def test_a_remote_trainer_wants_a_service_and_its_own_loss() -> None:
    with pytest.raises(ConfigError, match="tinker or weaver"):
        RemoteApiGrpoTrainer({})
    with pytest.raises(ConfigError, match="cross_entropy"):
        RemoteApiCrossEntropyTrainer(
            {"train_service": {**LOCAL, "config": {"loss_fn": "importance_sampling"}}}
        )
    supervised = RemoteApiCrossEntropyTrainer({"train_service": LOCAL})
    assert supervised.train_config["learning_rate"] == 1e-5


def test_the_only_trainer_of_a_file_needs_no_class_name(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from retrain.trainer.nexrl import SelfHostedGrpoTrainer\n"
        "class Mine(SelfHostedGrpoTrainer): pass\n"
    )
    for path in ("mine.py", str(tmp_path / "mine.py")):
        built = build_trainer({"custom_trainer_module_path": path}, base_dir=tmp_path)
        assert type(built).__name__ == "Mine"


def test_building_a_trainer_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a constructor did I/O")

    build_trainer({})  # reads the keys of TRL's config from its sources, once per process
    monkeypatch.setattr("builtins.open", refuse)
    monkeypatch.setattr("socket.socket.connect", refuse)
    monkeypatch.setattr(Path, "read_text", refuse)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    for config in ({}, {"train_service": LOCAL}, {"train_service": {"backend": "weaver"}}):
        assert build_trainer(config).step == 0
    TinkerServiceHolder("http://service:8000")


# --- holders


def test_a_holder_of_the_other_backend_is_refused() -> None:
    trainer = RemoteApiGrpoTrainer({"train_service": LOCAL})
    with pytest.raises(ConfigError, match="WeaverServiceHolder"):
        trainer.set_service_holder(WeaverServiceHolder("local"))


def test_a_holder_of_ones_own_needs_train_alone() -> None:
    class Own:
        def train(self, datums, config):
            return {"metrics": {"seen": float(len(datums)), "rate": config["learning_rate"]}}

    trainer = RemoteApiGrpoTrainer({"train_service": LOCAL})
    trainer.set_service_holder(Own())
    trainer.initialize_workers()
    metrics = trainer.advance(replies())
    assert metrics["seen"] == 4
    assert metrics["rate"] == 2e-6
    with pytest.raises(AttributeError, match="'save'"):
        trainer.save_checkpoint("folder")
    trainer.stop()


def test_a_step_without_signal_trains_nothing_and_says_so() -> None:
    flat = [Trajectory(t, reward=1.0) for t in replies()]
    with RemoteApiGrpoTrainer({"train_service": LOCAL}) as remote:
        assert remote.advance(flat)["training/skipped"] == 1
        with pytest.raises(ConfigError, match="lr"):
            remote._service_holder.train([], config={"lr": 1.0})
    with SelfHostedGrpoTrainer({}) as here:
        metrics = here.advance([Trajectory(t, reward=1.0) for t in replies()])
    assert metrics["training/skipped"] == 1
    assert metrics["critic/grpo_flat_groups"] == 2


def test_a_steps_own_learning_rate_reaches_the_service() -> None:
    with RemoteApiGrpoTrainer({"train_service": LOCAL}) as trainer:
        holder = trainer._service_holder
        datums = [{"prompt": "a=", "response": "aa", "advantage": 1.0}]
        for rate in (1e-3, 1e-4):
            response = holder.train(datums, config={"learning_rate": rate})
            assert response["metrics"]["learning_rate"] == rate
        with pytest.raises(ConfigError, match=r"learning_rate: got -1\.0"):
            holder.train(datums, config={"learning_rate": -1.0})
