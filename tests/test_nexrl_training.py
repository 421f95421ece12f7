"""Training with NexRL's trainers: losses, checkpoints and recipes."""

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
from retrain.errors import AdapterError, CheckpointError, ConfigError, PluginError
from retrain.trainer.nexrl import (
    BaseTrainer,
    RemoteApiCrossEntropyTrainer,
    SelfHostedGrpoTrainer,
    SelfHostedTrainer,
    Trajectory,
    TrajectoryPool,
    build_trainer,
    load_recipe,
)
from retrain.trainer.nexrl.__main__ import main
from tests.nexrl_kit import LOCAL, ROWS, replies

pytestmark = pytest.mark.usefixtures("own_folder")  # of its service

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
