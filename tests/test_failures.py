"""A run that fails: the outages it waits for, and where it says why (P13)."""

import asyncio
import itertools
import logging
import math
import socket
from unittest.mock import Mock

import aiohttp
import httpx
import pytest

from retrain.errors import (
    AdapterError,
    LateError,
    NonFiniteError,
    NoSignalError,
    OutageError,
    RunError,
    blame,
)
from retrain.observe.failure import full_text, single
from retrain.pipeline import outage, train
from retrain.pipeline.checkpoint import Checkpoints
from retrain.report.page import digest, write_report
from retrain.scoring import RewardCalculator
from retrain.supervision.outages import is_outage
from tests import failure_kit
from tests.failure_kit import (
    STEPS,
    Judge,
    Raises,
    cancel_the_caller,
    config_in,
    steps_of,
    throws,
    trained_once,
)
from tests.pipe_kit import events, played, slot_share


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
    with pytest.raises(OutageError, match=r"'Judge'.*ConnectError.*deadlines\.outage"):
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
            next(task for task in slots if "outcomes" in inner_of(task)).cancel()
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
    assert "'slot'" in fault["error"]


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


# where the cause is written


async def test_p13_the_cause_is_in_the_end_event_the_report_and_error_txt(tmp_path, judge):
    folder = tmp_path / "run"
    config = config_in(folder)
    with pytest.raises(ValueError, match="my callback"):
        await train(config, callbacks=[Raises("on_step_end")])
    [end] = events(folder, "end")
    assert (end["status"], end["step"]) == ("failed", 5)
    assert (end["error"]["type"], end["error"]["message"]) == ("ValueError", "my callback")
    assert end["error"]["line"].rpartition(":")[0] == failure_kit.__file__
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
