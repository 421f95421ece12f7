"""Training in several processes: equal to one process, and ended whatever happens to a rank."""

from __future__ import annotations

import asyncio
import os
import pickle
import resource
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import psutil
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("trl")

from retrain.adapters.trl import adapter as adapter_module  # noqa: E402 - after the check
from retrain.adapters.trl.adapter import TrlAdapter  # noqa: E402 - the same
from retrain.adapters.trl.build import _has_optional_parts  # noqa: E402 - the same
from retrain.adapters.trl.ranks.contract import Place, as_place, launched  # noqa: E402 - the same
from retrain.adapters.trl.rows import micro_batches  # noqa: E402 - the same
from retrain.adapters.trl.shares import divide  # noqa: E402 - after the check
from retrain.cli.run import main  # noqa: E402 - the same
from retrain.errors import AdapterError, CheckpointError, ConfigError, NonFiniteError  # noqa: E402 - the same
from retrain.supervision.children import plain_environment  # noqa: E402 - the same
from tests import ranks_kit, trl_kit  # noqa: E402 - the same
from tests.ranks_kit import Launch, check_equal  # noqa: E402 - the same


async def check_resume(
    folder: Path, sharding: str, lora: dict[str, float] | None = None, **keys: str
) -> None:
    """2 steps and 2 more are 4, bit by bit; another number of ranks continues too."""
    config = trl_kit.run_config("dapo")
    alone = trl_kit.options(**ranks_kit.ADAM, lora=lora, **keys)
    options = alone.model_copy(update={"processes": 2, "sharding": sharding})
    batches = [trl_kit.batch(trl_kit.ragged(seed, rows=9)) for seed in range(4)]
    whole, _, _ = await ranks_kit.trained(config, options, batches)
    _, _, state = await ranks_kit.trained(config, options, batches[:2], save=folder)
    rest, _, _ = await ranks_kit.trained(config, options, batches[2:], load=state)
    assert ranks_kit.apart(whole, rest) == 0.0
    one, _, _ = await ranks_kit.trained(config, alone, batches[2:], load=state)
    if not (lora or {}).get("dropout"):  # which draws other numbers
        assert ranks_kit.apart(whole, one) < 1e-5
    if sharding == "none":
        return
    unsharded = alone.model_copy(update={"processes": 2})
    other, _, again = await ranks_kit.trained(
        config, unsharded, batches[2:], load=state, save=folder / "again"
    )
    assert ranks_kit.apart(whole, other) < 1e-5
    with pytest.raises(CheckpointError, match=r"backend.sharding: none"):
        await ranks_kit.trained(config, options, [], load=again)


async def check_exports(folder: Path, sharding: str) -> None:
    """Adapters by themselves and merged into the model are those of the trainer."""
    from transformers import AutoModelForCausalLM

    options = trl_kit.options(**ranks_kit.ADAM, processes=2, sharding=sharding, lora={"r": 4})
    config = trl_kit.run_config("dapo")

    async def look(adapter):
        await adapter.export(folder / "lora")
        merged = await adapter._in_thread("weights")
        return merged, await adapter._in_thread("lora_weights")

    batches = [trl_kit.batch(trl_kit.ragged())]
    whole = options.model_copy(update={"lora": None})
    weights, _, _ = await ranks_kit.trained(
        config, whole, batches, look=lambda adapter: adapter.export(folder)
    )
    exported = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    assert ranks_kit.apart(weights, exported) == 0.0
    _, _, (merged, lora) = await ranks_kit.trained(config, options, batches, look=look)
    assert (lora.config["r"], lora.config["peft_type"]) == (4, "LORA")
    from safetensors.torch import load_file

    written = load_file(folder / "lora" / "adapter_model.safetensors")
    assert ranks_kit.apart(lora.tensors, written) == 0.0
    base = AutoModelForCausalLM.from_pretrained(trl_kit.model_folder())
    from peft import PeftModel

    loaded = PeftModel.from_pretrained(base, folder / "lora").merge_and_unload().state_dict()
    assert ranks_kit.apart(merged, loaded) < 1e-6


async def check_nan() -> None:
    """A NaN that one rank finds ends the step on all, before the optimizer, with its groups."""
    config = trl_kit.run_config("ppo")
    samples = trl_kit.ragged()
    bad = [-3e38 * on for on in samples[0].loss_mask]
    broken = [replace(samples[0], advantages=bad, group_id="bad"), *samples[1:]]
    options = trl_kit.options(**ranks_kit.ADAM, processes=2)
    with pytest.raises(NonFiniteError, match="bad"):
        await ranks_kit.trained(config, options, [trl_kit.batch(broken, "ppo")])


