"""Whole runs on a training service: they learn, load no torch, and outlive a killed service.

What a service did is told by itself: its checkpoints, its count of optimizer steps in each, and a
digest of their weights.
"""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
import sys
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from retrain.cli.run import main
from retrain.config import RunConfig, load_config
from retrain.observe.callbacks import Callback, RunFace
from retrain.observe.run_dir import read_events, read_metrics, surviving
from retrain.pipeline import train
from retrain.service.store import CheckpointStore
from tests.service_kit import as_process, on_a_port
from tests.weights_kit import digest

CONFIGS = Path(__file__).parent.parent / "configs"
BACKENDS = ("trl", "tinker", "weaver")
VARIED = "rewards.0.type=tests.chaos.kills:even_letters"
"""A reward with which each step has a gradient, as soon as training begins."""
REMOTE = ("tinker", "weaver")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_file_learns_on_every_backend(backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rate, steps = (3.0e-3, 36) if backend == "trl" else (5.0e-3, 28)  # all weights; LoRA
    section = f"backend={{type: {backend}, learning_rate: {rate}}}"
    more = (f"train.total_train_steps={steps}", "--run-dir", "run")
    assert main([str(CONFIGS / "quickstart.yaml"), section, *more]) == 0
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "run")]
    tenth = rewards[-len(rewards) // 10 :]
    assert sum(tenth) / len(tenth) > 0.15  # from 0.01; 0.25 to 0.35


@pytest.mark.parametrize("backend", REMOTE)
def test_the_shipped_configs_are_the_quickstart_on_another_backend(backend):
    plain = load_config(CONFIGS / "quickstart.yaml").model_dump(exclude={"name", "prompts"})
    remote = load_config(CONFIGS / f"{backend}.yaml").model_dump(exclude={"name", "prompts"})
    assert remote["backend"]["type"] == backend
    assert {k for k in plain if plain[k] != remote[k]} == {"backend"}


LOADED = """
import json, sys
from retrain.cli.run import main

codes = [main(arguments) for arguments in json.loads(sys.argv[1])]
heavy = ("torch", "trl", "peft", "accelerate", "starlette")
sys.exit(f"{codes}, loaded: {[name for name in heavy if name in sys.modules]}")
"""


@pytest.mark.slow
def test_runs_whose_service_is_elsewhere_load_no_torch_and_leave_keep_checkpoints(tmp_path):
    with on_a_port(tmp_path / "service") as url:
        few = ["train.total_train_steps=4", "train.groups_per_step=2", "checkpoint.every=1", VARIED]
        runs = [
            [
                *(str(CONFIGS / f"{backend}.yaml"), f"backend.url={url}", *few),
                *("checkpoint.keep=2", "--run-dir", str(tmp_path / backend)),
            ]
            for backend in REMOTE
        ]
        output, _ = piped("-c", LOADED, json.dumps(runs)).communicate()
        assert output.splitlines()[-1] == "[0, 0], loaded: []", output
        wanted = ["step_000003"] * 2 + ["step_000004"] * 2
        deadline = time.monotonic() + 10  # Weaver's protocol can't delete, but lets expire in 1 s
        while [name[:11] for name in listed(url)] != wanted:
            assert time.monotonic() < deadline, listed(url)
            time.sleep(0.05)


PAGE = (CONFIGS.parent / "docs" / "remote.md").read_text(encoding="utf-8")
RECORDING = PAGE.partition("# recorded.py\n")[2].partition("```")[0]
"""The example of docs/remote.md."""


@pytest.mark.slow
def test_a_run_takes_a_transport_of_ones_own(tmp_path, monkeypatch):
    (tmp_path / "recorded.py").write_text(RECORDING)
    text = (
        (CONFIGS / "tinker.yaml")
        .read_text()
        .replace("type: tinker", "type: recorded.py:RecordedTinker")
    )
    (tmp_path / "run.yaml").write_text(text.replace("../data", str(CONFIGS.parent / "data")))
    monkeypatch.chdir(tmp_path)
    with on_a_port(tmp_path / "service") as url:
        few = ("train.total_train_steps=2", "train.groups_per_step=2", "backend.assume_sum=true")
        assert main(["run.yaml", f"backend.url={url}", *few, VARIED, "--run-dir", "run"]) == 0
    lines = (tmp_path / "requests.log").read_text().splitlines()
    assert lines.count("POST /api/v1/optim_step 200") == 2


def listed(url: str) -> list[str]:
    """The names of the training checkpoints that the service has."""
    found = httpx.get(f"{url}/api/v1/checkpoints").json()["checkpoints"]
    ids = [one["checkpoint_id"] for one in found]
    return sorted(one.partition("/")[2] for one in ids if one.startswith("weights/"))


EXAMPLES = ("train.order=in_order", "train.groups_per_step=2", "train.total_train_steps=6")
"""No sampling takes part in training on demonstrations: equal steps give equal weights."""


@pytest.mark.slow(15)
async def test_runs_outlive_the_kill_of_their_service_and_train_nothing_twice(tmp_path):
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    with on_a_port(clean / "service") as url:
        await asyncio.gather(*(train(demonstrations(backend, url, clean)) for backend in REMOTE))

    waiting = {backend: Waits() for backend in REMOTE}
    with ExitStack() as stack:
        service, url = await asyncio.to_thread(stack.enter_context, as_process(killed / "service"))
        configs = {backend: demonstrations(backend, url, killed) for backend in REMOTE}
        runs = [
            asyncio.ensure_future(train(configs[backend], callbacks=[waiting[backend]]))
            for backend in REMOTE
        ]
        for one in waiting.values():  # none is to be done before the other is there
            await one.saved.wait()
        service.kill()
        await asyncio.to_thread(service.wait)  # it has let go of its port and folder
        port = int(url.rpartition(":")[2])
        service, _ = await asyncio.to_thread(
            stack.enter_context, as_process(killed / "service", port=port)
        )
        for one in waiting.values():
            one.goes_on.set()
        results = dict(
            zip(REMOTE, await asyncio.gather(*runs, return_exceptions=True), strict=True)
        )
        # The models of a killed service are gone, its checkpoints are not.
        failed = {b: found for b, found in results.items() if isinstance(found, BaseException)}
        for error in failed.values():
            assert "--resume" in "".join(traceback.format_exception(error))
        again = [train(configs[backend], resume=True) for backend in failed]
        assert [found.status for found in await asyncio.gather(*again)] == ["completed"] * len(
            again
        )
        service.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(service.wait, 20) == 0
    # A checkpoint whose reply the kill prevented is there twice.
    assert set(steps_and_weights(killed)) == set(steps_and_weights(clean))
    for backend in REMOTE:
        events = surviving(read_events(killed / backend))
        assert [e["step"] for e in events if e["event"] == "update"] == list(range(1, 7))


class Waits(Callback):
    """After its first checkpoint, until it may go on."""

    def __init__(self) -> None:
        self.saved, self.goes_on = asyncio.Event(), asyncio.Event()

    async def on_checkpoint(self, trainer: RunFace, step: int, path: Path) -> None:
        self.saved.set()
        await self.goes_on.wait()


def demonstrations(backend: str, url: str, folder: Path) -> RunConfig:
    section = f"backend={{type: {backend}, url: '{url}', learning_rate: 2.0e-3, assume_sum: true}}"
    where = f"run_dir={folder / backend}"
    return load_config(
        CONFIGS / "sft_tinker.yaml", [section, "checkpoint.every=2", *EXAMPLES, where]
    )


def piped(*words: str) -> subprocess.Popen[str]:
    """A Python process whose output and errors are one text."""
    return subprocess.Popen(
        [sys.executable, *words], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def steps_and_weights(folder: Path) -> list[tuple[int, str]]:
    """Of each checkpoint on the service: its optimizer steps and a digest of its weights."""
    store = CheckpointStore(folder / "service")
    kept = [saved for saved in store.list() if saved.place.kind == "weights"]
    return sorted((saved.steps, digest(store.load(saved.place)[0])) for saved in kept)
