"""Runs of the TRL backend that sample by vLLM, over the stand-in; options, and their start-up."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from vllm_kit import LORA, saved, small_model, stand_in, standin_python

from retrain.adapters.trl.options import LoraOptions, TrlOptions
from retrain.assembly import assemble
from retrain.config import RunConfig, parse_config
from retrain.errors import AdapterError, ConfigError
from retrain.pipeline.checkpoint import Checkpoints
from retrain.pipeline.stages import train
from retrain.pipeline.verify import ERROR
from retrain.report.page import digest
from retrain.vllm import checks, environment
from retrain.vllm.checkpoint import WeightStore
from retrain.vllm.client import AdapterSlots, VllmClient
from retrain.vllm.opening import _processes
from retrain.vllm.options import VllmOptions, located
from tests.chaos.judgement import judge_log
from tests.test_vllm_sampler import opening_of

pytestmark = pytest.mark.filterwarnings(  # PEFT's
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"
)
ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return saved(small_model(0, spread=0.3), tmp_path_factory.mktemp("models") / "a")


def run(folder: Path, tmp_path: Path, sampler: Mapping[str, Any], **given: Any) -> RunConfig:
    backend = {"type": "trl", "learning_rate": 2e-3, "sampler": sampler, "device": "cpu"}
    staleness = given.pop("staleness", 0)
    config = {
        "model": str(folder),
        "prompts": {"type": "list", "rows": [{"prompt": f"{c}=", "answer": c} for c in "abcd"]},
        "environment": "echo",
        "rewards": [{"type": "tests.chaos.kills:even_letters"}],
        "algorithm": {"type": "grpo", "group_size": 4},
        "backend": {**backend, **given.pop("backend", {})},
        "sampling": {"max_tokens": given.pop("max_tokens", 6)},
        "staleness": {"target": staleness, "max": staleness},
        "train": {
            "total_train_steps": 3,
            "groups_per_step": 2,
            "check_publish": False,  # the stand-in's faults count requests
            **given.pop("train", {}),
        },
        "run_dir": str(tmp_path / "run"),
        "deadlines": {"outage": 5},
    }
    return parse_config({**config, **given}, base_dir=ROOT)


def lines(config: RunConfig, name: str) -> list[dict[str, Any]]:
    assert config.run_dir is not None
    return [json.loads(line) for line in (config.run_dir / name).read_text().splitlines()]


async def test_a_run_starts_restarts_and_ends_its_own_server(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Over a process group; at staleness 0 every ratio is 1. Events and report have the restart."""
    monkeypatch.setenv("VLLM_STANDIN", json.dumps({"die": {"/inference/v1/generate": 6}}))
    sampler = {"type": "vllm", "python": str(standin_python(tmp_path)), "start_seconds": 60}
    config = run(folder, tmp_path, sampler)
    result = await train(config)
    assert result.status == "completed"
    steps = lines(config, "metrics.jsonl")
    for row in filter(lambda row: row["tokens/trained"], steps):
        assert row["ratio/max"] == pytest.approx(1, abs=1e-3)
        assert row["kl/sampler_trainer"] < 1e-5
    sampled = {v for row in lines(config, "rollouts.jsonl") for v in row["versions"]}
    assert sampled == {0, *(row["version"] for row in steps[:-1])}
    assert (tmp_path / "run/vllm-0.log").is_file()
    lost, back = (e for e in lines(config, "events.jsonl") if e["event"] == "server")
    said = "it ended with SIGKILL (often out of memory: see dmesg); restart 1 of 3"
    assert (lost["state"], lost["error"], lost["up"], lost["restarts"]) == ("lost", said, 0, 0)
    assert (back["state"], back["up"], back["restarts"]) == ("back", 1, 1)
    assert back["seconds"] > lost["seconds"]
    assert f"vLLM server {lost['url']} removed from use: {said}" in caplog.text
    history = "\n".join(digest(tmp_path / "run")["history"])
    assert f"the server {lost['url']} is lost: {said}" in history
    assert f"the server {back['url']} is back after 0:" in history


