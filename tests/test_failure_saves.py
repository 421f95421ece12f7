"""A run that fails: what it saves, and what neither hides nor delays its end (P13)."""

import asyncio
import math
from dataclasses import replace

import pytest

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.errors import AdapterError, DeadlineError, StallError, UserCodeError
from retrain.observe.callbacks import Callback
from retrain.observe.run_dir import read_metrics
from retrain.pipeline import train, verify
from retrain.pipeline.checkpoint import Checkpoints
from retrain.prompts import ListPrompts
from tests.failure_kit import (
    STEPS,
    Raises,
    cancel_the_caller,
    config_in,
    steps_of,
    throws,
    trained_once,
)
from tests.pipe_kit import events, parts_with


class Fails(MockAdapter):
    """Fails in its `at`th call of `method`."""

    method, at, calls = "update", 5, 0

    def _count(self, method):
        if self.method == method:
            self.calls += 1
            if self.calls == self.at:
                raise AdapterError(f"{method} failed")

    async def update(self, batch):
        self._count("update")
        metrics = await super().update(batch)
        self._count("after update")
        return {**metrics, "loss": math.nan} if self._is("nan") else metrics

    def _is(self, method):
        return self.method == method and self.version == self.at

    async def publish(self):
        self._count("publish")
        return await super().publish()

    async def sample(self, prompt_ids, params, n=1):
        checks = params.max_tokens == verify.TOKENS
        if self._is("check") if checks else self._is("sample"):
            raise AdapterError(f"{self.method} failed")
        return await super().sample(prompt_ids, params, n)

    async def own_logprobs(self, sequences):
        return [[-1.0] * len(row) for row in sequences]


class Hangs(Fails):
    saves = 0

    async def publish(self):
        if self.version == 1:
            await asyncio.get_running_loop().create_future()
        return await super().publish()

    async def save(self, folder):
        self.saves += 1
        return await super().save(folder)


async def test_an_adapter_whose_publish_hangs_is_not_asked_to_save(tmp_path):
    limits = {"publish": 0.1, "checkpoint": 60}
    config = config_in(tmp_path, checkpoint={"every": 1}, deadlines=limits)
    adapter = Hangs(MockOptions(), config)
    with pytest.raises(DeadlineError, match=r"publish .*deadlines\.publish"):
        await train(config, parts=parts_with(config, adapter))
    assert adapter.saves == 1


@pytest.mark.parametrize(
    ("how", "saved"),
    [
        ("on_step_begin", 4),
        ("on_step_end", 5),
        ("sample", 5),
        ("update", None),
        ("after update", None),
        ("publish", 5),
        ("check", 5),
        ("nan", None),
    ],
)
async def test_p13_a_failing_run_saves_its_last_step_if_the_weights_are_good(
    tmp_path, monkeypatch, how, saved
):
    config = config_in(tmp_path, staleness={"target": 0})
    adapter = Fails(MockOptions(), config)
    adapter.method = how
    if how == "check":
        monkeypatch.setattr(verify, "REST", 0.0)
        adapter.capabilities = replace(adapter.capabilities, checks="free")
    message = "my callback" if how.startswith("on_") else f"{how} failed"
    message = "the loss of step 6 is nan" if how == "nan" else message
    with pytest.raises((AdapterError, ValueError), match=message) as caught:
        await train(config, callbacks=[Raises(how)], parts=parts_with(config, adapter))
    assert Checkpoints(tmp_path / "checkpoints").steps() == ([] if saved is None else [saved])
    notes = getattr(caught.value, "__notes__", [])
    assert any("--resume" in note for note in notes) == (saved is not None)
    if saved is not None:
        assert (await train(config, resume=True)).total_steps == STEPS
        assert steps_of(tmp_path) == list(range(1, STEPS + 1))
        assert trained_once(tmp_path)


class Cancels(ListPrompts):
    """Cancels the task that reads it, once `armed`."""

    armed = False

    def row(self, index):
        if Cancels.armed:
            asyncio.current_task().cancel()
        return super().row(index)


