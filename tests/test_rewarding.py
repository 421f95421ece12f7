"""Reward functions, calculators, and how several make one reward."""

import asyncio
import re
import signal
import threading
import time
from contextlib import AsyncExitStack, suppress

import anyio
import pytest

from benchmarks.mock_engine import mock_config
from retrain.assembly import Given, assemble
from retrain.config import DeadlinesConfig
from retrain.errors import PluginError, RunError
from retrain.observe.run_dir import read_events
from retrain.pipeline import train
from retrain.scoring import FunctionReward, Reward, RewardCalculator, Scorer, WeightedReward, reward
from retrain.supervision import boundary
from retrain.types import Completion, Group, Prompt, Trajectory, Turn


def played(*texts: str, answer="yes") -> Group:
    prompt = Prompt("0.0.0", [{"role": "user", "content": "well?"}], answer, {"level": 3})
    group = Group(prompt, [])
    for text in texts:
        turn = Turn([1], Completion([2], [-0.5], text, "stop", 0))
        messages = [*prompt.messages, {"role": "assistant", "content": text}]
        group.trajectories.append(Trajectory(prompt, [turn], messages=messages))
    return group


async def scored(group: Group, *rewards, weights=(1.0, 1.0, 1.0), **keys) -> list[Trajectory]:
    parts = [
        WeightedReward(r.name or type(r).__name__, w, r)
        for r, w in zip(rewards, weights, strict=False)
    ]
    scorer = Scorer(parts, **keys)
    async with scorer.serving(pytest.fail):
        await scorer.score(group)
    return group.trajectories


@reward
def right(completion, answer):
    return completion == answer


@reward(name="long")
async def length(completion, **rest):
    assert set(rest) == {"prompt", "reasoning", "answer", "messages", "metadata", "trajectory"}
    return Reward(
        len(completion), {"characters": len(completion), "level": rest["metadata"]["level"]}
    )


async def test_the_reward_is_the_weighted_sum_of_the_components():
    yes, no = await scored(played("yes", "n"), right, length, weights=(2.0, 0.5))
    assert (yes.reward, no.reward) == (2.0 + 1.5, 0.5)
    assert yes.rewards == {"right": 1.0, "long": 3.0, "long.characters": 3.0, "long.level": 3.0}


async def test_without_rewards_the_environments_is_the_reward():
    group = played("yes", "no")
    group.trajectories[1].rewards["environment"] = 0.5
    assert [t.reward for t in await scored(group)] == [0.0, 0.5]


def test_a_reward_function_is_still_a_function():
    assert right("a", "a") is True
    assert right.name == "right"
    assert length.name == "long"


async def test_a_function_gets_the_names_that_it_declares():
    @reward
    def judge(prompt, completion, answer, metadata):
        return (prompt, completion, answer, metadata) == ("well?", "yes", "yes", {"level": 3})

    [trajectory] = await scored(played("yes"), judge)
    assert trajectory.reward == 1.0


async def test_a_function_that_asks_for_an_unknown_name_is_refused_before_a_rollout():
    with pytest.raises(
        PluginError, match=r"requires response, .*called by name with any of prompt"
    ):
        await scored(played("yes"), reward(lambda response: 1.0))


async def test_keys_of_the_yaml_are_bound_and_not_passed_twice():
    def near(completion, answer, tolerance, **rest):
        assert "tolerance" not in rest
        return tolerance

    [trajectory] = await scored(played("yes"), reward(near, tolerance=0.3))
    assert trajectory.reward == 0.3


class Best(RewardCalculator):
    """1 for the longest of the group."""

    def __init__(self, returns=None):
        self.returns = returns

    async def calculate(self, trajectory):
        raise NotImplementedError

    async def calculate_group(self, group):
        if self.returns is not None:
            return self.returns
        top = max(len(t.completion) for t in group)
        return [float(len(t.completion) == top) for t in group]


async def test_a_group_of_rewards_of_the_wrong_length_is_the_calculators_fault():
    trajectories = await scored(played("a", "b"), Best([1.0]))
    assert {t.outcome for t in trajectories} == {"infra_error"}
    assert (
        "returned 1 rewards, expected one for each of 2 trajectories"
        in trajectories[0].info["error"]
    )


async def test_rollouts_that_failed_before_are_not_scored():
    group = played("aaa", "a")
    group.trajectories[0].outcome = "timeout"
    first, second = await scored(group, Best())
    assert (first.outcome, first.rewards, second.reward) == ("timeout", {}, 1.0)


