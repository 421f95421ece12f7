"""Runs of the TRL adapter in several processes, many of them in one launch.

A start costs seconds of imports. So the followers of one real crew wait for cases, and each case is
a new meeting: its own store, groups and trainer, in the processes that are there already.
"""

from __future__ import annotations

import asyncio
import pickle
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
from accelerate.state import AcceleratorState, DistributedType, PartialState
from torch import Tensor

from retrain.adapters.trl import adapter as adapter_module
from retrain.adapters.trl.adapter import TrlAdapter
from retrain.adapters.trl.follow import follow
from retrain.adapters.trl.options import TrlOptions
from retrain.adapters.trl.ranks.contract import Place
from retrain.adapters.trl.ranks.crew import ADDRESS, STOP_SECONDS, Crew
from retrain.adapters.trl.ranks.group import open_store
from retrain.adapters.trl.ranks.sharding import is_sharded
from retrain.config import RunConfig
from retrain.errors import AdapterError
from retrain.types import Batch, Metrics, Sample
from tests import trl_kit

LONG = timedelta(minutes=10)


@contextmanager
def sharding_on_cpu() -> Iterator[None]:
    """Let accelerate shard on the CPU, where it does not know FSDP; torch's works there too."""
    plain = AcceleratorState.__init__

    def initialize(state: Any, *args: Any, fsdp_plugin: Any = None, **kwargs: Any) -> None:
        plain(state, *args, fsdp_plugin=fsdp_plugin, **kwargs)
        if fsdp_plugin is not None and state.distributed_type == DistributedType.MULTI_CPU:
            state.distributed_type, state.fsdp_plugin = DistributedType.FSDP, fsdp_plugin
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AcceleratorState, "__init__", initialize)
        yield


def serve(place: Place, _: None) -> None:
    """A follower of the crew: follow in one case after the other."""
    control = open_store(place.address, place.port, place.size)
    number = 0
    while True:
        control.wait([f"case/{number}"], LONG)
        case = pickle.loads(control.get(f"case/{number}"))
        if case is None:
            return
        meeting, work = case
        if place.rank < meeting.size:
            with sharding_on_cpu():
                follow(replace(meeting, rank=place.rank, local_rank=place.rank), work)
        number += 1


class Launch:
    """A crew whose processes play many cases."""

    crew: Crew

    def __init__(self) -> None:
        self._cases = 0
        self._lost: Callable[[AdapterError], None] = lambda error: None

    def report(self, error: AdapterError) -> None:
        """A process has ended: the present case hears of it."""
        self._lost(error)

    def send(self, case: object) -> None:
        self.crew.store.set(f"case/{self._cases}", pickle.dumps(case))
        self._cases += 1

    def lend(self) -> type:
        """A stand-in for Crew, that starts nothing."""
        launch = self

        class Lent:
            @classmethod
            async def start(
                cls,
                size: int,
                target: str,
                payload: Any,
                *,
                folder: Path,
                lost: Callable[[AdapterError], None],
            ) -> Lent:
                assert target == TrlOptions.follower
                lent = cls()
                lent.store = open_store(ADDRESS, 0, size, serve=True)
                port = lent.store.port
                lent.place = Place(0, size, 0, size, ADDRESS, port, spawned=True)
                launch._lost = lost
                launch.send((lent.place, payload))
                return lent

            def log(self, rank: int) -> Path:
                return launch.crew.log(rank)

            async def loss(self) -> None:
                return await launch.crew.loss()

            async def end(self, grace: float = STOP_SECONDS) -> None:
                """The processes go on, unless they are to be killed."""
                if not grace:
                    await launch.crew.end(grace)

        return Lent


@asynccontextmanager
async def launched(size: int, folder: Path) -> AsyncIterator[Launch]:
    """Processes for cases of up to `size` ranks."""
    launch, target = Launch(), "tests.ranks_kit:serve"
    launch.crew = await Crew.start(size, target, None, folder=folder, lost=launch.report)
    with pytest.MonkeyPatch.context() as patch, sharding_on_cpu():
        patch.setattr(adapter_module, "Crew", launch.lend())
        try:
            yield launch
        finally:
            launch.send(None)
            await launch.crew.end()


async def trained(
    config: RunConfig,
    options: TrlOptions,
    batches: Sequence[Batch],
    *,
    save: Path | None = None,
    load: Any = None,  # an AdapterState
    look: Callable[[TrlAdapter], Any] | None = None,
) -> tuple[dict[str, Tensor], list[Metrics], Any]:
    """The weights and metrics after a step per batch, and the state saved, or what `look` sees."""
    async with TrlAdapter(options, config) as adapter:
        if load is not None:
            await adapter.load(load)
        metrics = [await adapter.update(batch) for batch in batches]
        extra = await adapter.save(save) if save is not None else None
        if look is not None:
            extra = look(adapter)
            if asyncio.iscoroutine(extra):
                extra = await extra
        return await adapter._in_thread("weights"), metrics, extra