@pytest.mark.parametrize(
    ("at", "message"),
    [("sampler", "sample failed"), ("source", "'feed'")],
)
async def test_p13_a_stage_that_fails_lets_the_update_under_way_end(
    tmp_path, monkeypatch, at, message
):
    class Slow(MockAdapter):
        stopping = asyncio.Event()

        def stop_retrying(self):
            self.stopping.set()

        async def update(self, batch):
            if self.version == 3:
                await self.stopping.wait()
            return await super().update(batch)

        async def publish(self):
            if self.version == 2 and at == "source":
                monkeypatch.setattr(Cancels, "armed", True)
            return await super().publish()

        async def sample(self, prompt_ids, params, n=1):
            if self.version == 3 and at == "sampler":
                raise AdapterError("sample failed")
            return await super().sample(prompt_ids, params, n)

    prompts = mock_config(tmp_path).prompts.model_dump() | {"type": f"{__name__}:Cancels"}
    config = config_in(tmp_path, staleness={"target": 1, "max": 2}, prompts=prompts)
    async with asyncio.timeout(30):
        parts = parts_with(config, Slow(MockOptions(), config))
        with pytest.raises((AdapterError, UserCodeError), match=message):
            await train(config, parts=parts, console=False)  # it would delay the next step
    assert Checkpoints(tmp_path / "checkpoints").steps() == [4]


async def cancel_while_waiting():
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


class Worst(Callback):
    """Does its worst in one hook, from step 5 on."""

    def __init__(self, hook, worst):
        self.hook, self.worst = hook, worst
        for name in ("on_step_begin", "on_step_end", "on_eval_end", "on_train_end", "state_dict"):
            if hook == name:
                setattr(self, name, self._act)
        self.begun = 0

    def on_epoch_begin(self, trainer, epoch):
        self.trainer = trainer

    def _act(self, *arguments):
        if self.hook == "state_dict" and self.worst is None:
            return {(1, 2): 3}
        late = self.hook in ("state_dict", "on_train_end")
        return self.worst() if late or self.trainer.step >= 4 else None


@pytest.mark.parametrize("worst", [cancel_the_caller, cancel_while_waiting, throws(SystemExit(0))])
@pytest.mark.parametrize("hook", ["on_step_begin", "on_step_end", "on_eval_end"])
async def test_p13_no_callback_costs_a_step(tmp_path, hook, worst):
    """A cancellation used to hit the next await: that of an update, which then was lost."""
    evaluates = {"prompts": mock_config(tmp_path).prompts.model_dump(), "every": 4}
    config = config_in(tmp_path, staleness={"target": 0}, eval=evaluates)
    async with asyncio.timeout(30):
        with pytest.raises(UserCodeError, match=r"user code (cancelled|raised SystemExit: 0)"):
            await train(config, callbacks=[Worst(hook, worst)])
    last = events(tmp_path, "update")[-1]["step"]
    assert max(Checkpoints(tmp_path / "checkpoints").steps()) == last >= 4
    assert f"raised by the callback Worst.{hook}" in (tmp_path / "error.txt").read_text()
    assert (await train(config, resume=True)).total_steps == STEPS
    assert trained_once(tmp_path)
    assert [row["step"] for row in read_metrics(tmp_path) if row.get("eval/step") == 4] == [5]


@pytest.mark.parametrize("worst", [throws(ValueError("no state")), cancel_the_caller, None])
async def test_p13_a_callback_without_a_state_costs_no_checkpoint(tmp_path, worst):
    config = config_in(tmp_path, checkpoint={"every": 4})
    with pytest.raises((ValueError, TypeError, UserCodeError)):
        await train(config, callbacks=[Worst("state_dict", worst)])
    assert 4 in Checkpoints(tmp_path / "checkpoints").steps()
    assert "Worst.state_dict" in (tmp_path / "error.txt").read_text()
    assert (await train(config, resume=True)).total_steps == STEPS
    assert trained_once(tmp_path)


