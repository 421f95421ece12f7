"""A trainer's checkpoints: saved, loaded, the best, and those of another training."""

import pytest

from retrain.errors import CheckpointError
from retrain.trainer import Callback, GRPOTrainer, RLOOTrainer
from tests.trainer_kit import ROWS, SMALL, grpo, variety

pytestmark = pytest.mark.usefixtures("own_folder")


# --- checkpoints


def test_a_saved_checkpoint_is_where_another_trainer_goes_on(tmp_path):
    first = grpo()
    saved = first.fit(ROWS, variety, max_steps=2)
    first.save_checkpoint(tmp_path / "saved")
    second = grpo(run_dir="other")
    second.load_checkpoint(str(tmp_path / "saved"))
    assert second.current_step == 2
    result = second.fit(ROWS, variety, max_steps=4)
    assert [row["step"] for row in result.history] == [3, 4]
    published = result.history[0]["grad_norm"] > 0  # a step without a signal publishes nothing
    assert result.history[0]["version"] == saved.metrics["version"] + published


def test_a_checkpoint_asked_for_in_a_hook_is_written_at_that_step_and_outlives_pruning(tmp_path):
    class Save(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 1:
                trainer.save_checkpoint(tmp_path / "first")

    trainer = grpo(checkpoint={"every": 1, "keep": 1})
    result = trainer.fit(ROWS, variety, max_steps=4, callbacks=[Save()])
    assert (result.run_dir / "checkpoints" / "step_1").is_dir()
    trainer.load_checkpoint(tmp_path / "first")
    assert trainer.current_step == 1


def test_the_best_checkpoint_is_the_one_with_the_best_mean_reward():
    rewards = {1: 0.1, 2: 0.9, 3: 0.9, 4: 0.2}
    step = [1]

    class Next(Callback):
        def on_step_end(self, trainer, number, metrics):
            step[0] = number + 1

    trainer = grpo(checkpoint={"every": 1, "keep": 1}, staleness={"target": 0})
    result = trainer.fit(ROWS, lambda p, r: rewards[step[0]], max_steps=4, callbacks=[Next()])
    assert result.best_checkpoint_path == result.run_dir / "checkpoints" / "step_3"
    assert (result.best_checkpoint_path / "manifest.json").exists()


def test_save_checkpoint_refuses_what_it_can_t_do(tmp_path):
    trainer = grpo()
    with pytest.raises(RuntimeError, match="call fit first"):
        trainer.save_checkpoint(tmp_path / "saved")
    trainer.fit(ROWS, variety, max_steps=1)
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes" / "a.txt").touch()
    with pytest.raises(FileExistsError, match="is not a checkpoint"):
        trainer.save_checkpoint(tmp_path / "notes")


def test_load_checkpoint_refuses_what_is_missing_torn_or_of_another_training(tmp_path):
    trainer = grpo()
    with pytest.raises(FileNotFoundError, match="no checkpoint in"):
        trainer.load_checkpoint(tmp_path / "missing")
    (tmp_path / "torn").mkdir()
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        trainer.load_checkpoint(tmp_path / "torn")
    trainer.fit(ROWS, variety, max_steps=1)
    trainer.save_checkpoint(tmp_path / "saved")
    keys = {key: value for key, value in SMALL.items() if key != "run_dir"}
    with pytest.raises(CheckpointError, match=r"backend.type: was 'benchmarks.mock_engine"):
        RLOOTrainer.from_pretrained("tiny").load_checkpoint(tmp_path / "saved")
    other = RLOOTrainer.from_pretrained("tiny", **keys)
    with pytest.raises(CheckpointError, match=r"'grpo'.*'rloo'; strict=False"):
        other.load_checkpoint(tmp_path / "saved")
    other.load_checkpoint(tmp_path / "saved", strict=False)
    assert other.fit(ROWS, variety, max_steps=2).total_steps == 2


def test_a_callback_s_state_is_kept_with_the_checkpoint():
    class Counter(Callback):
        seen = 0

        def on_step_end(self, trainer, step, metrics):
            self.seen += 1

        def state_dict(self):
            return {"seen": self.seen}

        def load_state_dict(self, state):
            self.seen = state["seen"]

    trainer, second = grpo(), Counter()
    trainer.fit(ROWS, variety, max_steps=2, callbacks=[Counter()])
    trainer.fit(ROWS, variety, max_steps=3, callbacks=[second])
    assert second.seen == 3


@pytest.mark.parametrize("service", ["tinker", "weaver"])
def test_a_local_service_s_checkpoint_is_where_other_runs_begin(service, tmp_path):
    keys = {**SMALL, "backend": {"type": service, "url": "local"}, "chat": "auto"}
    first = GRPOTrainer.from_pretrained("tiny", **keys, algorithm={"loss": "ppo"})
    first.fit(ROWS, variety, max_steps=1)
    first.save_checkpoint(tmp_path / "saved")
    assert first.fit(ROWS, variety, max_steps=2).total_steps == 2
    second = GRPOTrainer.from_pretrained("tiny", **keys, algorithm={"loss": "ppo"})
    second.load_checkpoint(tmp_path / "saved")
    assert [row["step"] for row in second.fit(ROWS, variety, max_steps=2).history] == [2]
