"""The process of a run: signals, streams and threads, and long work that is no stall."""

import asyncio
import itertools
import time
from typing import ClassVar

import pytest

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.config import DeadlinesConfig
from retrain.environment import Environment
from retrain.errors import StallError
from retrain.pipeline import train
from retrain.pipeline.checkpoint import Checkpoints
from retrain.scoring import FunctionReward, Scorer, WeightedReward
from retrain.supervision.watch import Watch
from retrain.types import Group, Prompt, Trajectory
from tests.faults_kit import failure_of
from tests.pipe_kit import parts_with, played

# --- the process ---------------------------------------------------------------------------------

RUN = """
import asyncio, os, signal, sys, threading, time
from pathlib import Path
from benchmarks.mock_engine import mock_config
from retrain.environment import Environment
from retrain.observe.callbacks import Callback
from retrain.pipeline import train
from retrain.cli.process import drive, exit_code

class Env(Environment):
    async def step(self, action):
        {step}
        return [], float(len(set(action.text))), True, False, {{}}

class Act(Callback):
    def on_step_end(self, trainer, step, metrics):
        if step == 3:
            {act}

sys.modules["user_code"] = sys.modules["__main__"]
config = mock_config(
    Path(sys.argv[1]),
    environment={{"type": "user_code:Env"}},
    rewards=[],
    train={{"total_train_steps": 8}},
    deadlines={deadlines},
)
sys.exit(exit_code(lambda: drive(train(config, callbacks=[Act()])) and 0))
"""


def play(tmp_path, *, step="pass", act="pass", prefix=(), **deadlines):
    return played(tmp_path, RUN.format(step=step, act=act, deadlines=deadlines), prefix)


def test_p10_a_signal_checkpoints_even_when_the_terminal_is_gone(tmp_path):
    done = play(
        tmp_path, act="os.dup2(os.open('/dev/full', 1), 2); os.kill(os.getpid(), signal.SIGHUP)"
    )
    assert done.returncode == 130, done
    found = Checkpoints(tmp_path / "run" / "checkpoints").newest()
    assert found is not None
    assert found[1].step < 8


def test_nohup_keeps_its_promise(tmp_path):
    done = play(tmp_path, act="os.kill(os.getpid(), signal.SIGHUP)", prefix=["nohup"])
    assert done.returncode == 0, done


def test_a_broken_pipe_of_a_callback_is_no_success(tmp_path):
    done = play(tmp_path, act="raise BrokenPipeError(32, 'the tracker hung up')")
    assert done.returncode == 1
    assert "the tracker hung up" in done.stderr


def test_an_environment_that_outlives_a_finished_run_is_named_and_left(tmp_path):
    stubborn = """
        while self.prompt.ticket.epoch > 1:  # issued after step 3
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass"""
    act = "trainer.request_stop()"
    done = play(tmp_path, step=stubborn, act=act, stall=50, close=0.3, checkpoint=0.7)
    assert done.returncode == 1
    assert "shutdown timed out after 1.0 s; still running:" in done.stderr
    assert "Env.step (main.py:" in done.stderr


def test_a_full_disk_doesnt_keep_a_blocked_process(tmp_path):
    done = play(
        tmp_path,
        act="""
            for journal in trainer.run_dir._journals:
                journal._file.close()
            time.sleep(3600)""",
        blocked=0.5,
    )
    assert done.returncode == 1


def test_a_process_that_was_stopped_for_a_while_goes_on(tmp_path):
    """SIGSTOP, as Ctrl-Z sends it, for longer than anything may block."""
    act = """
            if os.fork() == 0:
                time.sleep(0.3)
                os.kill(os.getppid(), signal.SIGSTOP)
                time.sleep(3)
                os.kill(os.getppid(), signal.SIGCONT)
                os._exit(0)
            os.wait()"""
    done = play(tmp_path, act=act, blocked=1.9, stall=1.9)
    assert done.returncode == 0, done
    assert "no Python code could run" not in done.stderr


# --- long work is no stall ----------------------------------------------------------------------


@pytest.fixture
def history(monkeypatch):
    """`progress` for each report to the watch; a test adds what it sees between the reports."""
    history = []

    def progress(self):
        history.append("progress")

    monkeypatch.setattr(Watch, "progress", progress)
    return history


class Long(Environment):
    """Many turns, none of them long."""

    history: ClassVar = []

    async def reset(self, prompt):
        self.turns = 0
        return prompt.messages

    async def step(self, action):
        self.turns += 1
        Long.history.append("turn")
        return [{"role": "user", "content": "?"}], 0.0, self.turns == 12, False, {}


async def test_a_long_episode_moves_with_each_turn(tmp_path, history):
    Long.history = history
    config = mock_config(
        tmp_path,
        environment={"type": "tests.test_process_edges:Long"},
        algorithm={"type": "reinforce", "group_size": 1},
        train={"total_train_steps": 1, "groups_per_step": 1},
        staleness={"target": 0},
    )
    assert (await train(config)).total_steps == 1
    assert history.count("turn") == 12
    assert ("turn", "turn") not in itertools.pairwise(history)


async def test_slow_calls_of_the_adapter_one_after_the_other_are_no_stall(tmp_path, history):
    class Seen(MockAdapter):
        async def update(self, batch):
            history.append("update")
            return await super().update(batch)

        async def publish(self):
            history.append("publish")
            return await super().publish()

        async def save(self, folder):
            history.append("save")
            return await super().save(folder)

    config = mock_config(tmp_path, staleness={"target": 0}, train={"total_train_steps": 1})
    assert (await train(config, parts=parts_with(config, Seen(MockOptions(), config)))).total_steps
    calls = {"update", "publish", "save"}
    assert calls < {*history}
    assert not any({*pair} <= calls for pair in itertools.pairwise(history))


async def test_a_backend_that_hangs_while_it_opens_or_closes_is_a_stall(tmp_path):
    class Hangs(MockAdapter):
        async def __aenter__(self):
            await asyncio.Event().wait()

    config = mock_config(tmp_path, deadlines={"stall": 0.2})
    [error] = await failure_of(
        train(config, parts=parts_with(config, Hangs(MockOptions(), config)))
    )
    assert isinstance(error, StallError)
    assert not (tmp_path / "events.jsonl").exists(), "training has not begun"


async def test_waiting_for_the_user_is_no_stall():
    """As between two calls of a trainer's step()."""
    failed = asyncio.get_running_loop().create_future()
    watch = Watch(slow=60, found=pytest.fail, stall=1.0, fail=failed.set_result)
    with watch.waiting():
        watch._look(watch._moved + 1.1)
        await asyncio.sleep(0)
        assert not failed.done()
    watch._look(watch._moved + 1.1)
    assert isinstance(await failed, StallError)


async def test_waiting_for_a_thread_is_not_the_rewards_time():
    """Four threads, 84 calls of 0.05 s: the last four wait a second for the others."""

    def slow(completion):
        time.sleep(0.05)
        return 1.0

    scorer = Scorer(
        [WeightedReward("slow", 1.0, FunctionReward(slow))],
        deadlines=DeadlinesConfig(reward=0.8),
        concurrency=1,
    )
    scorer._slow.add("slow")
    group = Group(Prompt("0.0.0", []), [Trajectory(Prompt("0.0.0", [])) for _ in range(84)])
    async with scorer.serving(pytest.fail):
        await scorer.score(group)
    assert {t.outcome for t in group.trajectories} == {"ok"}
