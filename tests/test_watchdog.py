"""Nothing can hang: blocked loops, stalls and runs that won't end, each in a process of its own."""

import time

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
except BaseExceptionGroup as group:
    while isinstance(group, BaseExceptionGroup):
        group = group.exceptions[0]
    sys.exit(f"{{type(group).__name__}}: {{group}}")
"""
END = "return [], 0.0, True, False, {}"


def play(tmp_path, *, step=END, judge="return 1.0", steps=2, **deadlines):
    """Run the script; its exit code, stderr and seconds."""
    script = SCRIPT.format(step=step, judge=judge, steps=steps, deadlines=deadlines)
    began = time.monotonic()
    done = played(tmp_path, script)
    return done.returncode, done.stderr, time.monotonic() - began


def test_p4_user_code_that_blocks_the_loop_is_named_and_the_process_ends(tmp_path):
    code, stderr, seconds = play(tmp_path, step="time.sleep(3600)", blocked=0.5)
    assert code == 1
    assert "blocked for 0.5 s by Env.step (main.py:11)" in stderr
    assert "--resume" in stderr
    assert seconds < 30
    assert '"stalled"' in (tmp_path / "run" / "events.jsonl").read_text()


def test_p4_a_plain_reward_that_blocks_its_thread_for_ever_doesnt_keep_the_process(tmp_path):
    code, stderr, _ = play(tmp_path, judge="time.sleep(3600)", reward=0.2)
    assert code == 1
    assert "NoSignalError: 3 groups in a row had no scored rollout" in stderr
    assert "reward 'judge' took longer than deadlines.reward = 0.2 s" in stderr


def test_p4_a_run_in_which_nothing_moves_ends_and_says_what_it_waits_for(tmp_path):
    code, stderr, _ = play(tmp_path, step="await asyncio.Event().wait()", stall=0.5)
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
    code, stderr, _ = play(tmp_path, step=stubborn, stall=0.5, close=0.3, checkpoint=0.3)
    assert code == 1
    assert "shutdown timed out after" in stderr
    assert "Env.step (main.py:" in stderr


def test_a_healthy_run_is_left_alone(tmp_path):
    code, stderr, _ = play(tmp_path, stall=20, blocked=5)
    assert (code, stderr) == (0, "")
