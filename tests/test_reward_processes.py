"""Rewards in worker processes: any kind of reward runs there, and its worst costs one rollout."""

import asyncio
import os
import pickle
import sys
from asyncio.subprocess import PIPE
from contextlib import asynccontextmanager

import pytest

from benchmarks.mock_engine import mock_config
from retrain.config import DeadlinesConfig, RewardConfig
from retrain.config.plugins import named
from retrain.errors import ConfigError, RunError
from retrain.pipeline import train
from retrain.scoring import Scorer, processes, term_of, wire
from retrain.supervision.children import Child
from tests.pipe_kit import rollouts_of
from tests.test_rewarding import played

KINDS = """
import asyncio, os, signal, sys, threading
from contextlib import AsyncExitStack
import anyio, neighbour
from retrain import Reward, RewardCalculator, reward


@reward
def plain(completion, answer, scale: float = 1.0):
    print("not a frame", flush=True)
    assert threading.current_thread() is threading.main_thread()
    assert "torch" not in sys.modules
    before = signal.signal(signal.SIGALRM, lambda *_: None)  # as math-verify's timeouts
    signal.alarm(5)
    signal.alarm(0)
    asyncio.run(asyncio.sleep(0))
    return scale * (completion == answer)


async def later(completion, metadata):
    await asyncio.sleep(0)
    return Reward(len(completion), {"pid": os.getpid()})


class Kept(RewardCalculator):
    name = "kept"

    def __init__(self, log: str):
        self.log = log

    async def setup(self):
        self.stack = AsyncExitStack()
        self.tasks = await self.stack.enter_async_context(anyio.create_task_group())
        self.tasks.start_soon(anyio.sleep_forever)

    async def calculate(self, trajectory):
        return float(neighbour.HALF) if trajectory.info["seen"].value else 0.0

    async def close(self):
        self.tasks.cancel_scope.cancel()
        await self.stack.aclose()
        with open(self.log, "a") as log:
            log.write("closed\\n")


class Best(RewardCalculator):
    async def calculate(self, trajectory):
        raise NotImplementedError

    async def calculate_group(self, group):
        return [len(t.completion) == max(len(o.completion) for o in group) for t in group]
"""
FAULTS = """
import ctypes, os, re, time


async def judge(completion):
    return act(completion)


def act(completion):
    if completion == "segv":
        ctypes.string_at(0)
    if completion == "exit":
        os._exit(7)
    if completion == "held":
        re.match("(a+)+$", "a" * 60 + "b")
    if completion == "raise":
        raise SystemExit("no")
    if completion == "down":
        raise ConnectionRefusedError("the judge is down")
    if completion == "fork":
        os.fork() or time.sleep(60)  # the child holds none of the worker's pipes
        os._exit(0)
    if completion == "none":
        return None
    return 1.0
"""
EXCLUDE = "To exclude a rollout, return Reward(0.0, outcome='invalid')."
KILLED = "its worker process was killed"


class NoNumber:
    """Can be pickled, but not loaded."""

    def __reduce__(self):
        return int, ("no number",)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", [*sys.path])
    return tmp_path


def of(folder, *sections, **seconds) -> Scorer:
    deadlines = DeadlinesConfig(**seconds)
    parts = [
        term_of(RewardConfig(**section), f"rewards.{index}", folder, deadlines)
        for index, section in enumerate(sections)
    ]
    return Scorer(parts, deadlines=deadlines)


@asynccontextmanager
async def spied(monkeypatch):
    """The processes that are started; none may be left."""
    started, start = [], Child.start

    async def noted(*args, **keys):
        started.append(await start(*args, **keys))
        return started[-1]

    monkeypatch.setattr(Child, "start", noted)
    yield started
    assert started
    assert all(process.exit_code is not None for process in started)


async def test_every_kind_of_reward_runs_in_workers(folder, monkeypatch):
    (folder / "neighbour.py").write_text("HALF = 0.5")
    (folder / "seen.py").write_text("class Seen:\n    value = 3\ndef seen(completion): return 0\n")
    (folder / "kinds.py").write_text(KINDS)
    log = folder / "log"
    sections = [
        {"type": "kinds.py:plain", "scale": 2.0, "processes": 1},
        {"type": "kinds:later", "processes": 1},
        {"type": "kinds.py:Kept", "log": str(log), "processes": 2},
        {"type": "kinds.py:Best", "processes": 1},
        {"type": "exact_match", "processes": 1, "name": "exact"},
        {"type": "seen.py:seen"},
    ]
    async with spied(monkeypatch):
        scorer = of(folder, *sections)
        seen = sys.modules[scorer.rewards[-1].calculator.function.__module__].Seen
        group = played("yes", "n")
        for trajectory in group.trajectories:
            trajectory.info["seen"] = seen()  # a class of the user's file goes there and works
        async with scorer.serving(pytest.fail):
            await scorer.score(group)
    first, second = group.trajectories
    assert first.outcome == second.outcome == "ok", first.info
    pids = {t.rewards.pop("later.pid") for t in group.trajectories}
    assert len(pids) == 1
    assert os.getpid() not in pids
    assert first.rewards == {"plain": 2, "later": 3, "kept": 0.5, "Best": 1, "exact": 1, "seen": 0}
    assert second.rewards == {"plain": 0, "later": 1, "kept": 0.5, "Best": 0, "exact": 0, "seen": 0}
    assert log.read_text() == "closed\n" * 2