async def test_a_run_samples_adapters_by_running_servers(folder: Path, tmp_path: Path) -> None:
    with stand_in(folder, *LORA) as one, stand_in(folder, *LORA) as two:
        sampler = {"type": "vllm", "url": [one.url, two.url]}
        config = run(
            folder,
            tmp_path,
            sampler,
            staleness=1,
            backend={"lora": {"r": 4}, "dtype": "float32"},
            train={"check_publish": True},
        )
        assert (await train(config)).status == "completed"
        assert all(row[ERROR] < 1e-3 for row in lines(config, "metrics.jsonl"))
        assert {v for row in lines(config, "rollouts.jsonl") for v in row["versions"]} >= {0, 1}
        for server in (one, two):
            assert server.seen("/inference/v1/generate") > 1
            assert server.seen("/pause") == 0


@pytest.mark.parametrize(
    ("staleness", "path", "nth"),
    [(0, "/inference/v1/generate", 7), (1, "/inference/v1/generate", 10), (1, "/pause", 4)],
    ids=["sampling", "sampling ahead", "publish"],
)
async def test_p13_a_run_without_servers_saves_its_last_step_and_resumes(
    folder: Path, tmp_path: Path, staleness: int, path: str, nth: int
) -> None:
    with stand_in(folder) as server:
        server.faults(die={path: nth})
        keys = {"type": "vllm", "publish": "folder"}
        given: dict[str, Any] = {"staleness": staleness, "train": {"total_train_steps": 8}}
        given["deadlines"] = {"outage": 1}
        config = run(folder, tmp_path, {**keys, "url": server.url}, **given)
        with pytest.raises(AdapterError) as caught:
            await train(config)
    text = str(caught.value)
    assert re.match(r"no vLLM server is left: .* has not answered for 1 s", text)
    last = lines(config, "events.jsonl")[-1]["step"]
    updates = [e["step"] for e in lines(config, "events.jsonl") if e["event"] == "update"]
    assert 0 < last == updates[-1] < 8
    assert Checkpoints(tmp_path / "run/checkpoints").steps() == [last]
    with stand_in(folder) as server:
        config = run(folder, tmp_path, {**keys, "url": server.url}, **given)
        assert (await train(config, resume=True)).total_steps == 8
    assert [row["step"] for row in lines(config, "metrics.jsonl")] == list(range(1, 9))
    book, _ = judge_log(tmp_path / "run", config, 4)
    assert not book.wrong
    events = lines(config, "events.jsonl")
    trained = {e["step"] for e in events if e["event"] == "update" and not e.get("skipped")}
    published = [e["version"] for e in events if e["event"] == "publish"]
    assert published == list(range(1, len(trained) + 1)), "also of the step whose publish failed"


async def test_a_server_that_does_not_answer_is_named(folder: Path, tmp_path: Path) -> None:
    sampler = {"type": "vllm", "url": "http://127.0.0.1:9", "start_seconds": 0.2}
    with pytest.raises(AdapterError, match=r"vLLM .*:9.*0.2 s"):
        await train(run(folder, tmp_path, sampler))


@pytest.mark.parametrize("reached", [True, False])
async def test_a_server_that_loads_is_waited_for_longer_than_one_that_never_answers(
    folder: Path, reached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checks, "UNREACHED", 0.1)
    monkeypatch.setattr(checks, "POLL", 0.05)
    with stand_in(folder) as server:
        server.faults(fail={"/health": 8})
        async with VllmClient(server.url if reached else "http://127.0.0.1:9") as client:
            waiting = checks.wait_until_up(client, None)
            if reached:
                await waiting
                assert server.seen("/health") > 8
            else:
                with pytest.raises(AdapterError, match=r"0\.1.*\(.*sampler\.url"):
                    await waiting


async def test_weights_are_written_to_the_given_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    write = WeightStore._write
    spy = lambda *given: written.append(write(*given)) or written[-1]  # noqa: E731
    monkeypatch.setattr(WeightStore, "_write", spy)
    (tmp_path / "shared").mkdir()
    keys = {"type": "vllm", "folder": str(tmp_path / "shared")}
    with stand_in(folder) as server:
        config = run(folder, tmp_path, {"url": server.url, **keys}, train={"total_train_steps": 1})
        await train(config)
    assert len(written) == 2
    assert {path.parent.parent for path in written} == {tmp_path / "shared"}
    assert not list((tmp_path / "shared").iterdir())


