"""A run that fails: what it saves, what it waits for, and where it says why (P13)."""

import asyncio
import itertools
import logging
import math
import socket
from dataclasses import replace
from unittest.mock import Mock

import aiohttp
import httpx
import pytest

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.errors import (
    AdapterError,
    DeadlineError,
    LateError,
    NonFiniteError,
    NoSignalError,
    OutageError,
    RunError,
    StallError,
    UserCodeError,
    blame,
)
from retrain.observe.callbacks import Callback
from retrain.observe.failure import full_text, single
from retrain.observe.run_dir import read_events, read_metrics, surviving
from retrain.pipeline import outage, train, verify
from retrain.pipeline.checkpoint import Checkpoints
from retrain.prompts import ListPrompts
from retrain.report.page import digest, write_report
from retrain.scoring import RewardCalculator
from retrain.supervision.outages import is_outage
from tests.pipe_kit import events, parts_with, played, rollouts_of, slot_share

STEPS = 8


def config_in(folder, **changes):
    train_keys = {"total_train_steps": STEPS, "max_failed_groups": 4, **changes.pop("train", {})}
    sections = {"checkpoint": {"every": 1000}, "rewards": [{"type": f"{__name__}:Judge"}]}
    return mock_config(folder, train=train_keys, **{**sections, **changes})


def steps_of(folder) -> list[int]:
    return [row["step"] for row in read_metrics(folder)]


def trained_once(folder) -> bool:
    updates = [e for e in surviving(read_events(folder)) if e["event"] == "update"]
    tickets = [ticket for event in updates for ticket in event["tickets"]]
    trained = [row for row in rollouts_of(folder) if not row["ticket"].startswith("-1")]
    rolled = [(row["ticket"], row["index"]) for row in trained]
    return len(tickets) == len(set(tickets)) and len(rolled) == len(set(rolled))


class Judge(RewardCalculator):
    """Fails from its `fails`th call to its `works`th, with `error`."""

    fails, works = math.inf, math.inf
    error: BaseException = httpx.ConnectError("All connection attempts failed")
    calls = itertools.count(1)

    async def calculate(self, trajectory):
        if Judge.fails <= next(Judge.calls) < Judge.works:
            raise Judge.error
        return slot_share(trajectory.completion, trajectory.prompt.answer)


@pytest.fixture
def judge(monkeypatch):
    """Sets when and how the judge fails; the pauses of an outage are short."""
    monkeypatch.setattr(outage, "FIRST_PAUSE", 0.01)
    monkeypatch.setattr(outage, "LONGEST_PAUSE", 0.02)

    def set_up(**attributes):
        for name, value in {"fails": math.inf, "works": math.inf, **attributes}.items():
            monkeypatch.setattr(Judge, name, value)
        monkeypatch.setattr(Judge, "calls", itertools.count(1))

    return set_up


# what an outage is


def status_error(code: int) -> httpx.HTTPStatusError:
    request = httpx.Request("POST", "https://judge")
    return httpx.HTTPStatusError("no", request=request, response=httpx.Response(code))


class RateLimitError(Exception):
    """As of openai: the status is its own attribute."""

    status_code = 429


class Odd(Exception):
    @property
    def response(self):
        raise RuntimeError("not set")


def caused(error: Exception, *, by: Exception, hidden: bool = False) -> Exception:
    error.__context__, error.__suppress_context__ = by, hidden
    return error


