"""NexRL's trainers at work: their loop, their backends, and what they refuse."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from retrain.adapters.tinker.options import TinkerOptions
from retrain.engine.losses import token_logprobs
from retrain.engine.models import load_model
from retrain.engine.tiny import tiny_folder
from retrain.errors import (
    AdapterError,
    CheckpointError,
    ConfigError,
    DeadlineError,
    PluginError,
    RunError,
)
from retrain.trainer.nexrl import (
    BaseTrainer,
    RemoteApiCrossEntropyTrainer,
    RemoteApiGrpoTrainer,
    SelfHostedGrpoTrainer,
    SelfHostedTrainer,
    TinkerServiceHolder,
    Trajectory,
    TrajectoryPool,
    WeaverServiceHolder,
    build_trainer,
    load_recipe,
)
from retrain.trainer.nexrl.__main__ import main

LOCAL = {"backend": "tinker", "url": "local"}
ROWS = [{"prompt": f"{letter}=", "answer": letter * 2} for letter in "abcd"]


class Counting(BaseTrainer):
    """Trains nothing."""

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        return {"reward": sum(t.reward for t in trajectories)}


def replies() -> list[Trajectory]:
    """Two groups of two replies, none of them sampled."""
    return [
        Trajectory(prompt=f"{p}=", response=r, reward=float(p == r[0]), group_id=p, run_id=i)
        for p in "ab"
        for i, r in enumerate(("aa", "bb"))
    ]


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
    trainer.stop()


def test_stop_wakes_a_loop_that_waits_for_its_batch() -> None:
    trainer = Counting({})
    trainer.set_module_references(TrajectoryPool())
    trainer.run()
    trainer.stop(timeout=10)
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


def test_a_pool_wakes_a_waiting_thread() -> None:
    pool, batches = TrajectoryPool(batch_size=1), []
    waiting = threading.Thread(target=lambda: batches.append(pool.get_batch_blocking(10)))
    waiting.start()
    pool.put_trajectory({"reward": 1.0})
    waiting.join(10)
    assert [[t.reward for t in batch] for batch in batches] == [[1.0]]


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


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"train_service": {"backend": "http"}}, r"train_service\.backend: got 'http'"),
        ({"train_service": {"bakend": "tinker"}}, "bakend.*backend"),
        ({"total_train_steps": -1}, "total_train_steps: got -1"),
        ({"nonsense": 1}, "nonsense"),
        ({"algorithm": {"epps": 1.0}}, "SelfHostedGrpoTrainer"),
        ({"algorithm": {"type": "ppo"}}, "cross_entropy"),
        ({"algorithm": {"type": "cross_entropy"}}, "cross_entropy"),
        ({"custom_trainer_class_name": "X"}, r"trainer\.custom_trainer_module_path"),
        ({"train_service": {"world_size": 0, "tensor_parallel_size": 2}}, "2 problems"),
    ],
)
def test_a_config_that_can_not_be_honoured_is_refused_when_the_trainer_is_built(
    config, message
) -> None:
    with pytest.raises(ConfigError, match=message):
        build_trainer(config)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"loss_fn": "nonsense"}, "loss_fn.*'nonsense'"),
        ({"learnin_rate": 1.0}, "learnin_rate.*learning_rate"),
        ({"beta1": 2.0}, r"beta1: got 2\.0"),
    ],
)
def test_the_backends_own_keys_are_checked_before_it_opens(keys, message) -> None:
    with pytest.raises(ConfigError, match=message):
        RemoteApiGrpoTrainer({"train_service": {**LOCAL, "config": keys}})


def test_a_config_must_be_a_mapping() -> None:
    with pytest.raises(ConfigError, match="got a list"):
        Counting([])  # type: ignore[arg-type]  # a mistake at run time


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


# --- training


def test_text_is_tokenised_once_in_the_models_template() -> None:
    with SelfHostedGrpoTrainer({}) as trainer:
        [trajectory] = tokenised(trainer, [Trajectory(prompt="a=", response="aa")])
        chat, tokenizer = trainer.service.chat, trainer.service.tokenizer
        opening = chat.begin([{"role": "user", "content": "a="}]).prompt_ids
        assert trajectory.tokens[: len(opening)] == opening
        assert trajectory.loss_mask == [0] * len(opening) + [1, 1, 1]
        assert tokenizer.decode(trajectory.tokens[-3:], skip_special_tokens=True) == "aa"
        assert trajectory.tokens[-1] in chat.stop_token_ids
        cut = Trajectory(prompt="a=", response="aa", finish_reason="length")
        tokenised(trainer, [cut])
        assert cut.tokens == trajectory.tokens[:-1]


def tokenised(trainer: BaseTrainer, rows: list[Trajectory]) -> list[Trajectory]:
    for row in rows:
        row.update(trainer.service.encode(row))
    return rows


def reference_cross_entropy(rows: list[Trajectory]) -> float:
    """The mean of -log p over the trained tokens, by plain torch on the untrained model."""
    model = load_model(tiny_folder())
    total, count = 0.0, 0
    for row in rows:
        ids = torch.tensor([row.tokens])
        logprobs = token_logprobs(model(ids).logits[:, :-1], ids[:, 1:])[0]
        mask = torch.tensor(row.loss_mask[1:])
        total -= float((logprobs * mask).sum())
        count += int(mask.sum())
    return total / count


def test_the_supervised_loss_is_plain_cross_entropy() -> None:
    rows = [Trajectory(prompt="a=", response="aa"), Trajectory(prompt="b=", response="bbb")]
    with torch.no_grad(), RemoteApiCrossEntropyTrainer({"train_service": LOCAL}) as trainer:
        rows = tokenised(trainer, rows)
        expected = reference_cross_entropy(rows)
        assert trainer.advance(rows)["loss"] == pytest.approx(expected, rel=1e-4)


def test_a_step_has_the_same_loss_on_every_backend() -> None:
    losses = {}
    for backend in ("self-hosted", "tinker", "weaver"):
        service = {"backend": backend, "config": {"loss_fn": "importance_sampling"}}
        with build_trainer({"train_service": service}) as trainer:
            rows = tokenised(trainer, [Trajectory(t) for t in replies()])
            for row in rows:  # as if older weights had sampled them: the ratio is not 1
                row.logprobs = [-4.0 * on for on in row.loss_mask]
            losses[backend] = trainer.advance(rows)["loss"]
    assert losses["tinker"] == pytest.approx(losses["self-hosted"], abs=1e-4)
    assert losses["weaver"] == pytest.approx(losses["self-hosted"], abs=1e-4)
    assert losses["tinker"] != pytest.approx(0.0, abs=1e-4)


def test_old_log_probs_are_those_of_the_present_weights_where_nobody_sampled() -> None:
    with SelfHostedGrpoTrainer({"train_service": {"config": {"learning_rate": 1e-2}}}) as trainer:
        for _ in range(2):  # in the second step the weights have moved, and so have these
            metrics = trainer.advance([Trajectory(t) for t in replies()])
            assert metrics["ratio/mean"] == pytest.approx(1.0, abs=1e-4)


def test_a_kl_penalty_to_the_starting_weights_grows_as_the_weights_move() -> None:
    config = {
        "algorithm": {"kl_penalty": 0.1},
        "train_service": {"config": {"learning_rate": 1e-2}},
    }
    with SelfHostedGrpoTrainer(config) as trainer:
        charged = [
            trainer.advance([Trajectory(t) for t in replies()])["actor/reward_kl_penalty"]
            for _ in range(3)
        ]
    assert charged[0] == pytest.approx(0.0, abs=1e-4)
    assert abs(charged[2]) > 1e-3


def test_an_advantage_that_is_nan_or_of_the_wrong_shape_is_refused() -> None:
    class Wrong(SelfHostedTrainer):
        advantages: torch.Tensor

        def _prepare_batch(self, batch):
            batch.values["advantages"] = self.advantages
            return batch, {}

    with Wrong({}) as trainer:
        trainer.advantages = torch.full((4,), float("nan"))
        with pytest.raises(ValueError, match="NaN"):
            trainer.train(replies())
        trainer.advantages = torch.ones(4, 2)
        with pytest.raises(ValueError, match=r"\(4, 2\).*input_ids"):
            trainer.train(replies())


def slot_match(trajectory: Trajectory) -> float:
    answer = trajectory.prompt[0] * 2
    return sum(a == b for a, b in zip(answer, trajectory.response, strict=False)) / 2


class Turns:
    """Lets the sampler go on when the new weights are served."""

    def __init__(self) -> None:
        self._served = threading.Semaphore(1)

    def train_worker_notify_weight_update(self) -> None:
        self._served.release()

    def wait(self) -> None:
        assert self._served.acquire(timeout=30)


@pytest.mark.slow
def test_a_trainer_with_its_pool_learns_the_echo_task() -> None:
    config = {
        "total_train_steps": 60,
        "sampling": {"max_tokens": 2},
        "train_service": {"backend": "self-hosted", "config": {"learning_rate": 3e-3}},
    }
    with build_trainer(config) as trainer:
        pool, turns = TrajectoryPool(batch_size=64, group_size=16), Turns()
        trainer.set_module_references(pool, turns)
        trainer.run()
        for step in range(60):
            turns.wait()
            for letter in "abcd":
                for one in trainer.service.sample(f"{letter}=", 16, seed=7 * step + ord(letter)):
                    one.reward = slot_match(one)
                    pool.put_trajectory(one)
        trainer.wait(60)
        history = [row["rollout/reward_mean"] for row in trainer._activity_tracker.history]
    assert sum(history[:6]) / 6 < 0.2
    assert sum(history[-6:]) / 6 > 0.4  # 0.6


@pytest.mark.parametrize("backend", ["self-hosted", "tinker", "weaver"])
def test_a_checkpoint_continues_where_it_was_written(backend, tmp_path: Path) -> None:
    config = {"train_service": {"backend": backend, "config": {"learning_rate": 1e-2}}}
    with build_trainer(config) as trainer:
        trainer.advance([Trajectory(t) for t in replies()])
        trainer.save_checkpoint(tmp_path / "saved")
        expected = trainer.advance([Trajectory(t) for t in replies()])
        if backend != "self-hosted":  # a service keeps its checkpoints while it lives
            trainer.load_checkpoint(tmp_path / "saved", step=1)
            again = trainer.advance([Trajectory(t) for t in replies()])
    if backend == "self-hosted":
        with build_trainer(config) as trainer:
            trainer.load_checkpoint(tmp_path / "saved", step=1)
            again = trainer.advance([Trajectory(t) for t in replies()])
    assert trainer.step == 2
    assert again["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-5)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        build_trainer(config).load_checkpoint(tmp_path / "nowhere")


def test_the_backends_own_loop_can_not_call_its_trainer() -> None:
    with SelfHostedGrpoTrainer({}) as trainer:
        trainer.initialize_workers()
        service = trainer.service

        async def inside() -> None:
            service.logprobs([[1, 2]])

        with pytest.raises(AdapterError, match="deadlock"):
            service._call("update", lambda _: inside())


def test_a_stopped_trainer_does_not_begin_anew_with_other_weights() -> None:
    with SelfHostedGrpoTrainer({}) as trainer:
        trainer.advance(replies())
    with pytest.raises(AdapterError, match="closed"):
        trainer.advance(replies())


def test_a_trainer_says_what_to_install_for_its_backend(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "needs.py").write_text("import surely_not_there")
    monkeypatch.setattr(TinkerOptions, "adapter", f"{tmp_path / 'needs.py'}:Adapter")
    trainer = build_trainer({"train_service": LOCAL})
    with pytest.raises(PluginError, match="surely_not_there"):
        trainer.initialize_workers()


# --- recipes


def recipe(trainer: dict[str, Any], **sections: Any) -> dict[str, Any]:
    return {
        "prompts": ROWS,
        "environment": "echo",
        "rewards": "slot_match",
        "sampling": {"max_tokens": 2},
        "train": {"groups_per_step": 2},
        "trainer": trainer,
        **sections,
    }


async def test_a_recipe_resumes_with_its_trainers_step(tmp_path: Path) -> None:
    run_dir = str(tmp_path / "run")
    first = load_recipe(recipe({"total_train_steps": 2}, run_dir=run_dir))
    await first.train()
    assert first.trainer.step == 2
    second = load_recipe(recipe({"total_train_steps": 3}, run_dir=run_dir))
    result = await second.train(resume=True)
    assert result.total_steps == second.trainer.step == 3


async def test_a_trainer_that_overrides_train_has_the_last_word(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from retrain.trainer.nexrl import BaseTrainer\n"
        "class Watching(BaseTrainer):\n"
        "    def train(self, trajectories):\n"
        "        return {'mine/answers': len({t.ground_truth for t in trajectories})}\n"
    )
    config = recipe(
        {"custom_trainer_module_path": str(path), "total_train_steps": 2},
        run_dir=str(tmp_path / "r"),
    )
    result = await load_recipe(config).train()
    assert [row["mine/answers"] for row in result.history] == [2, 2]


async def test_what_a_hook_raises_ends_the_run(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(
        "from retrain.trainer.nexrl import SelfHostedTrainer\n"
        "class Broken(SelfHostedTrainer):\n"
        "    def _prepare_batch(self, batch):\n"
        "        return batch, {}\n"
    )
    config = recipe({"custom_trainer_module_path": str(path)}, run_dir=str(tmp_path / "r"))
    with pytest.raises(KeyError, match="'advantages'"):
        await load_recipe(config).train()


def test_a_recipe_without_prompts_or_of_another_mode_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ConfigError, match="prompts"):
        load_recipe({"trainer": {}})
    file = tmp_path / "recipe.yaml"
    file.write_text(json.dumps(recipe({"train_service": LOCAL})))
    assert main(["-m", "self-hosted", "-c", str(file), "--run-nexrl"]) == 2
    assert "train_service.backend" in capsys.readouterr().err
    assert main(["-c", str(file)]) == 0
    assert "the recipe is valid" in capsys.readouterr().out


def test_every_public_name_loads() -> None:
    from retrain.trainer import nexrl

    for name in nexrl.__all__:
        assert getattr(nexrl, name) is not None
        assert name in dir(nexrl)
    with pytest.raises(AttributeError, match="'nonsense'"):
        _ = nexrl.nonsense