def test_the_log_of_a_server_that_does_not_start_is_kept(folder: Path, tmp_path: Path) -> None:
    python = tmp_path / "python"
    fails = "echo RuntimeError: no such thing; exit 3"
    python.write_text(f'#!/bin/sh\n[ "$1" = -c ] && echo True && exit\n{fails}')
    python.chmod(0o755)
    config = run(folder, tmp_path, {"type": "vllm", "python": str(python)})
    with pytest.raises(AdapterError, match=r"3 .* RuntimeError") as caught:
        asyncio.run(train(config))
    named = re.search(r"\((/.*)\)", str(caught.value))
    assert named
    assert "no such thing" in Path(named[1]).read_text()
    shutil.rmtree(Path(named[1]).parent)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({}, "sampler: got neither"),
        ({"url": "http://a:1", "python": "x"}, "sampler: got both"),
        ({"url": "ftp://a"}, r"sampler.url: got 'ftp://a'.*http\(s\)://host"),
        ({"url": ["http://a:1", "http://a:1/"]}, "expected each server once"),
        ({"url": "http://a:1", "gpu_memory": 0.5}, "got url.*gpu_memory"),
        ({"url": "http://[::1]:1", "publish": "adapter"}, "sampler.publish: got 'adapter'"),
        ({"url": "http://a:1", "folder": "nowhere"}, "sampler.folder: .*/nowhere"),
        ({"url": "http://a:1"}, "sampler.folder: http://a:1"),
        ({"url": "http://a:1", "urll": 3}, "sampler.urll.*backend.samp"),
        ({"python": "nowhere/python"}, "sampler.python: .*nowhere/python"),
        ({"python": "sh", "devices": [1, 2, 3], "tensor_parallel": 2}, r"devices: got \[1.*2, 3\]"),
        ({"python": "sh", "args": {"model": "x"}}, "args.*`model`"),
        ({"python": "sh", "args": {"enable-lora": True}}, "`lora`"),
        ({"python": "sh", "args": {"max_num_seqs": None}}, "max_num_seqs: got None"),
        ({"type": "vlm"}, "sampler.type: got 'vlm'"),
    ],
)
def test_what_is_wrong_is_found_before_anything_starts(
    folder: Path, tmp_path: Path, keys: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        assemble(run(folder, tmp_path, {"type": "vllm", **keys}))
    assert len(caught.value.problems) == 1


def test_an_environment_without_vllm_is_found_before_anything_starts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "vllm").mkdir()  # in the working folder, which a server does not see
    monkeypatch.chdir(tmp_path)
    slow = tmp_path / "slow"
    slow.write_text("#!/bin/sh\nexec sleep 60")
    slow.chmod(0o755)
    monkeypatch.setattr(environment, "SECONDS", 0.2)
    assert environment.environment_problem(slow) is None
    assert environment.environment_problem(standin_python(tmp_path)) is None
    monkeypatch.undo()
    path, sh = sys.executable, shutil.which("true")
    for python, message in (
        (path, f"python: {path} has no module vllm; run: {path} -m pip install 'vllm>=0.32'"),
        (sh, f"python: {sh} is not a Python interpreter; expected "),
    ):
        with pytest.raises(ConfigError) as caught:
            assemble(run(folder, tmp_path, {"type": "vllm", "python": python}))
        [problem] = caught.value.problems
        assert problem.startswith(f"backend.sampler.{message}")


