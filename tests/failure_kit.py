"""A run of a few steps whose judge may fail."""

import asyncio
import itertools
import math

import httpx

from benchmarks.mock_engine import mock_config
from retrain.observe.callbacks import Callback
from retrain.observe.run_dir import read_events, read_metrics, surviving
from retrain.scoring import RewardCalculator
from tests.pipe_kit import rollouts_of, slot_share

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


class Raises(Callback):
    def __init__(self, hook):
        self.hook = hook

    def on_step_end(self, trainer, step, metrics):
        if self.hook == "on_step_end" and step == 5:
            raise ValueError("my callback")

    def on_step_begin(self, trainer, step):
        if self.hook == "on_step_begin" and step == 5:
            raise ValueError("my callback")


def cancel_the_caller():
    asyncio.current_task().cancel()


def throws(error):
    def throw():
        raise error

    return throw


class Judge(RewardCalculator):
    """Fails from its `fails`th call to its `works`th, with `error`."""

    fails, works = math.inf, math.inf
    error: BaseException = httpx.ConnectError("All connection attempts failed")
    calls = itertools.count(1)

    async def calculate(self, trajectory):
        if Judge.fails <= next(Judge.calls) < Judge.works:
            raise Judge.error
        return slot_share(trajectory.completion, trajectory.prompt.answer)
