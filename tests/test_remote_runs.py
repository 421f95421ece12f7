"""Whole runs on a training service: they learn, load no torch, and outlive a killed service.

What a service did is told by itself: its checkpoints, its count of optimizer steps in each, and a
digest of their weights.
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from retrain.config import load_config
from retrain.observe.run_dir import read_events, read_metrics, surviving
from retrain.run import main
from retrain.service.store import Store
from tests.service_kit import as_process
from tests.weights_kit import digest

CONFIGS = Path(__file__).parent.parent / "configs"
BACKENDS = ("trl", "tinker", "weaver")
REMOTE = ("tinker", "weaver")


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS)
def test_one_file_learns_on_every_backend(backend, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    section = f"backend={{type: {backend}, learning_rate: 2.0e-3}}"
    assert main([str(CONFIGS / "quickstart.yaml"), section, "--run-dir", "run"]) == 0
    rewards = [row["reward/mean"] for row in read_metrics(tmp_path / "run")]
    tenth = rewards[-len(rewards) // 10 :]
    assert sum(tenth) / len(tenth) >= 0.9


@pytest.mark.parametrize("backend", REMOTE)
def test_the_shipped_configs_are_the_quickstart_on_another_backend(backend):
    plain = load_config(CONFIGS / "quickstart.yaml").model_dump(exclude={"name", "prompts"})
    remote = load_config(CONFIGS / f"{backend}.yaml").model_dump(exclude={"name", "prompts"})
    assert remote["backend"]["type"] == backend
    assert {k for k in plain if plain[k] != remote[k]} == {"backend"}


LOADED = """
import sys
from retrain.run import main

code = main(sys.argv[1:])
heavy = ("torch", "trl", "peft", "accelerate", "starlette")
sys.exit(code or f"loaded: {[name for name in heavy if name in sys.modules]}")
"""


@pytest.mark.slow
@pytest.mark.parametrize("backend", REMOTE)
def test_a_run_whose_service_is_elsewhere_loads_no_torch_and_leaves_keep_checkpoints(
    backend, tmp_path
):
    with as_process(tmp_path / "service") as (_, url):
        done = subprocess.run(
            [
                *(sys.executable, "-c", LOADED, str(CONFIGS / f"{backend}.yaml")),
                *(f"backend.url={url}", "train.total_train_steps=4", "train.groups_per_step=2"),
                *("checkpoint.every=1", "checkpoint.keep=2", "--run-dir", str(tmp_path / "run")),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.stderr.splitlines()[-1] == "loaded: []", done.stderr
        wanted = ["step_000003", "step_000004"]
        deadline = time.monotonic() + 10  # Weaver's protocol can't delete, but lets expire in 1 s
        while [name[:11] for name in listed(url)] != wanted:
            assert time.monotonic() < deadline, listed(url)


def listed(url: str) -> list[str]:
    """The names of the training checkpoints that the service has."""
    found = httpx.get(f"{url}/api/v1/checkpoints").json()["checkpoints"]
    ids = [one["checkpoint_id"] for one in found]
    return sorted(one.partition("/")[2] for one in ids if one.startswith("weights/"))


EXAMPLES = ("train.order=in_order", "train.groups_per_step=8", "train.total_train_steps=12")
"""No sampling takes part in training on demonstrations: equal steps give equal weights."""


@pytest.mark.slow
@pytest.mark.parametrize("backend", REMOTE)
def test_a_run_outlives_the_kill_of_its_service_and_trains_nothing_twice(backend, tmp_path):
    clean, killed = tmp_path / "clean", tmp_path / "killed"
    with as_process(clean / "service") as (_, url):
        first = start(backend, url, clean)
        assert "completed" in first.communicate(timeout=60)[0]

    with as_process(killed / "service") as (service, url):
        run = start(backend, url, killed)
        assert any("checkpoint: " in line for line in run.stdout or ())  # waits for the first
        service.kill()
    with as_process(killed / "service", port=int(url.rpartition(":")[2])):
        told, _ = run.communicate(timeout=60)
        if run.returncode:  # the models of a killed service are gone, its checkpoints are not
            assert "error: " in told
            assert "--resume" in told
            resumed = start(backend, url, killed, "--resume")
            assert "completed" in resumed.communicate(timeout=60)[0]
    assert steps_and_weights(killed) == steps_and_weights(clean)
    updates = [e["step"] for e in surviving(read_events(killed / "run")) if e["event"] == "update"]
    assert updates == list(range(1, 13))


def start(backend: str, url: str, folder: Path, *more: str) -> subprocess.Popen[str]:
    section = f"backend={{type: {backend}, url: '{url}', learning_rate: 2.0e-3}}"
    command = [
        *(sys.executable, "-m", "retrain.run", str(CONFIGS / "sft_tinker.yaml"), section),
        *("checkpoint.every=4", *EXAMPLES, "--run-dir", str(folder / "run"), *more),
    ]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def steps_and_weights(folder: Path) -> list[tuple[int, str]]:
    """Of each checkpoint on the service: its optimizer steps and a digest of its weights."""
    store = Store(folder / "service")
    kept = [saved for saved in store.list() if saved.place.kind == "weights"]
    return sorted((saved.steps, digest(store.weights(saved.place))) for saved in kept)