def test_devices_that_are_not_there_are_found(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A command in the place of nvidia-smi, since no test can count on a card."""
    keys = {"type": "vllm", "python": str(standin_python(tmp_path)), "devices": [1]}
    monkeypatch.setenv("PATH", str(tmp_path))
    warned = assemble(run(folder, tmp_path, keys)).warnings
    assert any("sampler.devices: got [1]" in text for text in warned)
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho '0, GPU-aa11, NVIDIA H100, 81000'\n")
    command.chmod(0o755)
    with pytest.raises(ConfigError, match=r"devices: got \[1\].*0$"):
        assemble(run(folder, tmp_path, keys))
    parts = assemble(run(folder, tmp_path, {**keys, "devices": [0]}))
    assert not any("devices" in text for text in parts.warnings)


def test_what_the_servers_cannot_promise_is_said(folder: Path, tmp_path: Path) -> None:
    sampler = {"type": "vllm", "url": "http://localhost:1"}
    parts = assemble(run(folder, tmp_path, sampler, train={"order": "in_order"}))
    assert any("train.order is in_order" in text for text in parts.warnings)
    options = {"sampler": sampler, "max_rows": 8}
    with pytest.raises(ConfigError, match=r"backend.max_rows: got 8.*vLLM"):
        assemble(run(folder, tmp_path, sampler, backend=options))
    with pytest.raises(ConfigError, match=r"sampling.temperature: got 2.5.*vLLM.*0"):
        assemble(run(folder, tmp_path, sampler, sampling={"temperature": 2.5}))
    assert TrlOptions(sampler="local").sampler.type == "local"  # type: ignore[arg-type]
    again = parse_config(parts.resolved().model_dump(mode="json"), base_dir=ROOT)
    assert assemble(again).options == parts.options  # the resolved config runs too


def test_options_reach_the_command_line_of_each_server(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = {"max-num-seqs": 512, "enable_prefix_caching": False, "hf_overrides": {"a": 1}}
    options = VllmOptions(
        python=Path("bin/python"),
        devices=[2, 3, 4, 5],
        tensor_parallel=2,
        gpu_memory=0.7,
        args=args,
        start_seconds=9,
    )
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    opening = opening_of(small_model(), folder, tmp_path, lora=AdapterSlots(12, 3))
    launch = _processes(options, opening)[1]._launch
    command = launch.command(80)
    python = f"{tmp_path}/bin/python"
    assert command[:3] == [python, "-m", "vllm.entrypoints.openai.api_server"]
    assert {
        f"--model={folder}",
        "--port=80",
        "--dtype=float32",
        "--tensor-parallel-size=2",
        "--gpu-memory-utilization=0.7",
        "--logprobs-mode=processed_logprobs",
        "--enable-scale-out",
        "--enable-lora",
        "--max-loras=3",
        "--max-lora-rank=16",
        "--max-num-seqs=512",
        "--no-enable-prefix-caching",
    } <= set(command)
    assert command[command.index("--hf-overrides") + 1] == '{"a": 1}'
    assert "--enforce-eager" not in command
    assert launch.environment(tmp_path)["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert launch.seconds == 9
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    [process] = _processes(VllmOptions(python=Path("python")), replace(opening, lora=None))
    on_cpu = process._launch.command(1)
    assert "--enforce-eager" in on_cpu
    assert not [word for word in on_cpu if "memory" in word or "lora" in word]


def test_paths_are_those_of_the_config_or_else_of_the_working_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    configs, work = tmp_path / "configs", tmp_path / "work"
    for place in (work, configs):  # then both have them
        (place / "env/bin").mkdir(parents=True)
        (place / "env/bin/python").symlink_to(sys.executable)
        (place / "weights").mkdir()
        monkeypatch.chdir(work)
        started = VllmOptions(python=Path("env/bin/python"))
        running = VllmOptions(url="http://a:1", folder=Path("weights"))
        for options in (started, running):
            assert list(options.problems(configs, lora=False)) == []
        opening = replace(opening_of(small_model(), folder, tmp_path), base_dir=configs)
        [process] = _processes(started, opening)
        program = process._launch.command(80)[0]
        assert program == str(place / "env/bin/python"), "not what it links to"
        assert located(Path("weights"), configs) == place / "weights"
    [problem] = VllmOptions(python=Path("gone")).problems(configs, lora=False)
    assert problem.startswith(f"python: {configs}/gone or {work}/gone is not a program; expected")


def test_the_first_line_names_processes_and_servers_and_the_way_of_publishing() -> None:
    running = VllmOptions(url=["http://a:1", "http://b:1"])
    started = VllmOptions(python=Path("python"), devices=[0, 1, 2, 3], tensor_parallel=4)
    lora, grouped = LoraOptions(), VllmOptions(url="http://a:1", publish="group")
    for options, text in (
        (TrlOptions(), ""),
        (TrlOptions(processes=2, sharding="full"), "2 processes, sharding full"),
        (TrlOptions(sampler=started), "sampler vllm: 1 server, publish group"),
        (TrlOptions(sampler=started, lora=lora), "sampler vllm: 1 server, publish adapter"),
        (TrlOptions(sampler=running), "sampler vllm: 2 servers, publish folder"),
        (TrlOptions(sampler=grouped, lora=lora), "sampler vllm: 1 server, publish group"),
        (
            TrlOptions(processes=3, lora=lora, sampler=running),
            "3 processes, sharding none; sampler vllm: 2 servers, publish adapter",
        ),
    ):
        assert options.layout() == text
