"""What a sample costs over HTTP on loopback, at 100 to 4000 samples in flight.

    python -m benchmarks.http_concurrency

Three clients ask one server, a process of its own, for samples as the Tinker protocol has them: a
submission and one poll for its result, both decoded. `retrain` is our client with all that it does
beside (back-pressure, retries, deadlines, cancellation); `aiohttp` makes the same two calls bare;
`httpx` is a plain httpx.AsyncClient, the contrast. The arms take turns; ratios are medians of the
rounds. CPU is this process's, a request. All arms run with the garbage collector as rare as the
pipe makes it (`--default-collector` leaves it as Python has it: a pass over thousands of live
tasks then costs more than the requests). Bars: at 300 and more at least 0.55 of aiohttp's rate, and
at 4000 at most 1.3 times the CPU of 100, beside which aiohttp's own growth is printed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import resource
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, nullcontext
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
from retrain.pipeline.stages import _rare_collections
from retrain.protocols.tinker import messages

PROMPT = list(range(100, 164))
COMPLETION = 64
PROTOBUF = "application/x-protobuf"
CONNECTIONS = 1000
"""Of each arm; the server would refuse to be asked by more files than it may open."""

Sample = Callable[[], Awaitable[SampleResult]]


def serve(pipe: Connection) -> None:
    """Answer at once, with a result that was encoded beforehand."""
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
    """Requests a second, and CPU milliseconds a request; two requests a sample."""
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


async def compare(url: str, levels: list[int], rounds: int, samples: int, slow: int) -> None:
    """Print a table; `slow` is the most samples in flight at which plain httpx is shown."""
    print(f"{'in flight':>9}  {'arm':8} {'requests/s':>10} {'CPU ms':>8} {'of aiohttp':>10}")
    cpu: dict[str, dict[int, float]] = {name: {} for name in ARMS}
    for level in levels:
        total = max(samples, 4 * level)
        found: dict[str, list[tuple[float, float]]] = {name: [] for name in ARMS}
        for turn in range(rounds):
            for name, arm in ARMS.items():
                if name == "httpx" and (turn > 0 or level > slow):
                    continue
                async with arm(url) as sample:
                    warm = min(level, 50 if name == "httpx" else CONNECTIONS)
                    await measure(sample, warm, 2 * warm)  # connections and code are warm
                    many = level if name == "httpx" else total
                    found[name].append(await measure(sample, level, many))
        base = [rate for rate, _ in found["aiohttp"]]
        for name, values in found.items():
            if not values:
                continue
            rate, used = (statistics.median(column) for column in zip(*values, strict=True))
            ratios = [r / b for (r, _), b in zip(values, base, strict=False)]
            ratio = statistics.median(ratios)
            print(f"{level:9}  {name:8} {rate:10.0f} {used:8.3f} {ratio:10.2f}", flush=True)
            cpu[name][level] = used
    first, last = min(levels), max(levels)
    for name in ("aiohttp", "retrain"):
        growth = cpu[name][last] / cpu[name][first]
        print(f"{name}'s CPU a request, {last} in flight over {first}: {growth:.2f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--levels", type=int, nargs="+", default=[100, 300, 1000, 4000])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--samples", type=int, default=4000, help="at least, of each measurement")
    parser.add_argument("--httpx-up-to", type=int, default=300)
    parser.add_argument("--default-collector", action="store_true")
    given = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, max(soft, 8192)), hard))
    ours, theirs = multiprocessing.Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(theirs,), daemon=True)
    server.start()
    try:
        url = f"http://127.0.0.1:{ours.recv()}"
        collector = nullcontext() if given.default_collector else _rare_collections()
        with collector:
            asyncio.run(compare(url, given.levels, given.rounds, given.samples, given.httpx_up_to))
    finally:
        server.terminate()
        server.join()


if __name__ == "__main__":
    main()
