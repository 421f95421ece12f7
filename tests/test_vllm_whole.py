"""Whole runs that sample with a vLLM server: the stand-in, and with `make vllm` a real one."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from vllm_kit import LORA, StandIn, real_python, saved, small_model, stand_in

from retrain.config import RunConfig, load_config
from retrain.engine.tiny import tiny_folder
from retrain.errors import RetrainError
from retrain.observe.callbacks import Callback
from retrain.observe.journal import read_lines
from retrain.pipeline import train
from tests.chaos.judgement import judge_log
from tests.pipe_kit import ROOT

pytestmark = pytest.mark.filterwarnings(  # PEFT's
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
GENERATE = "/inference/v1/generate"


def echo(run_dir: Path, *changes: str, **sampler: object) -> RunConfig:
    """The quickstart on a vLLM server, for few steps."""
    keys = [f"backend.sampler.{key}={value}" for key, value in sampler.items()]
    small = ["train.total_train_steps=3", "train.groups_per_step=2", "algorithm.group_size=4"]
    always = [f"run_dir={run_dir}", "backend.sampler.type=vllm", "checkpoint.every=1000"]
    always += ["rewards.0.type=tests.chaos.kills:even_letters"]  # each step has a gradient
    file = ROOT / "configs" / "quickstart.yaml"
    return load_config(file, [*always, *small, *keys, *changes])


def rows(run_dir: Path) -> list[dict[str, Any]]:
    """The metrics of each step."""
    return [row for row in read_lines(run_dir / "metrics.jsonl") if "loss" in row]


def spanning(run_dir: Path) -> int:
    """How many completions were sampled by several versions."""
    lines = read_lines(run_dir / "rollouts.jsonl")
    return sum(len(turn) > 1 for line in lines for turn in line.get("spans", ()))


@pytest.fixture(scope="module")
def place() -> Iterator[StandIn]:
    with stand_in(tiny_folder(), *LORA) as server:
        yield server


@pytest.fixture
def server(place: StandIn) -> StandIn:
    place.faults(restart=True)
    return place


async def test_with_staleness_completions_span_versions(server: StandIn, tmp_path: Path) -> None:
    """And each token is trained with the version and log-prob of its own sampling."""
    server.faults(slow=0.004)
    changes = ("sampling.max_tokens=48", "train.total_train_steps=6")
    await train(echo(tmp_path, *changes, url=server.url))
    assert spanning(tmp_path) >= 4
    book, _ = judge_log(tmp_path, load_config(tmp_path / "config.yaml"), rows=8)
    assert (book.wrong, book.step) == ([], 6)


MOMENTS: dict[str, list[dict[str, Any]]] = {
    "folder": [
        {"die": {GENERATE: 3}},
        {"kill_worker_at": 5},
        {"die_after": {"/pause": 2}},
        {"die_after": {"/collective_rpc": 2}},
        {"die_after": {"/resume": 3}},
    ],
    "group": [{"die": {"/collective_rpc": 3}}],
    "adapter": [{"die": {"/v1/load_lora_adapter": 3}}],
}
"""A few; `tests.chaos.servers` has more."""


@contextmanager
def kept_up(lives: Sequence[Mapping[str, Any]], *flags: str) -> Iterator[tuple[str, list[int]]]:
    """A server that is started again when it dies, once per life: its URL, and the lives begun."""
    begun: list[int] = []
    ready, closing = threading.Event(), threading.Event()
    address: list[str] = []

    def keep() -> None:
        port = 0
        for number, faults in enumerate([*lives, {}]):
            with stand_in(tiny_folder(), *flags, port=port) as server:
                server.faults(**faults)
                begun.append(number)
                port = int(server.url.rpartition(":")[2])
                address[:] = [server.url]
                ready.set()
                while server.thread.is_alive() and not closing.is_set():
                    server.thread.join(0.02)
                if closing.is_set():
                    return

    keeper = threading.Thread(target=keep)
    keeper.start()
    try:
        assert ready.wait(20)
        yield address[0], begun
    finally:
        closing.set()
        keeper.join()


class Killer(Callback):
    """Kills the server of a model's folder at a step."""

    def __init__(self, folder: Path, step: int) -> None:
        self.folder, self.step = str(folder), step
        self.killed: list[int] = []

    def on_step_end(self, trainer: Any, step: int, *_: Any) -> None:
        if step == self.step:
            self.killed = [
                pid
                for pid in map(int, filter(str.isdigit, os.listdir("/proc")))
                if self.folder in command_of(pid) and "api_server" in command_of(pid)
            ]
            for pid in self.killed:
                os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.vllm
@pytest.mark.timeout(280)
async def test_the_quickstart_learns_on_a_real_server_that_is_killed_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tied weights over a group, at S=1, on a server that the run starts, and starts again."""
    for name in ("VLLM_CPU_KVCACHE_SPACE", "OMP_NUM_THREADS"):
        monkeypatch.setenv(name, "1")
    folder = saved(small_model(0, tied=True), tmp_path / "model")
    python = real_python()
    assert python is not None
    changes = [f"model={folder}", "train.total_train_steps=120", "train.groups_per_step=16"]
    changes += ["algorithm.group_size=8", "sampling.max_tokens=6", "rewards.0.type=slot_match"]
    killer = Killer(folder, 30)
    config = echo(tmp_path / "run", *changes, python=python)
    await train(config, callbacks=[killer])
    assert len(killer.killed) == 1
    found = rows(tmp_path / "run")
    assert fmean(row["reward/mean"] for row in found[-12:]) >= 0.95
    assert spanning(tmp_path / "run") >= 1
    book, _ = judge_log(tmp_path / "run", load_config(tmp_path / "run/config.yaml"), rows=8)
    assert (book.wrong, book.step) == ([], 120)


@pytest.mark.parametrize("way", MOMENTS)
async def test_a_server_killed_at_any_moment_costs_no_prompt(way: str, tmp_path: Path) -> None:
    """P1 and P3: nothing is trained twice, or on other weights than those it names."""
    lives = MOMENTS[way]
    lora = ["backend.lora.r=4"] if way == "adapter" else []
    steps = 3 * len(lives) + 2
    changes = (f"train.total_train_steps={steps}", "staleness.target=1", "staleness.max=1", *lora)
    with kept_up(lives, *LORA) as (url, begun):
        await train(echo(tmp_path, *changes, url=url, publish=way))
        assert begun == [*range(len(lives) + 1)], "each moment was met"
    book, events = judge_log(tmp_path, load_config(tmp_path / "config.yaml"), rows=8)
    assert (book.wrong, book.step) == ([], steps)
    assert not [event for event in events if event["event"] == "dropped"]
    trained = [row for row in rows(tmp_path) if row["tokens/trained"]]
    assert [row["version"] for row in trained] == [*range(1, len(trained) + 1)]
    assert max(row["kl/sampler_trainer"] for row in trained) < 0.05


async def test_another_model_is_found_before_the_first_step(tmp_path: Path) -> None:
    served = saved(small_model(0, spread=0.3), tmp_path / "served")
    other = saved(small_model(1, spread=0.3), tmp_path / "other")
    changes = [f"model={other}", "backend.lora.r=4", "staleness.max=1"]
    with stand_in(served, *LORA) as server, pytest.raises(RetrainError, match="log-probs"):
        await train(echo(tmp_path / "run", *changes, url=server.url, publish="adapter"))
    assert not rows(tmp_path / "run")