def apart(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    """The largest difference between two models' weights."""
    assert one.keys() == other.keys()
    return max(float((one[name] - other[name]).abs().max()) for name in one)


STEPS = 3
ADAM = {"learning_rate": 2e-3, "eps": 1e-4, "micro_batch_tokens": 40}
SGD = {"learning_rate": 0.1, "args": {"optim": "sgd"}, "micro_batch_tokens": 40}
"""Adam divides by the size of a gradient: a wrong scale of all would not show, while a gradient of
1e-9 moves its weight by a whole step, in a direction that rounding errors decide."""


def data(loss: str) -> list[Sample]:
    samples = trl_kit.ragged(1, rows=14)
    if loss != "dpo":
        return samples
    rows = [sample for sample in samples if any(sample.loss_mask)][:10]
    signs = [1 if row % 2 == 0 else -1 for row in range(len(rows))]
    return [
        replace(row, advantages=[sign * float(on) for on in row.loss_mask])
        for row, sign in zip(rows, signs, strict=True)
    ]


# --- one process and several train the same


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "dapo": ("dapo", {}, {}),
    "dapo, kl and entropy": ("dapo", {"beta": 0.1, "entropy_coef": 0.01}, {}),
    "grpo, lora": ("grpo", {}, {"lora": {"r": 4}, "max_grad_norm": 0.1}),
    "ppo": ("ppo", {}, {"gradient_checkpointing": True}),
    "dpo": ("dpo", {}, {}),
    "custom": ("tests.ranks_kit:pushed", {}, {}),
}


def pushed(logprobs: Tensor, old_logprobs: Tensor, advantages: Tensor, mask: Tensor) -> Tensor:
    """A user's loss, found by its path."""
    ratio = (logprobs - old_logprobs).clamp(max=3.0).exp()
    return -(advantages * ratio.sqrt() * mask).sum()


async def check_equal(name: str, processes: int, sharding: str) -> None:
    loss, loss_config, keys = CASES[name]
    mismatch = {"type": "tis", "level": "sequence"} if name == "ppo" else None
    algorithm = {"type": "grpo", "loss": loss, "loss_config": loss_config, "mismatch": mismatch}
    config = trl_kit.run_config(algorithm=algorithm)
    batches = [trl_kit.batch(data(loss), loss, **loss_config)] * STEPS
    options = trl_kit.options(**SGD, **keys)
    several = options.model_copy(update={"processes": processes, "sharding": sharding})
    one, metrics, _ = await trained(config, options, batches)
    other, found, sharded = await trained(
        config, several, batches, look=lambda adapter: is_sharded(adapter._thread.trainer.model)
    )
    difference = apart(one, other)
    assert difference < 1e-6, f"the weights differ by {difference:.1e}"
    assert sharded == (sharding == "full")
    assert found[-1] == pytest.approx(metrics[-1], rel=1e-4, abs=1e-5)


class Run:
    """`python -m retrain.run` in two processes, after its first step."""

    def __init__(self, folder: Path, *overrides: str, launcher: tuple[str, ...] = ()) -> None:
        command = [*(launcher or (sys.executable,)), "-m", "retrain.run", "quickstart"]
        several = () if launcher else ("backend.processes=2",)
        keys = [*several, "train.total_train_steps=100000", *overrides]
        self.folder = folder
        self.process = subprocess.Popen(
            [*command, *keys, "--run-dir", str(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""
        self.followers: list[psutil.Process] = []

    def until_it_starts(self) -> Run:
        """Until it has said that it loads the model, and started a follower."""
        assert self.process.stdout is not None
        self.output += self.process.stdout.readline()
        while not self.followers:
            assert self.process.poll() is None, self.output
            self.find_followers()
            time.sleep(0.01)
        return self

    def find_followers(self) -> None:
        children = psutil.Process(self.process.pid).children()
        found = [child for child in children if child.is_running()]
        self.followers = [c for c in found if "retrain.adapters.trl.ranks.follower" in c.cmdline()]

    def until_it_trains(self) -> Run:
        """Until its first step is done."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line
            if line.startswith("step 1/"):
                break
        self.find_followers()
        assert len(self.followers) == 1, self.output
        return self

    def end(self) -> int:
        """Its exit code; no follower may be left."""
        try:
            self.output += self.process.communicate(timeout=60)[0]
        finally:
            self.process.kill()
            _, alive = psutil.wait_procs(self.followers, timeout=10)
            for process in alive:
                process.kill()
        assert not alive, "a follower outlived its run"
        return self.process.returncode
