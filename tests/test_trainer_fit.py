"""How long a trainer trains, what a second fit does, and its callbacks."""

import asyncio
import signal

import pytest

from benchmarks.mock_engine import MockAdapter
from retrain.errors import NoSignalError
from retrain.trainer import Callback
from tests.trainer_kit import ROWS, grpo, rollouts, variety

pytestmark = pytest.mark.usefixtures("own_folder")


# --- how long


@pytest.mark.parametrize("name", ["max_steps", "max_epochs"])
def test_a_bad_limit_is_refused_before_anything_loads(name, nothing_loads):
    with pytest.raises(ValueError, match=f"{name}: got -1"):
        grpo().fit(ROWS, variety, **{name: -1})
    with pytest.raises(ValueError, match=f"{name}: got True"):
        grpo().fit(ROWS, variety, **{name: True})
    with pytest.raises(ValueError, match=f"{name}: got '3'"):
        grpo().fit(ROWS, variety, **{name: "3"})


@pytest.mark.parametrize(
    ("limits", "steps", "epochs"),
    [
        ({}, 2, 1),
        ({"max_epochs": 2}, 4, 2),
        ({"max_steps": 3}, 3, 1),
        ({"max_steps": 3, "max_epochs": 1}, 2, 1),
        ({"max_steps": 0}, 0, 0),
        ({"max_epochs": 0}, 0, 0),
    ],
)
def test_the_limit_that_comes_first_ends_training(limits, steps, epochs):
    result = grpo().fit(ROWS, variety, **limits)
    assert (result.total_steps, result.total_epochs) == (steps, epochs)
    assert len(result.history) == steps


def test_limits_of_the_config_are_overridden_by_fit():
    assert grpo(max_steps=1).fit(ROWS, variety, max_steps=2).total_steps == 2
    assert grpo(max_epochs=1).fit(ROWS, variety).total_steps == 2


def test_fewer_rows_than_a_step_takes_are_gone_through_again():
    result = grpo(num_prompts_per_step=8).fit(ROWS[:3], variety)
    assert (result.total_steps, result.total_epochs) == (1, 2)


def test_a_prompt_as_long_as_the_limit_is_left_out_and_counted():
    rows = [{"prompt": "x" * 40}, *ROWS]
    result = grpo(max_sequence_length=20, num_prompts_per_step=4, max_epochs=2).fit(rows, variety)
    assert sum(row["groups/dropped_failed"] for row in result.history) >= 1
    played = [r for r in rollouts(result) if r["outcome"] == "ok"]
    assert all(len(r["messages"][0]["content"]) < 20 for r in played)


def test_a_run_whose_prompts_are_all_too_long_ends_and_names_the_limit():
    with pytest.raises(NoSignalError, match=r"20, .*rollout\.max_sequence_length\."):
        grpo(max_sequence_length=20).fit([{"prompt": "x" * 40}], variety)


# --- again


def test_a_second_fit_goes_on_and_limits_are_absolute():
    trainer = grpo()
    assert trainer.fit(ROWS, variety, max_steps=2).total_steps == 2
    again = trainer.fit(ROWS, variety, max_steps=5)
    assert (again.total_steps, len(again.history), again.total_epochs) == (5, 3, 2)
    assert [row["step"] for row in again.history] == [3, 4, 5]
    done = trainer.fit(ROWS, variety, max_steps=5)
    assert (done.total_steps, len(done.history)) == (5, 0)
    assert done.metrics == again.metrics
    assert trainer.current_step == 5


def test_a_second_fit_on_other_rows_begins_them_anew_with_the_weights_of_the_first(monkeypatch):
    trainer = grpo()
    first = trainer.fit(ROWS, variety, max_steps=3)
    loaded = []
    load = MockAdapter.load

    async def watched(self, state):
        loaded.append(state.data["version"])
        await load(self, state)

    monkeypatch.setattr(MockAdapter, "load", watched)
    result = trainer.fit(ROWS[:2], variety, max_epochs=2)
    assert loaded == [first.metrics["version"]]
    assert (result.total_steps, result.total_epochs) == (5, 2)