OUTAGES = [
    ConnectionRefusedError(111, "refused"),
    TimeoutError(),
    socket.gaierror(-3, "Temporary failure in name resolution"),
    OSError(101, "Network is unreachable"),
    httpx.ReadTimeout("slow"),
    httpx.RemoteProtocolError("the server disconnected"),
    status_error(429),
    status_error(503),
    RateLimitError(),
    aiohttp.ServerDisconnectedError(),
    caused(ValueError("no verdict"), by=status_error(502)),
    ExceptionGroup("both", [ExceptionGroup("in", [ConnectionResetError()])]),
]
OTHERS = [
    KeyError("score"),
    FileNotFoundError(2, "No such file"),
    status_error(401),
    status_error(404),
    aiohttp.ClientResponseError(Mock(), (), status=403),
    Odd(),
    caused(ValueError("no verdict"), by=ConnectionResetError(), hidden=True),
    caused(LateError("took longer than deadlines.reward"), by=asyncio.CancelledError()),
]


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: type(error).__name__)
def test_outages_are_recognised_by_their_exceptions(error):
    assert is_outage(error)
    assert is_outage(blame("reward 'judge'", error))


@pytest.mark.parametrize("error", OTHERS, ids=lambda error: type(error).__name__)
def test_other_errors_are_no_outage(error):
    assert not is_outage(blame("reward 'judge'", error))


# outages are waited for


@pytest.mark.parametrize(("order", "pause", "works"), [("ready", 0.01, 80), ("in_order", 0.5, 56)])
async def test_p13_a_run_waits_for_a_judge_that_has_worked_before(
    tmp_path, judge, caplog, monkeypatch, order, pause, works
):
    judge(fails=40, works=works)
    monkeypatch.setattr(outage, "FIRST_PAUSE", pause)
    config = config_in(tmp_path, train={"order": order}, deadlines={"stall": 0.25})
    with caplog.at_level(logging.WARNING):
        result = await train(config)
    assert result.total_steps == STEPS
    began, over = events(tmp_path, "outage")
    assert "reward 'Judge' raised ConnectError" in began["error"]
    assert over["state"] == "over"
    messages = [r.getMessage() for r in caplog.records if "deadlines.outage" in r.getMessage()]
    assert len(messages) == 1, "it is said once"
    assert f"next try in {pause} s, gives up after deadlines.outage = 600 s" in messages[0]
    drops = [e for e in events(tmp_path, "dropped") if e["cause"] == "outage"]
    assert drops
    issued = {e["ticket"] for e in events(tmp_path, "issued")}
    assert {e["again"] for e in drops} <= issued, "no prompt is lost"
    assert trained_once(tmp_path)
    assert sum(row["groups/dropped_outage"] for row in result.history) == len(drops)


async def test_p13_an_outage_that_lasts_ends_the_run_with_a_checkpoint(tmp_path, judge):
    judge(fails=70)
    config = config_in(tmp_path, deadlines={"outage": 0.1})
    with pytest.raises(
        OutageError, match=r"reward 'Judge' raised ConnectError.*gave up after deadlines\.outage"
    ):
        await train(config)
    [saved] = Checkpoints(tmp_path / "checkpoints").steps()
    assert saved == steps_of(tmp_path)[-1] > 0
    tries = len(events(tmp_path, "issued"))
    assert tries < 70, "the judge is not hammered"
    judge()
    result = await train(config, resume=True)
    assert result.total_steps == STEPS
    assert [e["from_step"] for e in events(tmp_path, "resumed")] == [saved]
    assert trained_once(tmp_path)


@pytest.mark.parametrize(
    "how",
    [
        {"fails": 1},
        {"fails": 40, "error": KeyError("score")},
        {"fails": 40, "deadlines": {"outage": 0}},
    ],
    ids=["never worked", "another cause", "switched off"],
)
async def test_any_other_failure_ends_the_run_at_once(tmp_path, judge, how):
    keys = {"deadlines": how.pop("deadlines")} if "deadlines" in how else {}
    judge(**how)
    async with asyncio.timeout(30):
        with pytest.raises(NoSignalError, match="4 groups in a row"):
            await train(config_in(tmp_path, **keys))
    assert not events(tmp_path, "outage")


