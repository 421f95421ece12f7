"""Compare a vLLM server through the pipeline with direct requests to it, on the same requests.

    python -m benchmarks.vllm_sampler --python /path/to/vllm/env/bin/python
    python -m benchmarks.vllm_sampler --url http://127.0.0.1:8000  # its model is on this machine

- `pipe`: `train()` with its run directory, rewards, advantages and staleness 2, on an adapter whose
  updates do nothing, and whose publications only set the server's label.
- `alone`: an aiohttp client that sends the same requests again, with as many in flight as
  the pipe allows, decodes each answer, and does nothing else.

One token in twenty ends a completion, so lengths differ (20 tokens on average, 64 at most). Only
the middle of a run is timed, from a fifth to four fifths of the groups. The arms take turns; the
ratio is that of the medians of tokens per second. Bar: 0.9.

With --python, the model is a random one of 0.3 M parameters, on the CPU: the smaller the model, the
larger the pipe's share of the time. A server for --url needs the flags of docs/vllm.md.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import string
import tempfile
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, ClassVar, Self

import aiohttp

from benchmarks.mock_engine import MockAdapter, MockOptions, mock_config
from retrain.config import RunConfig
from retrain.engine.limits import Limits
from retrain.engine.models import load_tokenizer
from retrain.pipeline import train
from retrain.sampler import SamplingParams
from retrain.scoring import reward
from retrain.types import Completion
from retrain.vllm.client import VllmClient
from retrain.vllm.delivery import Delivery, Failures, each
from retrain.vllm.fleet import Fleet, Member
from retrain.vllm.publish import Publisher
from retrain.vllm.sampler import VllmSampler
from retrain.vllm.server import Launch, VllmServer

STEPS, GROUPS, SIZE, STALENESS = 24, 16, 8, 2
LONGEST = 64
PROMPT = 12
"""Letters of a prompt."""
BAR = 0.9


@reward
def length(completion: str) -> float:
    """Some signal in every group."""
    return float(len(completion))


class Meter:
    """When each group was complete, and its tokens."""

    def __init__(self) -> None:
        self.marks: list[tuple[float, float, int]] = []

    def mark(self, tokens: int) -> None:
        self.marks.append((time.perf_counter(), time.process_time(), tokens))

    def rate(self) -> float:
        """Tokens per second in the middle of the run."""
        seconds, _, tokens = self._middle()
        return tokens / seconds

    def cost(self) -> float:
        """Milliseconds of this process's CPU per 1,000 tokens there; hardly changed by load."""
        _, seconds, tokens = self._middle()
        return 1e6 * seconds / tokens

    def _middle(self) -> tuple[float, float, int]:
        """Seconds, those of the CPU, and tokens, without the start and the end of the run."""
        part = self.marks[len(self.marks) // 5 : len(self.marks) * 4 // 5 + 1]
        (began, used, _), (ended, all_used, _) = part[0], part[-1]
        return ended - began, all_used - used, sum(tokens for *_, tokens in part[1:])


# --- through the pipe


class Labels(Delivery):
    """Publishes only the label of a version, no weights."""

    pauses = False
    version = 0

    async def meet(self, server: VllmClient) -> None:
        """Any server will do."""

    async def prepare(self, weights: object, version: int) -> None:
        self.version = version

    async def deliver(self, servers: Sequence[VllmClient]) -> Failures:
        return await each(servers, lambda server: server.set_version(str(self.version)))

    async def close(self) -> None:
        """Nothing is open."""


async def fits(_: VllmClient) -> None:
    """The server is the same all the time."""


class RecordingClient(VllmClient):
    """Keeps what it sends."""

    bodies: ClassVar[list[Mapping[str, Any]]] = []

    async def generate(self, body: Mapping[str, Any]) -> dict[str, Any]:
        self.bodies.append(body)
        return await super().generate(body)


class ServerOptions(MockOptions):
    """A server, its model's folder, and its context."""

    adapter: ClassVar[str] = "benchmarks.vllm_sampler:ServerAdapter"
    url: str
    folder: str
    context: int
    stop: list[int]
    """Tokens that end a completion."""


class ServerAdapter(MockAdapter):
    """Samples with the run's own vLLM sampler."""

    meter: ClassVar[Meter]

    def __init__(self, options: ServerOptions, config: RunConfig) -> None:
        super().__init__(options, config)
        self.tokenizer: Any = load_tokenizer(options.folder)
        servers = [Member(0, RecordingClient(options.url))]
        fleet = Fleet(servers, Publisher(Labels()), check=fits)
        limits = Limits(options.context, len(self.tokenizer))
        self._vllm = VllmSampler(fleet, self.tokenizer, limits, stop_ids=frozenset(options.stop))

    async def __aenter__(self) -> Self:
        await self._vllm.load_weights({}, 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._vllm.close()

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        completions = await self._vllm.sample(prompt_ids, params, n)
        self.meter.mark(sum(len(completion.token_ids) for completion in completions))
        return completions

    async def publish(self) -> int:
        self.version += 1
        await self._vllm.load_weights({}, self.version)
        return self.version


async def piped(backend: Mapping[str, Any], steps: int) -> Meter:
    """A run of the pipe."""
    ServerAdapter.meter = Meter()
    RecordingClient.bodies.clear()
    draw = random.Random(0)
    rows = ["".join(draw.choices(string.ascii_lowercase, k=PROMPT)) for _ in range(steps * GROUPS)]
    with tempfile.TemporaryDirectory() as folder:
        config = mock_config(
            Path(folder) / "run",
            prompts={"type": "list", "rows": rows},
            algorithm={"group_size": SIZE},
            backend={"type": "benchmarks.vllm_sampler:ServerOptions", **backend},
            sampling={"max_tokens": LONGEST},
            staleness={"target": STALENESS, "max": 2 * STALENESS},
            train={"total_train_steps": steps, "groups_per_step": GROUPS},
            checkpoint={"every": steps},
        )
        rewards = {
            "rewards": [{"type": "benchmarks.vllm_sampler:length"}],
            "model": backend["folder"],
        }
        scored = RunConfig.model_validate({**config.model_dump(), **rewards})
        await train(scored, console=False)
    return ServerAdapter.meter


# --- alone


async def alone(url: str, bodies: Sequence[Mapping[str, Any]]) -> Meter:
    """The same requests, sent by a minimal client."""
    meter, left = Meter(), iter(bodies)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(url, connector=connector) as http:

        async def work() -> None:
            for body in left:
                async with http.post("/inference/v1/generate", json=body) as reply:
                    reply.raise_for_status()
                    choices = json.loads(await reply.read())["choices"]
                meter.mark(sum(len(choice["token_ids"]) for choice in choices))

        await asyncio.gather(*(work() for _ in range((STALENESS + 1) * GROUPS)))
    return meter


# --- the server


@asynccontextmanager
async def server(arguments: argparse.Namespace, folder: Path) -> AsyncIterator[str]:
    """The URL of a running server."""
    if arguments.url:
        yield arguments.url
        return
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    flags = {"max_num_seqs": 256}
    model = str(random_model(folder / "model"))
    launch = Launch(Path(arguments.python), model, "float32", 512, cpu=True, args=flags)
    started = VllmServer(launch, folder=folder, log=folder / "vllm.log")
    try:
        yield await started.start()
    finally:
        await started.close()


def random_model(folder: Path) -> Path:
    """A Qwen3 whose attention vLLM supports on a CPU, with the tokenizer of `tiny`."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    from retrain.engine.tiny import CONFIG, tiny_tokenizer

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
    ids = {name: CONFIG[name] for name in ("vocab_size", "pad_token_id", "eos_token_id")}
    config = Qwen3Config(**sizes, **heads, **ids, max_position_embeddings=512)
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


async def measure(arguments: argparse.Namespace, folder: Path) -> None:
    async with server(arguments, folder) as url, VllmClient(url) as client:
        model = (await client.models())[0]
        path = arguments.model or model["root"]
        words = range(8, len(load_tokenizer(path)))
        stop = random.Random(1).sample(words, len(words) // 20)
        backend = {"url": url, "folder": path, "context": model["max_model_len"], "stop": stop}
        print(f"{path} at vLLM {await client.version()}, {GROUPS * SIZE} rollouts per step")
        await piped(backend, 3)  # warm-up
        found: dict[str, list[Meter]] = {"pipe": [], "alone": []}
        for number in range(arguments.rounds):
            found["pipe"].append(await piped(backend, arguments.steps))
            found["alone"].append(await alone(url, list(RecordingClient.bodies)))
            rates = (f"{name} {meters[-1].rate():,.0f}" for name, meters in found.items())
            print(f"round {number + 1}: {', '.join(rates)} tokens/s", flush=True)
    ours, theirs = (median(meter.rate() for meter in meters) for meters in found.values())
    print(f"pipe / alone: {ours / theirs:.2f} (bar {BAR}), {ours:,.0f} and {theirs:,.0f} tokens/s")
    ours, theirs = (median(meter.cost() for meter in meters) for meters in found.values())
    print(f"CPU of the client: {ours:.0f} and {theirs:.0f} ms per 1,000 tokens")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--url", help="a running server, whose weights may be changed")
    where.add_argument("--python", help="the Python of an environment with vLLM")
    parser.add_argument("--model", help="the folder or id of the model; default: the server's")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=STEPS)
    with tempfile.TemporaryDirectory() as folder:
        asyncio.run(measure(parser.parse_args(), Path(folder)))


if __name__ == "__main__":
    from benchmarks.vllm_sampler import main  # the module whose adapter the config names

    main()