async def check_a_full_disk(folder: Path) -> None:
    """Rank 0 can't write the weights: the run ends at once, though the other waits to go on."""
    batch, config = trl_kit.batch(trl_kit.ragged()), trl_kit.run_config()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    async with TrlAdapter(trl_kit.options(processes=2, sharding="full"), config) as adapter:
        await adapter.update(batch)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        try:
            async with asyncio.timeout(20):
                with pytest.raises(CheckpointError, match="File too large"):
                    await adapter.save(folder)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        with pytest.raises(AdapterError):
            await adapter.update(batch)


async def lose(follower: int) -> None:
    """Send the follower of a training the signals that only rank 0 heeds, and kill it."""
    batch = trl_kit.batch(trl_kit.ragged())
    async with TrlAdapter(trl_kit.options(processes=2), trl_kit.run_config()) as adapter:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(follower, number)
            await adapter.update(batch)
        os.kill(follower, signal.SIGKILL)
        with pytest.raises(AdapterError, match=rf"{follower}.* SIGKILL"):
            await adapter.update(batch)


async def check_a_hanging_rank(launch: Launch, monkeypatch: pytest.MonkeyPatch) -> None:
    """An update that is given up ends the ranks, and the adapter closes."""
    monkeypatch.setattr(adapter_module, "RANKS_SECONDS", 0.2)
    batch, [follower] = trl_kit.batch(trl_kit.ragged()), launch.crew.pids
    async with TrlAdapter(trl_kit.options(processes=2), trl_kit.run_config()) as adapter:
        await adapter.update(batch)
        os.kill(follower, signal.SIGSTOP)
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.5):
                await adapter.update(batch)
    assert not psutil.pid_exists(follower)


@pytest.mark.slow(20)
async def test_two_ranks_train_as_one_process_does(tmp_path: Path) -> None:
    """Many checks on one launch, which takes seconds; `tests.chaos.ranks` has every loss."""
    async with ranks_kit.launched(2, tmp_path) as launch:
        await check_equal("dapo, kl and entropy", 2, "none")
        await check_equal("dpo", 2, "none")
        await check_equal("custom", 2, "none")
        await check_equal("ppo", 2, "full")
        await check_equal("grpo, lora", 2, "full")
        await check_resume(tmp_path / "ddp", "none", {"r": 4, "dropout": 0.2})
        await check_resume(tmp_path / "fsdp", "full", lr_scheduler="linear")
        await check_resume(tmp_path / "fsdp-lora", "full", {"r": 4})
        await check_exports(tmp_path, "full")
        await check_nan()
        await lose(launch.crew.pids[0])


@pytest.mark.slow(15)
async def test_a_rank_that_others_wait_for_ends_the_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with ranks_kit.launched(2, tmp_path) as other:
        async with ranks_kit.launched(2, tmp_path):
            await check_a_full_disk(tmp_path)
        await check_a_hanging_rank(other, monkeypatch)


# --- shares


@pytest.mark.parametrize("even", [False, True])
@pytest.mark.parametrize("size", [2, 3])
def test_each_sample_is_trained_on_one_rank(size: int, even: bool) -> None:
    samples = trl_kit.ragged(rows=13)
    parts = micro_batches(samples, rows=None, tokens=60)
    divided = divide(trl_kit.batch(samples), parts, size, even=even)
    shares = [pickle.loads(pickle.dumps(share.alone())) for share in divided]
    trained = [
        sample
        for share in shares
        for part in share.parts
        for sample in ([] if part.idle else part.samples[: len(part.samples) - part.void])
    ]
    assert sorted(map(repr, trained)) == sorted(repr(sample) for part in parts for sample in part)
    for number in range(len(parts)):
        rows = {len(share.parts[number].samples) for share in shares}
        assert 0 not in rows
        assert not even or len(rows) == 1


def test_rollouts_and_pairs_stay_on_one_rank() -> None:
    samples = trl_kit.ragged()
    forked = micro_batches(samples, rows=None, tokens=10**6, rollouts=True)
    shares = divide(trl_kit.batch(samples), forked, 2, rollouts=True)
    owners = [
        {sample.run_id for part in share.parts for sample in part.samples} for share in shares
    ]
    assert sum("fork" in runs for runs in owners) == 1
    pair = [samples[0], samples[1]]
    first, second = divide(trl_kit.batch(pair, "dpo"), [pair], 2, paired=True)
    assert list(first.parts[0].samples) == pair
    assert second.parts[0].idle


# --- places