async def test_p1_a_resume_that_fails_keeps_the_checkpoint(tmp_path):
    """It used to write another one over it, with the weights and the position of a new run."""

    class Counts(Callback):
        fails = True

        def state_dict(self):
            return {"steps": 4}

        def load_state_dict(self, state):
            if Counts.fails:
                raise ValueError("an older state")

    await train(config_in(tmp_path, train={"total_train_steps": 4}), callbacks=[Counts()])
    kept = (tmp_path / "checkpoints" / "step_4" / "run.json").read_bytes()
    with pytest.raises(ValueError, match="an older state") as caught:
        await train(config_in(tmp_path), callbacks=[Counts()], resume=True)
    assert caught.value.__notes__[0] == "raised by the callback Counts.load_state_dict"
    assert "step_4. " in caught.value.__notes__[1]
    assert (tmp_path / "checkpoints" / "step_4" / "run.json").read_bytes() == kept
    Counts.fails = False
    await train(config_in(tmp_path), callbacks=[Counts()], resume=True)
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    assert trained_once(tmp_path)


class HearsTheEnd(Callback):
    def on_train_end(self, trainer, result):
        self.status = result.status


@pytest.mark.parametrize(
    ("worst", "error", "message"),
    [
        (cancel_while_waiting, UserCodeError, "'Worst.on_train_end'"),
        (throws(SystemExit(0)), UserCodeError, "SystemExit: 0"),
        (
            asyncio.Event().wait,
            DeadlineError,
            "^Worst.on_train_end .*deadlines.stall = 2.0 s",
        ),
    ],
)
async def test_a_callback_can_neither_hide_nor_delay_the_end(tmp_path, worst, error, message):
    """Its cancellation used to look like Ctrl-C, and one that hung kept the process for ever."""
    config = config_in(tmp_path, deadlines={"stall": 2.0})
    async with asyncio.timeout(30):
        with pytest.raises(error, match=message):
            await train(config, callbacks=[Worst("on_train_end", worst), (last := HearsTheEnd())])
    assert events(tmp_path, "end")[-1]["status"] == "completed"
    assert last.status == "completed", "the callbacks after it are called too"


async def test_p1_stopping_many_times_loses_no_finished_group(tmp_path):
    class Stops(Callback):
        async def on_step_begin(self, trainer, step):
            if step == 3:
                for _ in range(99):
                    trainer.request_stop()
                for _ in range(999):  # until all groups that may be open are played
                    await asyncio.sleep(0)

    config = config_in(tmp_path, staleness={"target": 1, "max": 2})
    async with asyncio.timeout(30):
        await train(config, callbacks=[Stops()])
    assert (await train(config, resume=True)).total_steps == STEPS
    assert trained_once(tmp_path)


async def test_p13_a_run_that_stalls_saves_its_last_step(tmp_path):
    class Hangs(MockAdapter):
        async def sample(self, prompt_ids, params, n=1):
            if self.version == 3:
                await asyncio.Event().wait()
            return await super().sample(prompt_ids, params, n)

    config = config_in(tmp_path, staleness={"target": 0}, deadlines={"stall": 0.5})
    with pytest.raises(StallError, match="no progress") as caught:
        await train(config, parts=parts_with(config, Hangs(MockOptions(), config)))
    assert Checkpoints(tmp_path / "checkpoints").steps() == [3]
    assert "step_3." in caught.value.__notes__[-1]
    assert events(tmp_path, "end")[0]["error"]["type"] == "StallError"
    assert (await train(config, resume=True)).total_steps == STEPS


async def test_p13_a_checkpoint_that_fails_too_doesnt_hide_the_first_error(tmp_path):
    class Full(MockAdapter):
        async def save(self, folder):
            raise OSError(28, "No space left on device")

    config = config_in(tmp_path)
    with pytest.raises(ValueError, match="my callback") as caught:
        await train(
            config,
            callbacks=[Raises("on_step_end")],
            parts=parts_with(config, Full(MockOptions(), config)),
        )
    [note] = [n for n in caught.value.__notes__ if "no checkpoint of step 5 was written" in n]
    assert "No space left" in note
