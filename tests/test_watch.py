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
import threading
import time
import weakref

import pytest

from retrain.supervision.children import Child
from retrain.supervision.leash import WATCHER, leash
from retrain.supervision.watch import Watch, debugging
from tests.pipe_kit import events, played

SCRIPT = """
import asyncio, sys, time
from pathlib import Path
from benchmarks.mock_engine import mock_config
from retrain.environment import Environment
from retrain.pipeline import train
from retrain.scoring import reward

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
    assert "Env.step (main.py:11)" in stderr
    assert "--resume" in stderr
    assert '"stalled"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_p4_a_plain_reward_that_blocks_its_thread_for_ever_doesnt_keep_the_process(tmp_path):
    code, stderr = play(tmp_path, judge="time.sleep(3600)", reward=0.2)
    assert code == 1
    assert "NoSignalError: 3 groups" in stderr
    assert "deadlines.reward = 0.2 s" in stderr


def test_p4_a_run_in_which_nothing_moves_ends_and_says_what_it_waits_for(tmp_path):
    code, stderr = play(tmp_path, step="await asyncio.Event().wait()", stall=0.5)
    assert code == 1
    assert "StallError: no progress for deadlines.stall = 0.5 s" in stderr
    assert "Env.step (main.py:11)" in stderr


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


class Clock:
    """The looks of the watch's thread, at times and with CPU seconds that a test chooses."""

    def __init__(self, watch):
        self.watch, self.now, self.cpu = watch, watch._looked, 0.0
        watch._cpu_seconds = lambda: self.cpu

    def look(self, seconds, *, cpu=0.0):
        """A look, `seconds` after the last one."""
        self.now += seconds
        self.cpu += cpu
        thread = threading.Thread(target=self.watch._look, args=(self.now,))
        thread.start()
        thread.join()


def watched(**limits):
    found = []
    watch = Watch(slow=1.0, found=lambda *block: found.append(block), fail=found.append, **limits)
    watch._exit = found.append
    return found, Clock(watch)


async def test_what_blocks_the_loop_is_found_with_its_place_seconds_and_calls():
    found, clock = watched()

    async def blocks():
        clock.look(0.2)
        clock.look(0.2)

    for looks in (5, 7):  # the first of them asks the loop to answer
        for _ in range(looks):
            clock.look(0.2)
        await asyncio.sleep(0)
    await asyncio.gather(*(asyncio.create_task(blocks()) for _ in range(4)))
    (one, seconds, single), (_, together, calls) = found
    assert one.startswith("Clock.look (test_watch.py:")
    assert (round(seconds, 1), single) == (1.2, 1)
    assert (round(together, 1), calls) == (1.4, 4)


async def test_code_that_holds_the_interpreter_for_a_while_is_found_too():
    found, clock = watched()
    clock.look(3.0, cpu=2.9)  # the thread could not look earlier
    await asyncio.sleep(0)
    assert [(seconds, calls) for _, seconds, calls in found] == [(3.0, 1)]


@pytest.mark.parametrize("answers", [True, False])
async def test_time_in_which_the_loops_thread_could_not_run_counts_for_nothing(answers):
    """Another thread held the interpreter, or the process was suspended."""
    found, clock = watched(blocked=2.0, stall=2.0, grace=2.0)
    clock.watch.ending()
    clock.look(0.2)
    if answers:
        await asyncio.sleep(0)
    clock.look(60.0)
    clock.look(0.2)
    await asyncio.sleep(0)
    assert not found


async def test_a_thread_that_often_holds_the_interpreter_does_not_hide_a_stall():
    found, clock = watched(stall=2.0)
    for _ in range(9):
        clock.look(0.6)
        await asyncio.sleep(0)
    assert not found
    for _ in range(3):
        clock.look(0.6)
        await asyncio.sleep(0)
    assert found


def test_a_loop_that_was_closed_is_no_longer_watched(tmp_path):
    async def enter():
        watch = Watch(slow=0.05, found=lambda *block: None, errors=tmp_path / "error.txt")
        return watch.__enter__()

    loop = asyncio.new_event_loop()
    watch = loop.run_until_complete(enter())
    assert leash._watched
    loop.close()
    [thread] = [one for one in threading.enumerate() if one.name == "retrain-watch"]
    thread.join(60)
    assert not leash._watched
    watch.__exit__()


async def test_each_limit_ends_the_run_after_its_time():
    for limit in ("blocked", "stall", "grace"):
        found, clock = watched(**{limit: 100.0})
        clock.watch._tick = 40.0
        if limit == "grace":
            clock.watch.ending()
        for _ in range(3 if limit == "blocked" else 2):  # the first of them asks the loop to answer
            clock.look(40.0)
            if limit != "blocked":
                await asyncio.sleep(0)
        assert not found, limit
        clock.look(40.0)
        await asyncio.sleep(0)
        assert found, limit


async def test_an_import_of_the_users_own_slow_module_is_not_found(tmp_path, monkeypatch):
    found, clock = watched()
    module = "import builtins\nfor _ in range(9):\n    builtins.look(0.2)"
    (tmp_path / "slow_module.py").write_text(module)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr("builtins.look", clock.look, raising=False)
    importlib.import_module("slow_module")
    await asyncio.sleep(0)
    assert not found


async def test_nothing_is_found_after_the_end():
    found, clock = watched()
    for _ in range(9):
        clock.look(0.2)
    clock.watch.__exit__()
    await asyncio.sleep(0)
    assert not found