async def test_async_rewards_of_a_group_run_at_once():
    meeting = asyncio.Barrier(4)

    @reward
    async def together(completion):
        await meeting.wait()
        return 1.0

    async with asyncio.timeout(30):
        assert [t.reward for t in await scored(played(*"abcd"), together)] == [1.0] * 4


async def test_a_plain_function_runs_in_a_thread_and_blocks_nobody():
    loop_thread, threads = threading.get_ident(), set()

    @reward
    def judge(completion):
        threads.add(threading.get_ident())
        return 1.0

    await scored(played("a", "b"), judge)
    assert loop_thread not in threads
    assert len(threads) == 1, "one hop for a group while the function is quick"


async def test_a_slow_plain_function_gets_a_thread_for_each_rollout():
    gate = threading.Barrier(4, timeout=30)

    def judge(completion):
        if completion == "slow":
            time.sleep(0.03)
        else:
            gate.wait()
        return 1.0

    scorer = Scorer([WeightedReward("judge", 1.0, FunctionReward(judge))])
    await scorer.score(played("slow"))
    group = played(*"abcd")
    await scorer.score(group)
    assert [t.reward for t in group.trajectories] == [1.0] * 4, "the four met in four threads"


async def test_a_late_call_in_a_thread_fails_its_rollout_only():
    never = threading.Event()

    @reward
    def judge(completion):
        if completion == "c":
            never.wait()
        return 1.0

    trajectories = await scored(played(*"abcd"), judge, deadlines=DeadlinesConfig(reward=0.1))
    never.set()
    assert [t.outcome for t in trajectories] == ["ok", "ok", "timeout", "ok"]


async def test_an_error_names_the_reward_and_the_line():
    @reward
    async def judge(completion):
        raise KeyError("score")

    [trajectory] = await scored(played("a"), judge)
    assert trajectory.info["error"].startswith("reward 'judge' raised KeyError: 'score' (test_rew")


async def test_no_more_groups_than_the_bound_are_scored_at_once():
    now = most = 0

    @reward
    async def judge(completion):
        nonlocal now, most
        now += 1
        most = max(most, now)
        await asyncio.sleep(0)
        now -= 1
        return 1.0

    scorer = Scorer([WeightedReward("judge", 1.0, judge)], concurrency=2)
    await asyncio.gather(*(scorer.score(played("a")) for _ in range(8)))
    assert most == 2


# --- setup and close ----------------------------------------------------------------------------


class Client(RewardCalculator):
    """Notes what is called; `fault` says where it fails, and how."""

    def __init__(self, fault=""):
        self.fault, self.calls, self.tasks = fault, [], set()
        self.begun, self.free = asyncio.Event(), asyncio.Event()

    async def _at(self, hook):
        self.calls.append(hook)
        self.begun.set()
        self.tasks.add(asyncio.current_task())
        if self.fault == f"{hook} raises":
            raise ConnectionError("nobody there")
        if self.fault == f"{hook} hangs":
            await asyncio.Event().wait()
        if self.fault == f"{hook} never ends":
            while not self.free.is_set():
                with suppress(asyncio.CancelledError):
                    await self.free.wait()
        if self.fault == f"{hook} is cancelled later":
            asyncio.get_running_loop().call_later(0, asyncio.current_task().cancel)
        if self.fault == f"{hook} cancels":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)

    async def setup(self):
        await self._at("setup")
        self.stack = AsyncExitStack()
        self.group = await self.stack.enter_async_context(anyio.create_task_group())

    async def calculate(self, trajectory):
        await self._at("calculate")
        self.tasks.discard(asyncio.current_task())
        return 1.0

    async def close(self):
        await self._at("close")
        if hasattr(self, "stack"):
            await self.stack.aclose()


def run_of(folder, calculator, **changes):
    config = mock_config(folder, **changes)
    scorer = Scorer([WeightedReward("mine", 1.0, calculator)], deadlines=config.deadlines)
    return train(config, parts=assemble(config, Given(scorer=scorer)))


async def test_a_run_sets_a_reward_up_and_closes_it_once_in_one_task(tmp_path):
    held_out = {"prompts": {"type": "list", "rows": ["a="]}, "every": 2, "samples": 2}
    client = Client()
    await run_of(tmp_path, client, eval=held_out, train={"stop_after_flat_steps": 9})
    assert client.calls[0] == "setup"
    assert client.calls[-1] == "close"
    assert client.calls.count("setup") == client.calls.count("close") == 1
    assert set(client.calls[1:-1]) == {"calculate"}
    assert len(client.tasks) == 1


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("setup raises", r"reward 'mine': setup raised ConnectionError: nobody there \(test_rew"),
        ("setup hangs", r"reward 'mine': setup took longer than deadlines.setup = 0.1 s"),
        ("setup cancels", r"reward 'mine': setup: user code cancelled its own task"),
    ],
)
async def test_a_setup_that_fails_ends_the_run_before_a_rollout(tmp_path, fault, message):
    client = Client(fault)
    with pytest.raises(RunError, match=message):
        await run_of(tmp_path, client, deadlines={"setup": 0.1})
    assert client.calls == ["setup", "close"]
    assert not any(event["event"] == "issued" for event in read_events(tmp_path))