async def test_p10_cancelling_during_an_outage_saves_and_a_resume_plays_its_prompts(
    tmp_path, judge, monkeypatch
):
    monkeypatch.setattr(outage, "FIRST_PAUSE", 3600.0)
    judge(fails=40)
    began = asyncio.Event()
    monkeypatch.setattr(outage.logger, "warning", lambda *_: began.set())
    running = asyncio.create_task(train(config_in(tmp_path)))
    async with asyncio.timeout(30):
        await began.wait()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
    judge()
    result = await train(config_in(tmp_path), resume=True)
    assert result.total_steps == STEPS
    assert not [e for e in events(tmp_path, "dropped") if e["cause"] == "failed"]
    assert trained_once(tmp_path)


class EndsSlots(RewardCalculator):
    """Can't be reached for a while; then it ends the slot that tries it, once."""

    calls = itertools.count(1)

    async def calculate(self, trajectory):
        call = next(EndsSlots.calls)
        if 40 <= call < 60:
            raise httpx.ConnectError("All connection attempts failed")
        if call == 60:
            slots = [task for task in asyncio.all_tasks() if task.get_name() == "slot"]
            next(task for task in slots if "_in_tasks" in str(inner_of(task))).cancel()
            await asyncio.sleep(0)
        return slot_share(trajectory.completion, trajectory.prompt.answer)


def inner_of(task) -> list[str]:
    """The functions that a task awaits."""
    names, awaited = [], task.get_coro()
    while awaited is not None:
        names.append(getattr(awaited, "__name__", ""))
        awaited = getattr(awaited, "cr_await", None)
    return names


async def test_p5_a_slot_that_ends_while_it_tries_again_ends_no_run(tmp_path, judge):
    EndsSlots.calls = itertools.count(1)
    judge()
    reward = {"type": f"{__name__}:EndsSlots"}
    config = config_in(tmp_path, rewards=[reward], deadlines={"stall": 2})
    assert (await train(config)).total_steps == STEPS
    assert [e["state"] for e in events(tmp_path, "outage")] == ["began", "over"]
    [fault] = events(tmp_path, "fault")
    assert "user code cancelled the task 'slot'" in fault["error"]


# what a failure saves


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
    with pytest.raises(DeadlineError, match=r"publish took longer than deadlines\.publish"):
        await train(config, parts=parts_with(config, adapter))
    assert adapter.saves == 1


class Raises(Callback):
    def __init__(self, hook):
        self.hook = hook

    def on_step_end(self, trainer, step, metrics):
        if self.hook == "on_step_end" and step == 5:
            raise ValueError("my callback")

    def on_step_begin(self, trainer, step):
        if self.hook == "on_step_begin" and step == 5:
            raise ValueError("my callback")


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
    assert any("continue with --resume" in note for note in notes) == (saved is not None)
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
    [("sampler", "sample failed"), ("source", "user code cancelled the task 'feed'")],
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


def cancel_the_caller():
    asyncio.current_task().cancel()


async def cancel_while_waiting():
    asyncio.current_task().cancel()
    await asyncio.sleep(1)


