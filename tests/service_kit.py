"""What the tests of the local service share: one in the process, on a port, and as a process."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx
import torch

from retrain.service.app import ServiceApp
from retrain.service.http_server import make_server
from retrain.service.serve import LOOPBACK
from retrain.service.state import HttpLimits, ServiceSettings

TOKENS = [70, 71, 72, 73, 74, 75]
CROSS_ENTROPY = {"target_tokens": ([71, 72, 73, 74, 75], "int64"), "weights": ([0, 1, 1, 1, 1],)}


def datum(tokens: list[int] = TOKENS[:-1], **inputs: tuple[Any, ...]) -> dict[str, Any]:
    """A datum as both protocols write it; an input is (numbers,) or (numbers, dtype)."""
    tensors = {}
    for name, (numbers, *dtype) in (inputs or CROSS_ENTROPY).items():
        tensors[name] = {"data": numbers, "dtype": dtype[0] if dtype else "float32"}
    chunk = {"type": "encoded_text", "tokens": tokens}
    return {"model_input": {"chunks": [chunk]}, "loss_fn_inputs": tensors}


class Caller:
    """Speaks to a service over httpx, as plainly as a client can."""

    def __init__(self, http: httpx.AsyncClient, app: ServiceApp) -> None:
        self.http, self.app = http, app

    async def post(self, path: str, body: Any = None, expect: int = 200, **more: Any) -> Any:
        return await self.call("POST", path, body, expect, **more)

    async def get(self, path: str, expect: int = 200) -> Any:
        return await self.call("GET", path, None, expect)

    async def call(
        self, method: str, path: str, body: Any = None, expect: int = 200, **more: Any
    ) -> Any:
        kwargs = more or ({} if body is None else {"json": body})
        reply = await self.http.request(method, f"/api/v1/{path}", **kwargs)
        assert reply.status_code == expect, reply.text
        return reply.json() if reply.content else None


class Tinker(Caller):
    """One session and one model of the Tinker protocol, numbered by hand."""

    session_id = model_id = ""

    async def start(self, **lora: Any) -> None:
        self.session_id = (await self.post("create_session", {}))["session_id"]
        self.model_id = await self.model(0, **lora)

    async def model(self, number: int, **lora: Any) -> str:
        body = {
            "session_id": self.session_id,
            "model_seq_id": number,
            "base_model": "tiny",
            "lora_config": {"rank": 8, **lora},
        }
        return (await self.result(await self.post("create_model", body)))["model_id"]

    async def result(self, future: Any) -> Any:
        return await self.post("retrieve_future", {"request_id": future["request_id"]})

    async def submit(self, name: str, seq_id: int, expect: int = 200, **body: Any) -> Any:
        sent = {"model_id": self.model_id, "seq_id": seq_id, **body}
        return await self.post(name, sent, expect)

    async def done(self, name: str, seq_id: int, **body: Any) -> Any:
        return await self.result(await self.submit(name, seq_id, **body))

    async def forward_backward(self, seq_id: int, *data: Any, **loss: Any) -> Any:
        return await self.done("forward_backward", seq_id, **passed(*data, **loss))

    async def step(self, seq_id: int, rate: float = 1e-2) -> Any:
        return await self.done("optim_step", seq_id, adam_params={"learning_rate": rate})

    async def logprobs(self, seq_id: int, model_id: str = "") -> list[float]:
        body = {"model_id": model_id or self.model_id, "seq_id": seq_id}
        body |= {"forward_input": passed(datum())["forward_backward_input"]}
        out = await self.result(await self.post("forward", body))
        return out["loss_fn_outputs"][0]["logprobs"]["data"]

    async def snapshot(self, seq_id: int, number: int, model_id: str = "") -> str:
        """The sampling session of a model's present weights."""
        body = {"model_id": model_id or self.model_id, "sampling_session_seq_id": number}
        saved = await self.done("save_weights_for_sampler", seq_id, **body)
        return saved["sampling_session_id"]

    async def loaded(self, path: str, number: int = 0) -> str:
        """A new model of a saved training state."""
        body = {"session_id": self.session_id, "model_seq_id": number, "path": path}
        future = await self.post("load_weights", {**body, "optimizer": True})
        return (await self.result(future))["model_id"]

    async def base_sampler(self, number: int, **what: str) -> str:
        """The sampling session of the base model, or of `model_path`."""
        body = {"session_id": self.session_id, "sampling_session_seq_id": number}
        what = what or {"base_model": "tiny"}
        return (await self.post("create_sampling_session", body | what))["sampling_session_id"]

    async def asample(
        self, sampler_id: str, seq_id: int, expect: int = 200, /, *, tokens: int = 1, **more: Any
    ) -> Any:
        """Start a request for a completion of TOKENS."""
        body = {"sampling_session_id": sampler_id, "seq_id": seq_id, "num_samples": 1}
        body |= {"prompt": datum(TOKENS)["model_input"], "sampling_params": {"max_tokens": tokens}}
        return await self.post("asample", body | more, expect)

    async def score(self, sampler_id: str, seq_id: int) -> list[float]:
        """The sampler's log-probs of TOKENS[1:]."""
        future = await self.asample(sampler_id, seq_id, prompt_logprobs=True)
        return (await self.result(future))["prompt_logprobs"][1:]