def test_a_launchers_variables_are_read_and_checked() -> None:
    place = Place(1, 2, 1, 2, "host", 29500)
    assert launched(place.variables()) == place
    assert launched({}) is None
    assert launched({**place.variables(), "WORLD_SIZE": "1"}) is None
    with pytest.raises(ConfigError, match=r"RANK.*torchrun"):
        launched({"WORLD_SIZE": "2"})
    with pytest.raises(ConfigError, match="MASTER_PORT"):
        launched({**place.variables(), "MASTER_PORT": "0"})
    with pytest.raises(ConfigError, match="RANK"):
        launched({**place.variables(), "MASTER_PORT": "x"})


def test_the_variables_of_a_place_are_restored() -> None:
    before = dict(os.environ)
    with as_place(Place(0, 2, 0, 2, "127.0.0.1", 1, spawned=True)):
        assert os.environ["WORLD_SIZE"] == "2"
        assert launched() is None  # of another run in this process
        os.environ["ACCELERATE_USE_FSDP"] = "true"
        assert not {"RANK", "ACCELERATE_USE_FSDP"} & plain_environment().keys()
    assert dict(os.environ) == before


# --- the processes of a run


LEADER = """
import asyncio, pathlib, sys
from retrain.adapters.trl.ranks.crew import Crew

async def lead():
    folder = pathlib.Path(sys.argv[1])
    crew = await Crew.start(2, "work:follow", None, folder=folder, lost=print)
    print(crew.pids[0], flush=True)
    await asyncio.Event().wait()

asyncio.run(lead())
"""
FOLLOWER = """
import pathlib, threading

def follow(place, _):
    pathlib.Path(__file__).with_name("began").touch()
    threading.Event().wait()
"""


def test_a_follower_ends_with_its_leader(tmp_path: Path) -> None:
    (tmp_path / "work.py").write_text(FOLLOWER)
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert leader.stdout is not None
        follower = psutil.Process(int(leader.stdout.readline()))
        while not (tmp_path / "began").exists():
            assert follower.is_running()
            time.sleep(0.01)  # leaves it the processor for its imports
    finally:
        leader.kill()
        leader.communicate()
    assert not psutil.wait_procs([follower], timeout=10)[1]


@pytest.mark.slow(10)
def test_an_interrupted_run_saves_and_ends_its_follower(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In this process, which has imported torch; `tests.chaos.ranks` starts whole runs."""
    found: list[psutil.Process] = []
    end, begin = os.pipe()

    def interrupt() -> None:
        with open(end) as lines:
            if any(line.startswith("step 1/") for line in lines):
                children = psutil.Process().children()
                found.extend(
                    c for c in children if "retrain.adapters.trl.ranks.follower" in c.cmdline()
                )
                for process in (*found, psutil.Process()):  # as Ctrl-C or a container's end may
                    process.send_signal(signal.SIGINT)
            lines.read()

    interrupting = threading.Thread(target=interrupt)
    folder, keys = tmp_path / "run", ["backend.processes=2", "train.total_train_steps=100000"]
    with open(begin, "w") as pipe:
        monkeypatch.setattr(sys, "stdout", pipe)
        interrupting.start()
        assert main(["quickstart", *keys, "--run-dir", str(folder)]) == 130
    interrupting.join()
    assert len(found) == 1
    assert not psutil.wait_procs(found, timeout=10)[1]
    assert list((folder / "checkpoints").glob("step_*"))


def test_under_a_launcher_rank_0_reports_and_all_leave_with_its_code(tmp_path: Path) -> None:
    place = Place(0, 2, 0, 2, "127.0.0.1", 1)
    command = [sys.executable, "-m", "retrain.run", "quickstart", "--dry-run"]
    for keys, code, said in (
        ([], 0, "  processes: 2\n"),  # as the config of a run is written
        (["backend.processes=3"], 2, "got 3, but the launcher started 2 (WORLD_SIZE)"),
    ):
        ranks = [
            subprocess.run(
                [*command, *keys],
                env={**os.environ, **replace(place, rank=rank, local_rank=rank).variables()},
                capture_output=True,
                text=True,
            )
            for rank in range(2)
        ]
        assert [rank.returncode for rank in ranks] == [code] * 2, ranks
        assert said in ranks[0].stdout + ranks[0].stderr
        assert ranks[1].stdout + ranks[1].stderr == ""


def test_ddp_searches_for_unused_weights_only_where_experts_are_separate() -> None:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    sizes = {"hidden_size": 8, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 8}
    experts = {"num_experts": 2, "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    model = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(vocab_size=8, num_hidden_layers=1, **sizes, **experts)
    )
    model(torch.tensor([[1]])).logits.sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert not _has_optional_parts(model)
    model.model.layers[0].mlp.experts = torch.nn.ModuleList([torch.nn.Linear(8, 8)])
    assert _has_optional_parts(model)
