"""The rate and CPU of requests through our client on loopback, at 300 to 4000 samples in flight.

    python -m benchmarks.http_concurrency

Three clients ask one server, in its own process, for samples over Tinker's protocol: a submission
and one poll for its result, both decoded. `retrain` is our client with everything that it does
(httpx's client over aiohttp's connections, back-pressure, retries, deadlines); `aiohttp` sends the
same two requests and does nothing else; `httpx` is a plain httpx.AsyncClient, for comparison. The
arms take turns; ratios are medians over the rounds. CPU is this process's, per request. The garbage
collector runs as rarely as in a run of the pipe. Bars: at least 0.4 of aiohttp's rate, at most 2.5
times its CPU.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from multiprocessing.connection import Connection

import aiohttp
import httpx
from aiohttp import web

from retrain.adapters.tinker import (
    SampledSequence,
    SampleResult,
    SamplingParams,
    TinkerClient,
)
from retrain.wire.tinker import messages

PROMPT = list(range(100, 164))
COMPLETION = 64
PROTOBUF = "application/x-protobuf"
CONNECTIONS = 1000
"""Of each arm; the server may not open more files."""
COLLECTIONS = (50_000, 20, 50)
"""The thresholds of the garbage collector in a run of the pipe."""

Sample = Callable[[], Awaitable[SampleResult]]


def serve(pipe: Connection) -> None:
    """Answer immediately, with a result that is encoded in advance."""
    one = SampledSequence(list(range(COMPLETION)), [-0.5] * COMPLETION, "length")
    result = messages.encode_sample(SampleResult([one]))
    replies = {
        "create_session": {"session_id": "s"},
        "create_sampling_session": {"sampling_session_id": "s:sample:0"},
        "asample": {"request_id": "s:sample:0:0", "sample_sequence_ids": ["q0"]},
    }

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        await request.read()
        name = request.path.rpartition("/")[2]
        if name == "retrieve_future":
            return web.Response(body=result, content_type=PROTOBUF)
        return web.json_response(replies.get(name, {}))

    async def run() -> None:
        server = await asyncio.get_running_loop().create_server(
            web.Server(answer), "127.0.0.1", 0, backlog=4096
        )
        pipe.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    asyncio.run(run())


@asynccontextmanager
async def retrain_arm(url: str) -> AsyncIterator[Sample]:
    async with TinkerClient(url, api_key="tml-benchmark") as client:
        sampler = await client.sampling_session(base_model="base")
        options = SamplingParams(max_tokens=COMPLETION)
        yield lambda: sampler.sample(PROMPT, options)


def submission(seq_id: int) -> dict[str, object]:
    """The body that our client sends."""
    return {
        "sampling_session_id": "s:sample:0",
        "num_samples": 1,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {
            "max_tokens": COMPLETION,
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
        },
        "prompt_logprobs": False,
        "topk_prompt_logprobs": 0,
        "topk_sample_logprobs": 0,
        "type": "sample",
        "seq_id": seq_id,
    }


@asynccontextmanager
async def aiohttp_arm(url: str) -> AsyncIterator[Sample]:
    headers = {"X-API-Key": "tml-benchmark"}
    connector = aiohttp.TCPConnector(limit=CONNECTIONS)
    async with aiohttp.ClientSession(url, connector=connector, headers=headers) as session:

        async def sample() -> SampleResult:
            async with session.post("/api/v1/asample", json=submission(0)) as reply:
                name = json.loads(await reply.read())["request_id"]
            poll = {"request_id": name, "allow_metadata_only": False}
            accept = {"Accept": PROTOBUF}
            async with session.post("/api/v1/retrieve_future", json=poll, headers=accept) as reply:
                return messages.decode_sample(await reply.read())

        yield sample


@asynccontextmanager
async def httpx_arm(url: str) -> AsyncIterator[Sample]:
    limits = httpx.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
    async with httpx.AsyncClient(
        base_url=url, limits=limits, timeout=600, headers={"X-API-Key": "tml-benchmark"}
    ) as client:

        async def sample() -> SampleResult:
            reply = await client.post("/api/v1/asample", json=submission(0))
            poll = {"request_id": reply.json()["request_id"], "allow_metadata_only": False}
            reply = await client.post(
                "/api/v1/retrieve_future", json=poll, headers={"Accept": PROTOBUF}
            )
            return messages.decode_sample(reply.content)

        yield sample


async def measure(sample: Sample, in_flight: int, total: int) -> tuple[float, float]:
    """Requests per second, and CPU milliseconds per request; a sample takes two requests."""
    left = total

    async def worker() -> None:
        nonlocal left
        while left > 0:
            left -= 1
            result = await sample()
            assert len(result.sequences[0].tokens) == COMPLETION

    before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    async with asyncio.TaskGroup() as group:
        for _ in range(in_flight):
            group.create_task(worker())
    took = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_SELF)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return 2 * total / took, 1e3 * used / (2 * total)


ARMS = {"aiohttp": aiohttp_arm, "retrain": retrain_arm, "httpx": httpx_arm}
LEAST_RATE, MOST_CPU = 0.4, 2.5
"""The bars: our rate and our CPU per request, as multiples of bare aiohttp's."""


async def compare(url: str, levels: list[int], rounds: int, samples: int, slow: int) -> bool:
    """Print a table; returns whether our client meets the bars.

    `slow` is the last level at which plain httpx is measured.
    """
    print(
        f"{'in flight':>9}  {'arm':8} {'requests/s':>10} {'of aiohttp':>10} {'CPU ms':>8}", end=""
    )
    print(f" {'of aiohttp':>10}")
    kept = True
    for level in levels:
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
        for turn in range(rounds):
            for name, arm in ARMS.items():
                if name == "httpx" and (turn > 0 or level > slow):
                    continue
                async with arm(url) as sample:
                    warm = min(level, 50 if name == "httpx" else CONNECTIONS)
                    await measure(sample, warm, 2 * warm)  # connections and code are warm
                    total = level if name == "httpx" else max(samples, 4 * level)
                    found[name].append(await measure(sample, level, total))
        for name, values in found.items():
            if not values:
                continue
            pairs = list(zip(values, found["aiohttp"], strict=False))
            rate, cpu = (statistics.median(column) for column in zip(*values, strict=True))
            of_rate = statistics.median(ours[0] / bare[0] for ours, bare in pairs)
            of_cpu = statistics.median(ours[1] / bare[1] for ours, bare in pairs)
            missed = name == "retrain" and (of_rate < LEAST_RATE or of_cpu > MOST_CPU)
            print(
                f"{level:9}  {name:8} {rate:10.0f} {of_rate:10.2f} {cpu:8.3f} {of_cpu:10.2f}"
                f"{'  MISSED' if missed else ''}",
                flush=True,
            )
            kept = kept and not missed
    return kept


def main() -> int:
    """Print the table; returns 1 if a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", type=int, nargs="+", default=[300, 1000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4000, help="of each measurement, at least")
    parser.add_argument("--httpx-up-to", type=int, default=300)
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    gc.set_threshold(*COLLECTIONS)
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        comparing = compare(url, given.levels, given.rounds, given.samples, given.httpx_up_to)
        return int(not asyncio.run(comparing))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    sys.exit(main())