HELD = """
    import re
    return float(bool(re.match("(a+)+$", "a" * 64 + "b")))"""


def test_p12_code_that_holds_the_interpreter_ends_the_run_with_its_stack(tmp_path):
    code, stderr = play(tmp_path, judge=HELD, blocked=1)
    assert code == -signal.SIGABRT
    assert "no Python code ran for 1 s" in stderr
    error = (tmp_path / "run" / "error.txt").read_text()
    assert "no Python code ran for 1 s" in error
    assert 'main.py", line 17 in judge' in error


def test_p12_a_system_without_proc_is_no_exception(tmp_path):
    """Such as macOS. The time of a suspended process counts there."""
    without = tmp_path / "watcher.py"
    without.write_text(WATCHER.read_text().replace("/proc/", "/nowhere/"))
    code, stderr = play(
        tmp_path,
        step=f"""
        from retrain.supervision import leash
        leash.leash._process.kill()
        leash.leash._process.wait()
        leash.WATCHER = Path({str(without)!r})
        leash.leash.beat()
        {END}""",
        judge=HELD,
        blocked=1,
    )
    assert code == -signal.SIGABRT
    assert "no Python code ran for 1 s" in stderr


@pytest.mark.parametrize(
    ("judge", "code", "place"),
    [
        ("import ctypes; ctypes.string_at(0)", -signal.SIGSEGV, "in string_at"),
        ("import os; os._exit(9)", 9, ""),
    ],
)
def test_p12_a_process_that_dies_in_user_code_leaves_a_last_word(tmp_path, judge, code, place):
    returned, stderr = play(tmp_path, judge=judge)
    assert returned == code
    assert "without shutting down" in stderr
    error = (tmp_path / "run" / "error.txt").read_text()
    assert "without shutting down" in error
    assert place in error


@pytest.mark.parametrize("place", ["step", "judge"])
def test_a_fork_that_returns_from_user_code_ends_and_the_run_goes_on(tmp_path, place):
    forks = {"step": f"import os; os.fork(); {END}", "judge": "import os; os.fork(); return 1.0"}
    assert play(tmp_path, **{place: forks[place]}) == (0, "")
    ends = events(tmp_path / "run", "end")
    assert [event["status"] for event in ends] == ["completed"]


KILLED = """
        import os, shutil, signal
        from retrain.supervision.children import Child
        stubborn = "trap '' TERM; echo ready; while :; do sleep 60; done"
        child = await Child.start(["sh", "-c", stubborn])
        await child.stdout.readline()
        if not (forked := os.fork()):
            [os.close(fd) for fd in range(3)]
            signal.alarm(60)
            signal.pause()
        shutil.rmtree(sys.argv[1])  # error.txt can't be written
        Path(sys.argv[1]).write_text(f"{child.pid} {forked}")
        os.kill(os.getpid(), signal.SIGKILL)"""


def test_p12_children_end_after_kill_9_though_a_fork_goes_on_and_the_folder_is_gone(tmp_path):
    code, stderr = play(tmp_path, step=KILLED)
    child, forked = map(int, (tmp_path / "run").read_text().split())
    os.kill(forked, signal.SIGKILL)  # it still ran
    assert code == -signal.SIGKILL
    assert "without shutting down" in stderr
    while group_exists(child):  # the watcher ends it after the run's death
        time.sleep(0.02)


FORKS = """
import os, signal, threading
from retrain.supervision.leash import leash

held, over = threading.Event(), threading.Event()

def hold():
    with leash._lock:
        held.set()
        over.wait()

threading.Thread(target=hold).start()
held.wait()
if not (forked := os.fork()):
    signal.alarm(10)
    leash.beat()
    os._exit(7)
over.set()
raise SystemExit(os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]))
"""


def test_a_fork_does_not_wait_for_a_thread_that_it_lacks(tmp_path):
    assert played(tmp_path, FORKS).returncode == 7


def group_exists(number):
    try:
        os.killpg(number, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_child_that_ignores_its_end_is_killed_with_its_own_children():
    stubborn = "trap '' TERM; sleep 60 & echo ready; wait; wait"
    child = await Child.start(["sh", "-c", stubborn], env={"PATH": os.environ["PATH"]})
    assert await child.stdout.readline() == b"ready\n"
    assert await child.end(grace=0.1) == -signal.SIGKILL
    assert await child.end() == -signal.SIGKILL
    assert await child.stdout.read() == b""  # of the grandchild too
    willing = await Child.start(["cat"])
    assert await willing.end() == -signal.SIGTERM


FIRST = """
import os, signal, sys
os.getpid = lambda: 1
from pathlib import Path
from retrain.supervision.leash import leash
leash._send = lambda message: None
with leash.watch(60.0, Path(sys.argv[1])):
    signal.raise_signal(signal.{number})
"""


@pytest.mark.parametrize(
    ("number", "words"),
    [(signal.SIGABRT, "Fatal Python error: Aborted"), (signal.SIGQUIT, "most recent call first")],
)
def test_p12_the_first_process_of_a_container_ends_too(tmp_path, number, words):
    """The kernel protects it from the default action of signals."""
    done = played(tmp_path, FIRST.format(number=number.name))
    assert done.returncode == number, "an exit, not a signal"
    assert words in (tmp_path / "run").read_text()


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