def throws(error):
    def throw():
        raise error

    return throw


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
    assert "raised by the callback Worst.state_dict" in (tmp_path / "error.txt").read_text()
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
        (cancel_while_waiting, UserCodeError, "user code cancelled the task 'Worst.on_train_end'"),
        (throws(SystemExit(0)), UserCodeError, "user code raised SystemExit: 0"),
        (
            asyncio.Event().wait,
            DeadlineError,
            "^Worst.on_train_end took longer than deadlines.stall = 2.0 s",
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


class Reports(Judge):
    """Its `metrics` cancels the task that calls it, or exits."""

    worst = staticmethod(cancel_the_caller)

    def metrics(self):
        return Reports.worst()


@pytest.mark.parametrize("worst", [cancel_the_caller, throws(SystemExit(0))])
async def test_p5_metrics_of_a_reward_affect_no_step(tmp_path, monkeypatch, judge, worst):
    judge()
    monkeypatch.setattr(Reports, "worst", staticmethod(worst))
    await train(config_in(tmp_path, rewards=[{"type": f"{__name__}:Reports"}]))
    assert steps_of(tmp_path) == list(range(1, STEPS + 1))
    assert len(events(tmp_path, "fault")) >= STEPS


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
    assert "step_3. Fix the cause" in caught.value.__notes__[-1]
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


# where the cause is written


async def test_p13_the_cause_is_in_the_end_event_the_report_and_error_txt(tmp_path, judge):
    folder = tmp_path / "run"
    config = config_in(folder)
    with pytest.raises(ValueError, match="my callback"):
        await train(config, callbacks=[Raises("on_step_end")])
    [end] = events(folder, "end")
    assert (end["status"], end["step"]) == ("failed", 5)
    assert (end["error"]["type"], end["error"]["message"]) == ("ValueError", "my callback")
    assert end["error"]["line"].rpartition(":")[0] == __file__
    text = (folder / "error.txt").read_text()
    assert text.startswith("ValueError: my callback\n  raised by the callback Raises.on_step_end")
    assert "step_5. " in text
    assert "Traceback (most recent call last)" in text
    cause = digest(folder)["failure"]
    assert cause["text"] == f"ValueError: my callback ({end['error']['line']})"
    assert cause["next"].endswith(f"run the same command with --resume --run-dir {folder}")
    page = write_report(folder).read_text()
    assert "data.failure.text" in page
    await train(config, resume=True)
    assert not (folder / "error.txt").exists()
    assert digest(folder)["failure"] is None


async def test_error_txt_of_an_expected_error_has_no_traceback(tmp_path, judge):
    judge(fails=1)
    with pytest.raises(NoSignalError):
        await train(config_in(tmp_path))
    text = (tmp_path / "error.txt").read_text()
    assert text.startswith("NoSignalError: 4 groups in a row had no scored rollout")
    assert "Traceback" not in text
    assert "--resume" not in text, "nothing was saved"
    assert "start a new run" in digest(tmp_path)["failure"]["next"]


def test_the_first_of_several_causes_is_raised_with_the_others_as_notes():
    inner = ExceptionGroup("in", [RunError("prompt 0.1.0"), OSError("gone"), OSError("gone")])
    inner.add_note("saved")
    group = BaseExceptionGroup("out", [KeyboardInterrupt(), RunError("prompt 0.0.0"), inner])
    error = single(group)
    assert (type(error), str(error)) == (RunError, "prompt 0.0.0")
    assert error.__notes__ == [
        "and 1 more like it",
        "also failed: OSError: gone (2 times)",
        "saved",
    ]


def test_equal_causes_are_written_once():
    group = ExceptionGroup("the run failed", [AdapterError("lost")] * 3)
    group.add_note("saved: checkpoints/step_5")
    assert full_text(group) == "AdapterError: lost\n  (3 times)\nsaved: checkpoints/step_5\n"
    assert "NonFiniteError: nan" in full_text(NonFiniteError("nan"))


BLOCKED = """
import asyncio, sys, time
from pathlib import Path
from benchmarks.mock_engine import mock_config
from retrain.observe.callbacks import Callback
from retrain.pipeline import train

class Blocks(Callback):
    def HOOK(self, trainer, *arguments):
        if trainer.step >= 3:
            time.sleep(3600)

config = mock_config(Path(sys.argv[1]), train={"total_train_steps": 4}, deadlines={"blocked": 0.5})
asyncio.run(train(config, callbacks=[Blocks()]))
"""


@pytest.mark.parametrize("hook", ["on_step_end", "on_train_end"])
def test_p13_a_run_that_the_watch_ends_says_why(tmp_path, hook):
    assert played(tmp_path, BLOCKED.replace("HOOK", hook)).returncode == 1
    folder = tmp_path / "run"
    end = events(folder, "end")[-1]
    assert (end["status"], end["error"]["type"]) == ("failed", "StallError")
    where = f"blocked for 0.5 s by Blocks.{hook}"
    assert where in end["error"]["message"]
    assert where in (folder / "error.txt").read_text()
    assert where in digest(folder)["failure"]["text"]
    assert (folder / "report.html").exists()