@pytest.mark.parametrize(
    ("name", "texts"),
    [
        ("act", ["fine", "segv", "fine", "exit", "held", "raise", "none", "fork", "down", "fine"]),
        ("judge", ["fine", "held", "raise", "down", "fine"]),
    ],
)
async def test_a_worker_that_dies_costs_one_rollout(folder, monkeypatch, name, texts):
    (folder / "faults.py").write_text(FAULTS)
    async with spied(monkeypatch) as started:
        scorer = of(folder, {"type": f"faults.py:{name}", "processes": 2}, reward=1.0, setup=60)
        group = played(*texts)
        async with scorer.serving(pytest.fail):
            await scorer.score(group)
    errors = {
        text: (t.outcome, t.info.get("error", "").removeprefix(f"reward '{name}'"))
        for text, t in zip(texts, group.trajectories, strict=True)
    }
    expected = {
        "fine": ("ok", ""),
        "segv": ("infra_error", ": its worker process ended with SIGSEGV at faults.py:11"),
        "exit": ("infra_error", ": its worker process ended with exit code 7"),
        "held": (
            "timeout",
            f" took longer than deadlines.reward = 1.0 s at faults.py:15; {KILLED}",
        ),
        "raise": ("infra_error", " raised SystemExit: no (faults.py:17)"),
        "none": ("infra_error", f" returned None, expected a finite number. {EXCLUDE}"),
        "fork": ("infra_error", ": its worker process ended with exit code 0"),
        "down": ("infra_error", " raised ConnectionRefusedError: the judge is down (faults.py:19)"),
    }
    assert errors == {text: expected[text] for text in texts}
    assert [t.outage for t in group.trajectories] == [x == "down" for x in texts]
    assert len(started) <= 2 + 4, "only those that died were replaced"


async def test_what_cannot_be_sent_costs_its_rollout_only(folder, monkeypatch):
    (folder / "kinds.py").write_text(
        "from retrain import RewardCalculator\nclass Mine(RewardCalculator):\n"
        "    async def calculate(self, trajectory): return 1.0\nclass Both(Mine):\n"
        "    async def calculate_group(self, group): return [1.0] * len(group)\n"
    )
    one, both = {"type": "kinds.py:Mine", "processes": 1}, {"type": "kinds.py:Both", "processes": 1}
    groups = [played("a", "b") for _ in range(4)]
    for group, odd in zip(groups, (lambda: None, NoNumber()) * 2, strict=True):
        group.trajectories[0].info["odd"] = odd
    async with spied(monkeypatch):
        alone, together = of(folder, one), of(folder, both)
        async with alone.serving(pytest.fail), together.serving(pytest.fail):
            for scorer, group in zip((alone, alone, together, together), groups, strict=True):
                await scorer.score(group)
    outcomes = [[t.outcome for t in group.trajectories] for group in groups]
    assert outcomes == [["infra_error", "ok"]] * 2 + [["infra_error"] * 2] * 2
    unsent, unread, *_ = [group.trajectories[0].info["error"] for group in groups]
    assert "can't be sent to a worker process" in unsent
    assert "'Mine' raised ValueError" in unread


@pytest.mark.parametrize(
    ("code", "message"),
    [
        (
            "import sys\nif 'retrain.scoring.worker' in sys.modules:\n    import not_there\n",
            r"'score': rewards\.0\.type: .*late\.py:3: Module",
        ),
        (
            "import os, sys\nif 'retrain.scoring.worker' in sys.modules:\n    os._exit(3)\n",
            r"'score': .*exit code 3",
        ),
    ],
)
async def test_a_worker_that_cannot_start_ends_the_run_before_a_rollout(folder, code, message):
    (folder / "late.py").write_text(code + "def score(completion): return 1.0\n")
    reward = {"type": f"{folder}/late.py:score", "processes": 2}
    with pytest.raises(RunError, match=message):
        await train(mock_config(folder / "run", rewards=[reward]))
    assert not (folder / "run" / "rollouts.jsonl").exists() or not rollouts_of(folder / "run")


