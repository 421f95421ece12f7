"""The service's trainer over several processes: equal to one, and clear when one is lost."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from retrain.engine.ranks.contract import Place
from retrain.errors import AdapterError
from retrain.protocols.training import AdamParams
from retrain.service.core import Service
from retrain.service.errors import ServiceError
from retrain.service.serve import main
from retrain.service.team import Work
from retrain.service.trainable import Tuning
from retrain.service.trainer import Trainer
from tests.service_kit import Tinker, as_process, datum, in_process, passed
from tests.test_service_trainer import base, rows  # noqa: F401  (a fixture)

LORA, FULL = Tuning(rank=4), Tuning(rank=0)
ADAM = AdamParams(2e-3, grad_clip_norm=1.0)
TIMEOUT = 2.0
STEP = {"adam_params": {"learning_rate": 1e-2}}


@pytest.mark.slow(10)
@pytest.mark.parametrize(
    ("sharding", "loss", "end"),
    [("none", "cross_entropy", signal.SIGKILL), ("full", "gspo", signal.SIGSTOP)],
)
async def test_several_processes_train_as_one_does(base, sharding, loss, end, tmp_path):  # noqa: F811
    """Several checks on one launch, which takes seconds; `tests.chaos.ranks` has every loss."""
    settings = {"processes": 2, "sharding": sharding, "rank_timeout": TIMEOUT}
    async with in_process(tmp_path, **settings) as tinker:
        service = tinker.app.service
        await service.on_engine(lambda: check_loss(service, base, loss, sharding))
        await check_a_failed_request(tinker)
        await check_checkpoints(service, base)
        if end == signal.SIGSTOP:
            await check_a_long_request(service)
        await check_a_lost_process(tinker, end)


def check_loss(service: Service, base, loss: str, sharding: str) -> None:  # noqa: F811
    for tuning in (FULL, LORA):
        alone, together = Trainer(base, tuning), service._engine.trainer(tuning)
        assert isinstance(together.model, FSDPModule) == (sharding == "full" and tuning is FULL)
        sharded = [isinstance(module, FSDPModule) for module in together.model.modules()]
        assert sum(sharded) == (3 if sharding == "full" else 0)  # two layers and the model
        for step in range(2):
            data = [row._replace(in_ratio=[1.0] * len(row.tokens)) for row in rows(5, seed=step)]
            for part in (data[:1], data[1:]):  # the first has rows for one process only
                one, many = (t.forward_backward(part, loss, {}) for t in (alone, together))
                assert many.loss == pytest.approx(one.loss, rel=1e-5, abs=1e-4)
                assert many.tokens == one.tokens
                for own, other in zip(one.logprobs, many.logprobs, strict=True):
                    assert other == pytest.approx(own, abs=1e-5)
            one_norm, many_norm = (t.optim_step(ADAM)["grad_norm"] for t in (alone, together))
            assert many_norm == pytest.approx(one_norm, rel=1e-5)
        weights = together.weights()
        for name, expected in alone.weights().items():
            torch.testing.assert_close(weights[name], expected, atol=1e-5, rtol=0, msg=name)
        together.close()


async def check_a_failed_request(tinker: Tinker) -> None:
    """A row that fails on one rank adds nothing on any, and the service goes on."""
    await tinker.start()
    ones = {"target_tokens": ([71] * 5, "int64"), "advantages": ([1.0] * 5,)}
    good, bad = (datum(**ones, logprobs=([old] * 5,)) for old in (-4.0, -2000.0))
    await tinker.forward_backward(1)
    reply = await tinker.forward_backward(2, good, good, bad, loss="importance_sampling")
    assert "check logprobs and advantages" in reply["error"]
    before = await tinker.logprobs(3)
    norm = (await tinker.step(4))["metrics"]["grad_norm"]
    other = await tinker.model(1)
    await tinker.done("forward_backward", 1, model_id=other, **passed())
    assert (
        norm == (await tinker.done("optim_step", 2, model_id=other, **STEP))["metrics"]["grad_norm"]
    )
    assert await tinker.logprobs(5) == await tinker.logprobs(3, other) != before


async def check_checkpoints(service: Service, base) -> None:  # noqa: F811
    """State moves to another number of processes and back, and goes on exactly."""

    def check(tuning: Tuning) -> None:
        first, second = (service._engine.trainer(tuning) for _ in range(2))
        alone = Trainer(base, tuning)
        learn(first, 0)
        weights, state = first.weights(), first.optimizer_state()
        for copied in (second, alone):
            copied.load(weights, state)
        with pytest.raises(ServiceError, match="LoRA rank"):
            second.load({}, None)
        for trainer in (first, second, alone):
            learn(trainer, 1)
        expected = first.weights()
        for name, found in second.weights().items():
            assert torch.equal(found, expected[name]), name
        for name, found in alone.weights().items():
            torch.testing.assert_close(found, expected[name], atol=1e-5, rtol=0)
        assert second.steps == alone.steps == 2
        first.close()
        second.close()

    for tuning in (FULL, LORA):
        await service.on_engine(lambda tuning=tuning: check(tuning))


def learn(trainer: Trainer, seed: int) -> None:
    trainer.forward_backward(rows(seed=seed), "cross_entropy", {})
    trainer.optim_step(ADAM)


async def check_a_long_request(service: Service) -> None:
    """Its micro-batches may take longer than the timeout together: the processes go on."""

    def call() -> None:
        trainer, took, many = service._engine.trainer(FULL), 0.0, rows(8)
        while took <= TIMEOUT:
            started = time.monotonic()
            trainer.forward(many, "cross_entropy", {})
            took = time.monotonic() - started
            many *= math.ceil(1.5 * TIMEOUT / took)
        trainer.close()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("retrain.service.trainer.LOGITS_AT_ONCE", {"cpu": 1})  # a micro-batch per row
        await service.on_engine(call)
    assert service.failure is None


async def check_a_lost_process(tinker: Tinker, end: signal.Signals) -> None:
    """It ends the service, also if the process only hangs."""
    service = tinker.app.service
    [victim] = service._engine._team._crew.pids
    os.kill(victim, end)
    lost = await tinker.forward_backward(6)
    killed = end == signal.SIGKILL
    said = (
        f"process {victim}) ended with SIGKILL" if killed else f"made no progress for {TIMEOUT:g} s"
    )
    assert said in lost["error"]
    async with asyncio.timeout(5):
        await service.failed.wait()
    assert said in str(service.failure)
    await service._engine._ending
    assert not alive(victim)


@pytest.mark.slow
def test_the_service_ends_with_a_lost_process(tmp_path, monkeypatch):
    """In this process, which has imported torch; `tests.chaos.ranks` ends one of its own."""
    lost: list[int] = []
    end, begin = os.pipe()

    def lose() -> None:
        with open(end) as lines:
            if lines.readline().startswith("Serving tiny"):
                lost.extend(followers(os.getpid()))
                for follower in lost:
                    os.kill(follower, signal.SIGKILL)

    losing = threading.Thread(target=lose)
    with open(begin, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        losing.start()
        assert main(["--port", "0", "--folder", str(tmp_path), "--processes", "2"]) == 1
    losing.join()
    [follower] = lost
    assert not alive(follower)


@pytest.mark.slow
async def test_a_process_that_never_arrives_ends_the_start(tmp_path, monkeypatch):
    monkeypatch.setattr("retrain.service.team._FOLLOWER", "tests.test_service_ranks:never_arrive")
    monkeypatch.setattr("retrain.service.thread.START_SECONDS", 0.5)
    with pytest.raises(AdapterError, match=r"made no progress for 0\.5 s"):
        async with asyncio.timeout(30), in_process(tmp_path, processes=2, rank_timeout=0.5):
            pass


def never_arrive(place: Place, work: Work) -> None:
    signal.pause()


def check_end(folder: Path, *, lost: bool) -> None:
    """The service and its processes end together, with 1 after a loss and 0 after an interrupt."""
    with as_process(folder, options=("--processes", "2")) as (process, _):
        [follower] = followers(process.pid)
        if lost:
            os.kill(follower, signal.SIGKILL)
        else:
            process.send_signal(signal.SIGINT)
        assert process.wait(20) == int(lost)
    assert not alive(follower)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        (("--processes", "0"), "--processes: got 0, expected an integer >= 1"),
        (("--sharding", "full"), "--sharding full needs --processes 2 or more"),
        (("--rank-timeout", "0"), "--rank-timeout: got 0, expected a number of seconds > 0"),
    ],
)
def test_wrong_settings(setting, message, capsys, tmp_path):
    assert main(["--port", "0", "--folder", str(tmp_path), *setting]) == 2
    assert message in capsys.readouterr().err


def test_a_launcher_decides_how_many(capsys, monkeypatch, tmp_path):
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")
    assert main(["--port", "0", "--folder", str(tmp_path), "--processes", "3"]) == 2
    assert "the launcher started 2; drop --processes" in capsys.readouterr().err


def followers(pid: int) -> list[int]:
    """The processes that a service has started for its trainer."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            status, command = (folder / "stat").read_text(), (folder / "cmdline").read_bytes()
            if int(status.rpartition(")")[2].split()[1]) == pid and b"ranks.follower" in command:
                found.append(int(folder.name))
    return found


def alive(pid: int) -> bool:
    with suppress(OSError):
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    return False
