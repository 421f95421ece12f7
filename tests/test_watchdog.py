"""Nothing can hang: blocked loops, stalls, held interpreters, crashes and runs that won't end.

Each runs in a process of its own.
"""

import asyncio
import gc
import importlib
import json
import os
import re
import signal
import time
import weakref

import pytest

from retrain.concurrency import children
from retrain.concurrency.blocks import BlockedLoop
from retrain.concurrency.guardian import guardian
from retrain.concurrency.watchdog import debugging
from tests.pipe_kit import played

SCRIPT = """
import asyncio, sys, time
from pathlib import Path
from benchmarks.mock_engine import mock_config
from retrain.environment import Environment
from retrain.pipeline import train
from retrain.rewarding import reward

class Env(Environment):
    async def step(self, action):
        {step}

@reward
def judge(completion):
    {judge}

sys.modules["user_code"] = sys.modules["__main__"]
config = mock_config(
    Path(sys.argv[1]),
    environment={{"type": "user_code:Env"}},
    rewards=[{{"type": "user_code:judge"}}],
    train={{"total_train_steps": {steps}, "max_failed_groups": 3}},
    deadlines={deadlines},
)
try:
    asyncio.run(train(config))
except Exception as error:
    sys.exit(f"{{type(error).__name__}}: {{error}}")
"""
END = "return [], 0.0, True, False, {}"


def play(tmp_path, *, step=END, judge="return 1.0", steps=2, **deadlines):
    """Run the script, for a minute at most; its exit code and stderr."""
    script = SCRIPT.format(step=step, judge=judge, steps=steps, deadlines=deadlines)
    done = played(tmp_path, script)
    return done.returncode, done.stderr


def test_p4_user_code_that_blocks_the_loop_is_named_and_the_process_ends(tmp_path):
    code, stderr = play(tmp_path, step="time.sleep(3600)", blocked=0.5)
    assert code == 1
    assert "blocked for 0.5 s by Env.step (main.py:11)" in stderr
    assert "--resume" in stderr
    assert '"stalled"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_p4_a_plain_reward_that_blocks_its_thread_for_ever_doesnt_keep_the_process(tmp_path):
    code, stderr = play(tmp_path, judge="time.sleep(3600)", reward=0.2)
    assert code == 1
    assert "NoSignalError: 3 groups in a row had no scored rollout" in stderr
    assert "reward 'judge' took longer than deadlines.reward = 0.2 s" in stderr


def test_p4_a_run_in_which_nothing_moves_ends_and_says_what_it_waits_for(tmp_path):
    code, stderr = play(tmp_path, step="await asyncio.Event().wait()", stall=0.5)
    assert code == 1
    assert "StallError: no progress for deadlines.stall = 0.5 s" in stderr
    assert "Env.step (main.py:11)" in stderr


def test_p4_an_environment_that_ignores_its_cancellation_cant_keep_the_process(tmp_path):
    stubborn = """
        while True:
            try:
                await asyncio.Event().wait()
            except asyncio.CancelledError:
                pass"""
    code, stderr = play(tmp_path, step=stubborn, stall=0.5, close=0.3, checkpoint=0.3)
    assert code == 1
    assert "shutdown timed out after" in stderr
    assert "Env.step (main.py:" in stderr


def test_a_healthy_run_is_left_alone(tmp_path):
    code, stderr = play(tmp_path, stall=20, blocked=5)
    assert (code, stderr) == (0, "")


def test_user_code_that_blocks_the_loop_for_a_while_is_a_fault_that_names_it(tmp_path):
    once = """
        if not hasattr(Env, "slept"):
            Env.slept = True
            time.sleep(1.6)
        """
    code, stderr = play(tmp_path, step=once + END)
    assert code == 0
    assert re.search(r"Env.step \(main.py:14\) blocked the event loop for 1.\d s. Wh", stderr)
    assert "asyncio.to_thread" in stderr
    lines = (tmp_path / "run" / "events.jsonl").read_text().splitlines()
    events = [json.loads(line) for line in lines]
    assert [e["error"][:22] for e in events if e["event"] == "fault"] == ["Env.step (main.py:14) "]


async def test_the_place_and_the_calls_that_block_the_loop_are_found():
    found = []
    with BlockedLoop(0.25, lambda *block: found.append(block)):
        await asyncio.sleep(0.1)
        time.sleep(0.15)  # noqa: ASYNC251 - the mistake
        await asyncio.sleep(0.1)
        assert not found
        time.sleep(0.4)  # noqa: ASYNC251 - the mistake
        await asyncio.sleep(0.1)
        await asyncio.gather(*(blocks() for _ in range(3)))
        await asyncio.to_thread(time.sleep, 0.4)
    (one, alone, single), (three, together, calls) = found
    here = "test_the_place_and_the_calls_that_block_the_loop_are_found (test_watchdog.py:"
    assert one.startswith(here)
    assert three.startswith("blocks (test_watchdog.py:")
    assert alone > 0.25
    assert together > 0.4
    assert single == 1
    assert calls > 1


async def blocks():
    time.sleep(0.2)  # noqa: ASYNC251 - the mistake


async def test_code_that_holds_the_interpreter_for_a_while_is_found_too():
    found = []
    with BlockedLoop(0.1, lambda *block: found.append(block)):
        await asyncio.sleep(0.1)
        sum(range(5 * 10**7))  # no other thread runs meanwhile
        await asyncio.sleep(0.1)
    assert found[0][0].startswith("test_code_that_holds_the_interpreter")