async def test_a_worker_that_closes_late_says_where_it_was(folder, monkeypatch):
    (folder / "late.py").write_text(
        "import time\nfrom retrain import RewardCalculator\nclass Late(RewardCalculator):\n"
        "    async def calculate(self, trajectory): return 1.0\n"
        "    async def close(self): time.sleep(99)\n"
    )
    faults = []
    async with spied(monkeypatch):
        scorer = of(folder, {"type": "late.py", "processes": 1}, close=0.1)
        async with scorer.serving(faults.append):
            pass
    where = "took longer than deadlines.close = 0.1 s at late.py:5"
    assert faults == [f"reward 'late' {where}; {KILLED}"]


async def test_a_worker_ends_in_silence_when_the_run_is_gone(folder):
    (folder / "own.py").write_text("def own(completion): return 1.0\n")
    section = RewardConfig(type="own.py", processes=1)
    spec = {"name": "own", "section": section, "where": "rewards.0", "base_dir": folder}
    run = await asyncio.create_subprocess_exec(
        sys.executable, "-c", processes._script(), stdin=PIPE, stdout=PIPE, stderr=PIPE
    )
    run.stdin.write(wire.framed(pickle.dumps({**spec, "packages": {}})))
    await wire.read_frame(run.stdout)
    run._transport.get_pipe_transport(1).close()
    run.stdin.close()
    assert await run.stderr.read() == b""
    assert await run.wait() == 0


async def test_a_run_uses_the_workers_and_ends_them(folder, monkeypatch):
    async with spied(monkeypatch) as started:
        reward = {"type": "slot_match", "processes": 2}
        result = await train(mock_config(folder / "run", rewards=[reward]))
    assert (result.status, result.total_steps, len(started)) == ("completed", 4, 2)


async def test_a_call_that_the_run_gives_up_ends_its_worker(folder, monkeypatch):
    (folder / "slow.py").write_text(
        "import time\ndef slow(completion, metadata):\n"
        "    open(metadata['file'], 'w').close()\n    time.sleep(60)\n"
    )
    os.mkfifo(folder / "begun")
    group = played("a")
    group.prompt.metadata["file"] = str(folder / "begun")
    async with spied(monkeypatch):
        scorer = of(folder, {"type": "slow.py", "processes": 1})
        async with scorer.serving(pytest.fail):
            scoring = asyncio.create_task(scorer.score(group))
            await asyncio.to_thread((folder / "begun").read_bytes)  # until the call has begun
            scoring.cancel()
            await asyncio.wait([scoring])
        assert scoring.cancelled()


async def test_no_late_reply_is_taken_for_that_of_another_call(folder, monkeypatch):
    """Each completion is its own reward; some end with the deadline, or are given up."""
    (folder / "own.py").write_text(
        "import time\ndef own(completion):\n    value, seconds = completion.split()\n"
        "    time.sleep(float(seconds))\n    return float(value)\n"
    )
    scored = [played(*(f"{9 * r + i} {0.29 + i / 99 if i % 2 else 0}" for i in range(4)))
              for r in range(4)]  # fmt: skip
    async with spied(monkeypatch):
        scorer = of(folder, {"type": "own.py", "processes": 2}, reward=0.3)
        async with scorer.serving(pytest.fail):
            for given_up, group in enumerate(scored):
                scoring = asyncio.create_task(scorer.score(group))
                if given_up % 2:
                    asyncio.get_running_loop().call_later(0.1, scoring.cancel)
                await asyncio.wait([scoring])
    kept = [t for group in scored for t in group.trajectories if t.rewards]
    assert len(kept) >= 2
    assert all(t.reward == t.rewards["own"] == float(t.completion.split()[0]) for t in kept)


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"type": "__main__:score"}, "__main__:score"),
        ({"type": named(lambda completion: 1.0, {})}, "a worker process can't load"),
        ({"type": "slot.py", "table": [lambda: 1]}, "its keys can't be sent to a worker process"),
    ],
)
def test_what_a_worker_cannot_load_is_refused(folder, monkeypatch, section, message):
    (folder / "slot.py").write_text("def slot(completion, table=None): return 1.0\n")
    monkeypatch.setattr(sys.modules["__main__"], "score", lambda completion: 1.0, raising=False)
    with pytest.raises(ConfigError, match=message):
        of(folder, {**section, "processes": 1})