@pytest.mark.parametrize("fault", ["close raises", "close hangs", "close cancels"])
async def test_a_close_that_fails_is_only_reported(tmp_path, fault):
    result = await run_of(tmp_path, Client(fault), deadlines={"close": 0.1})
    assert result.total_steps == 4
    [noted] = [event for event in read_events(tmp_path) if event["event"] == "fault"]
    assert "reward 'mine': close" in noted["error"]


async def test_a_close_that_never_ends_is_reported_and_abandoned(monkeypatch):
    monkeypatch.setattr(boundary, "STUCK_SECONDS", 0.03)
    client, faults = Client("close never ends"), []
    limits = DeadlinesConfig(close=0.03)
    scorer = Scorer([WeightedReward("mine", 1.0, client)], deadlines=limits)
    async with scorer.serving(faults.append):
        pass
    client.free.set()
    assert len(faults) == 1
    assert "abandoned" in faults[0]
    await asyncio.wait(client.tasks)


async def test_a_reward_whose_task_user_code_cancels_is_closed_and_reported():
    client, faulted = Client("setup is cancelled later"), asyncio.Queue()
    async with Scorer([WeightedReward("mine", 1.0, client)]).serving(faulted.put_nowait):
        fault = await faulted.get()
        assert fault == "reward 'mine': user code cancelled its task, so it is closed"
    assert client.calls == ["setup", "close"]


async def test_an_interrupted_setup_is_closed():
    client, faults = Client("setup hangs"), []

    async def serve():
        async with Scorer([WeightedReward("mine", 1.0, client)]).serving(faults.append):
            pytest.fail("it never is set up")

    serving = asyncio.create_task(serve())
    await client.begun.wait()
    serving.cancel()
    await asyncio.wait([serving])
    assert serving.cancelled()
    assert client.calls == ["setup", "close"]
    assert not faults


# --- what user code may not do ------------------------------------------------------------------


class Suicidal(RewardCalculator):
    async def calculate(self, trajectory):
        if trajectory.completion == "a":
            asyncio.current_task().cancel()
            await asyncio.sleep(0)
        return 1.0


class AllSuicidal(Suicidal):
    async def calculate_group(self, group):
        asyncio.current_task().cancel()
        return [1.0] * len(group)


async def test_code_that_cancels_its_own_task_fails_its_rollouts_only():
    one, other = await scored(played("a", "b"), Suicidal())
    assert (one.outcome, other.outcome) == ("infra_error", "ok")
    assert one.info["error"] == "reward 'Suicidal': user code cancelled its own task"
    both = await scored(played("a", "b"), AllSuicidal())
    assert [t.outcome for t in both] == ["infra_error"] * 2


@pytest.mark.parametrize(
    ("verdict", "message"),
    [
        (Reward(0.0, outcome="broken"), "the outcome 'broken', expected one of ok, invalid"),
        (Reward(0.0, outcome=["ok"]), r"the outcome \['ok'\], expected one of ok, invalid"),
        (Reward(0.0, {3: 1.0}), r"components {3: 1.0}, expected a mapping of names"),
        (Reward(0.0, [("a", 1.0)]), "expected a mapping of names to numbers"),
    ],
)
async def test_no_unknown_outcome_or_component_enters_the_records(verdict, message):
    [trajectory] = await scored(played("a"), reward(lambda completion: verdict))
    assert trajectory.outcome == "infra_error"
    assert re.search(message, trajectory.info["error"])


@pytest.mark.parametrize(
    "needs_main", [lambda: signal.signal(signal.SIGALRM, signal.SIG_DFL), asyncio.get_event_loop]
)
async def test_a_plain_function_that_needs_the_main_thread_is_advised(needs_main):
    def judge(completion):
        needs_main()
        return 1.0

    [trajectory] = await scored(played("a"), reward(judge))
    assert "set `processes: 4` on this reward" in trajectory.info["error"]


async def test_a_plain_calculate_is_told_to_be_async():
    class Plain(RewardCalculator):
        def calculate(self, trajectory):
            return 1.0

    [trajectory] = await scored(played("a"), Plain())
    assert trajectory.info["error"] == "reward 'Plain' is a plain function. Write `async def`."