async def test_another_thread_that_holds_the_interpreter_is_not_blamed_on_the_loops_code():
    def hold():
        time.sleep(0.1)
        sum(range(5 * 10**7))  # no other thread runs meanwhile

    found = []
    with BlockedLoop(0.25, lambda *block: found.append(block)):
        other = asyncio.create_task(asyncio.to_thread(hold))
        while not other.done():
            until = time.monotonic() + 0.03  # the other thread takes over here, not in `select`
            while time.monotonic() < until:
                pass
            await asyncio.sleep(0)
        await asyncio.sleep(0.1)
    assert not found


async def test_an_import_of_the_users_own_slow_module_is_not_found(tmp_path, monkeypatch):
    (tmp_path / "slow_module.py").write_text("import time\ntime.sleep(0.4)")
    monkeypatch.syspath_prepend(tmp_path)
    found = []
    with BlockedLoop(0.1, lambda *block: found.append(block)):
        await asyncio.sleep(0.1)
        importlib.import_module("slow_module")
        await asyncio.sleep(0.1)
    assert not found


async def test_nothing_is_found_after_the_end():
    found = []
    with BlockedLoop(0.1, lambda *block: found.append(block)):
        await asyncio.sleep(0.1)
        time.sleep(0.4)  # noqa: ASYNC251 - the mistake
    await asyncio.sleep(0.1)
    assert not found


HELD = """
    import re
    return float(bool(re.match("(a+)+$", "a" * 64 + "b")))"""


def test_p12_code_that_holds_the_interpreter_is_named_and_the_process_is_ended(tmp_path):
    code, stderr = play(tmp_path, judge=HELD, blocked=1)
    assert code == -signal.SIGKILL
    assert "no Python code could run for 1 s" in stderr
    assert "the interpreter (GIL) is held by judge (main.py:17). The process was ended" in stderr
    assert "--resume" in stderr
    error = (tmp_path / "run" / "error.txt").read_text()
    assert "re/__init__.py" in error
    assert 'main.py", line 17 in judge' in error


@pytest.mark.parametrize(
    ("judge", "code", "words"),
    [
        (
            "import ctypes; ctypes.string_at(0)",
            -signal.SIGSEGV,
            "crashed in judge (main.py:15): ",
        ),
        ("import os; os._exit(9)", 9, "ended without shutting down: it was killed, "),
    ],
)
def test_p12_a_process_that_dies_in_user_code_leaves_a_last_word(tmp_path, judge, code, words):
    returned, stderr = play(tmp_path, judge=judge)
    assert returned == code
    assert words in stderr
    error = (tmp_path / "run" / "error.txt").read_text()
    assert words in error
    assert ("in string_at" in error) == (code == -signal.SIGSEGV)


KILLED = """
        import os, signal
        from retrain.concurrency import children
        stubborn = "trap '' TERM; echo ready; while :; do sleep 60; done"
        child = await children.start(["sh", "-c", stubborn])
        await child.stdout.readline()
        if not (forked := os.fork()):
            [os.close(fd) for fd in range(3)]
            signal.alarm(60)
            signal.pause()
        Path(sys.argv[1], "pids").write_text(f"{child.pid} {forked}")
        os.kill(os.getpid(), signal.SIGKILL)"""


def test_p12_children_end_after_kill_9_though_a_forked_process_goes_on(tmp_path):
    code, stderr = play(tmp_path, step=KILLED)
    child, forked = map(int, (tmp_path / "run" / "pids").read_text().split())
    os.kill(forked, signal.SIGKILL)  # it still ran
    assert code == -signal.SIGKILL
    assert "ended without shutting down" in stderr
    while group_exists(child):  # the guardian ends it after the run's death
        time.sleep(0.02)


def group_exists(number):
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_child_that_ignores_its_end_is_killed_with_its_own_children():
    stubborn = "trap '' TERM; sleep 60 & echo ready; wait; wait"
    child = await children.start(["sh", "-c", stubborn], env={"PATH": os.environ["PATH"]})
    assert await child.stdout.readline() == b"ready\n"
    assert await children.end(child, grace=0.1) == -signal.SIGKILL
    assert await children.end(child) == -signal.SIGKILL
    assert await child.stdout.read() == b""  # of the grandchild too
    willing = await children.start(["cat"])
    assert await children.end(willing) == -signal.SIGTERM


def test_a_guardian_that_was_killed_is_replaced():
    guardian.watch(None, 60, None)
    try:
        first = guardian._process
        first.kill()
        first.wait()
        guardian.beat()
        assert guardian._process.pid != first.pid
        assert guardian._process.poll() is None
    finally:
        guardian.unwatch(None)


def test_the_first_process_of_a_container_needs_no_guardian(monkeypatch):
    def none(*_, **__):
        raise OSError("no more processes")

    monkeypatch.setattr("retrain.concurrency.guardian.subprocess.Popen", none)
    monkeypatch.setattr(os, "getpid", lambda: 1)
    alone = type(guardian)()
    alone.watch(alone, 60.0, None)
    alone.unwatch(alone)


def test_the_search_for_a_debugger_keeps_no_frame_alive() -> None:
    class Large:
        pass

    def frame() -> weakref.ref[Large]:
        large = Large()
        assert not debugging()
        return weakref.ref(large)

    gc.disable()
    try:
        assert frame()() is None
    finally:
        gc.enable()