def test_a_second_fit_at_the_same_time_is_refused():
    trainer = grpo(max_steps=1)
    refused = []

    class Nested(Callback):
        async def on_step_end(self, trainer, step, metrics):
            try:
                await trainer.train(ROWS, variety)
            except RuntimeError:
                refused.append(self)

    trainer.fit(ROWS, variety, callbacks=[Nested()])
    assert len(refused) == 1


async def test_fit_inside_a_running_loop_points_to_train(nothing_loads):
    with pytest.raises(RuntimeError, match=r"`await trainer\.train"):
        grpo().fit(ROWS, variety)


def test_a_first_ctrl_c_checkpoints_and_is_raised():
    class Press(Callback):
        def on_step_end(self, trainer, step, metrics):
            if step == 2:
                signal.raise_signal(signal.SIGINT)

    trainer = grpo(max_steps=100)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's job ignores it
    with pytest.raises(KeyboardInterrupt):
        trainer.fit(ROWS, variety, callbacks=[Press()])
    signal.signal(signal.SIGINT, before)
    assert 2 <= trainer.current_step < 100
    assert trainer.fit(ROWS, variety, max_steps=trainer.current_step + 1).status == "completed"


# --- callbacks


@pytest.mark.parametrize(
    ("callbacks", "text"),
    [
        ([Callback], "Callback'>"),
        ([object()], "retrain.Callback"),
        (Callback, "Callback"),
        (Callback(), "callbacks: got <.*Callback"),
    ],
)
def test_a_bad_callback_is_told_before_any_model_loads(callbacks, text, nothing_loads):
    with pytest.raises(TypeError, match=text):
        grpo().fit(ROWS, variety, callbacks=callbacks)


def test_every_hook_is_called_in_order_with_the_trainer():
    calls = []

    class Sync(Callback):
        def on_epoch_begin(self, trainer, epoch):
            calls.append(("epoch begins", epoch))

        def on_step_begin(self, trainer, step):
            calls.append(("begins", step, trainer.current_step))

        def on_step_end(self, trainer, step, metrics):
            calls.append(("ends", step, trainer.current_step))
            metrics.clear()  # it's a copy of its own

        def on_checkpoint(self, trainer, step, path):
            calls.append(("checkpoint", step))

        def on_train_end(self, trainer, result):
            calls.append(("done", result.status, "mean_reward" in result.metrics))

    class Async(Callback):
        async def on_step_end(self, trainer, step, metrics):
            await asyncio.sleep(0)
            assert all(isinstance(value, float) for value in metrics.values())
            calls.append(("async", step, metrics["mean_reward"] == metrics["reward/mean"]))

        async def on_epoch_end(self, trainer, epoch, metrics):
            calls.append(("epoch", epoch))

    trainer = grpo()
    trainer.fit(ROWS, variety, callbacks=[Sync(), Async()])
    assert calls == [
        ("epoch begins", 1), ("begins", 1, 0), ("ends", 1, 1), ("async", 1, True),
        ("begins", 2, 1), ("ends", 2, 2), ("async", 2, True), ("epoch", 1),
        ("checkpoint", 2), ("done", "completed", True),
    ]  # fmt: skip


@pytest.mark.parametrize(("hook", "steps"), [("on_step_begin", 1), ("on_step_end", 2)])
def test_a_callback_may_ask_for_the_end(hook, steps):
    class Stop(Callback):
        pass

    def stop(self, trainer, step, *_):
        if step == 2:
            trainer.request_stop()

    setattr(Stop, hook, stop)
    result = grpo(max_steps=100).fit(ROWS, variety, callbacks=[Stop()])
    assert (result.status, result.total_steps) == ("completed", steps)


def test_there_is_nothing_to_stop_before_training():
    with pytest.raises(RuntimeError, match="no training is running"):
        grpo().request_stop()