def passed(*data: Any, loss: str = "cross_entropy", config: Any = None) -> dict[str, Any]:
    """The part of a forward_backward's body that says what to train."""
    given = {"data": list(data) or [datum()], "loss_fn": loss}
    if config is not None:
        given["loss_fn_config"] = config
    return {"forward_backward_input": given}


def reference(tinker: Tinker) -> torch.Tensor:
    """The trained model's log-probs at TOKENS[:-1], (5, V), by a plain forward."""
    model = tinker.app.service.models[tinker.model_id].trainer.model
    return model(input_ids=torch.tensor([TOKENS[:-1]])).logits[0].log_softmax(-1)


def dense(tensor: torch.Tensor, dtype: str) -> dict[str, Any]:
    """A tensor as the Tinker protocol writes it."""
    return {"data": tensor.flatten().tolist(), "dtype": dtype, "shape": list(tensor.shape)}


@asynccontextmanager
async def in_process(
    folder: Path, kind: type[Caller] = Tinker, **settings: Any
) -> AsyncIterator[Any]:
    """A caller of a service that lives in this event loop."""
    async with ServiceApp(ServiceSettings(folder=folder, **{"long_poll": 20.0, **settings})) as app:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://local") as http:
            yield kind(http, app)


@contextmanager
def on_a_port(
    folder: Path,
    wrap: Callable[[ServiceApp], Any] | None = None,
    front: HttpLimits | None = None,
    **settings: Any,
) -> Iterator[str]:
    """The URL of a service on a free loopback port, in a thread of its own."""
    app = ServiceApp(ServiceSettings(folder=folder, **{"hosts": LOOPBACK, **settings}))
    server = make_server(wrap(app) if wrap else app, front or HttpLimits(shutdown=2))

    async def serve() -> None:
        async with app:
            await server.serve(sockets=[listening])

    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listening:
        thread = threading.Thread(target=asyncio.run, args=(serve(),))
        thread.start()
        try:
            while not server.started:
                assert thread.is_alive(), "the service did not start"
                time.sleep(0.01)
            undelayed = listening.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
            assert undelayed, "each reply would come 40 ms late"
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            thread.join()


@contextmanager
def as_process(
    folder: Path, *, port: int = 0, options: Sequence[str] = ()
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`retrain serve` on a loopback port (0: any free one), and its URL; killed in the end."""
    own = ("--port", str(port), "--folder", str(folder), *options)
    process = subprocess.Popen(
        [sys.executable, "-m", "retrain", "serve", *own],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        found = re.search(r"http://127\.0\.0\.1:[0-9]+", process.stdout.readline())
        assert found, "the service did not start"
        yield process, found[0]
    finally:
        process.kill()
        process.communicate()
