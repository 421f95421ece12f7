"""What the stand-in for vLLM is given: flags, faults and requests; and how it answers errors."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Awaitable, Callable, Container, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from standin_engine import Job
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from retrain.sampler import SamplingParams


class Refused(Exception):
    """An answer with an error, as vLLM words it."""

    def __init__(
        self, code: int, message: str, kind: str = "BadRequestError", param: str | None = None
    ) -> None:
        super().__init__(message)
        self.code, self.kind, self.param = code, kind, param

    def answer(self) -> Response:
        body = {"message": str(self), "type": self.kind, "param": self.param, "code": self.code}
        return JSONResponse({"error": body}, self.code)


def invalid(where: str, kind: str, text: str) -> Refused:
    message = f"1 validation error:\n  {{'type': {kind!r}, 'loc': {where!r}, 'msg': {text!r}}}"
    return Refused(400, message, "Bad Request", where)


def internal(text: str) -> Refused:
    message = (
        f"Call to collective_rpc method failed: Worker failed with error '{text}', please check "
        "the stack trace above for the root cause"
    )
    return Refused(500, message, "InternalServerError")


def sampling(given: Mapping[str, Any], room: int) -> SamplingParams:
    """vLLM's sampling_params as ours; raises Refused for values that vLLM refuses."""
    heat, top_p = given.get("temperature", 1.0), given.get("top_p", 1.0)
    count, length = given.get("n", 1), given.get("max_tokens", room)
    stop = given.get("stop") or ()
    rules = {
        "temperature": (
            0 <= heat <= 2,
            "must be non-negative" if heat < 0 else "must be in [0, 2]",
            heat,
        ),
        "top_p": (0 < top_p <= 1, "must be in (0, 1]", top_p),
        "max_tokens": (length >= 1, "must be at least 1", length),
    }
    for name, (fine, rule, got) in rules.items():
        if not fine:
            text = f"{name} {rule}, got {got}. (parameter={name}, value={got})"
            raise Refused(400, text, param=name)
    if count < 1:
        raise Refused(400, f"n must be at least 1, got {count}.")
    if count > 1 and not heat:
        raise Refused(400, f"n must be 1 when using greedy sampling, got {count}.")
    if stop and not given.get("detokenize", True):
        raise Refused(
            400,
            "stop strings are only supported when detokenize is True. Set detokenize=True to use "
            "stop.",
        )
    return SamplingParams(
        max_tokens=length,
        temperature=heat,
        top_p=top_p,
        top_k=max(given.get("top_k", 0), 0),
        stop=(stop,) if isinstance(stop, str) else tuple(stop),
        stop_token_ids=tuple(given.get("stop_token_ids") or ()),
    )


def prompt_rows(job: Job) -> list[dict[str, Any]]:
    return [
        {
            str(token): {"logprob": max(logprob, -9999.0), "rank": 1, "decoded_token": None}
            for token, logprob in row.items()
        }
        for row in job.scores or ()
    ]


def adapter_of(body: Mapping[str, Any], loaded: Container[str], most: int) -> tuple[str, Path]:
    """The name and the folder of an adapter to load, of the rank `most` at most."""
    name, path = body.get("lora_name"), body.get("lora_path")
    if not (name and path):
        text = "Both 'lora_name' and 'lora_path' must be provided."
        raise Refused(400, text, "InvalidUserInput")
    if name in loaded and not body.get("load_inplace"):
        raise Refused(
            400,
            f"The lora adapter '{name}' has already been loaded. If you want to load the "
            "adapter in place, set 'load_inplace' to True.",
            "InvalidUserInput",
        )
    config = Path(path) / "adapter_config.json"
    if not config.is_file():
        text = f"Loading lora {name} failed: No adapter found for <path>"
        raise Refused(404, text, "NotFoundError")
    rank = json.loads(config.read_text())["r"]
    if rank > most:
        text = f"LoRA rank {rank} is greater than max_lora_rank {most}."
        raise Refused(400, text)
    return name, Path(path)


async def json_of(request: Request) -> dict[str, Any]:
    try:
        body = json.loads(await request.body() or b"{}")
    except ValueError as error:
        raise invalid("body", "json_invalid", "JSON decode error") from error
    return dict(body)


async def disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def as_coroutine(handle: Callable[[Request], Any]) -> Callable[[Request], Awaitable[Response]]:
    """A handler for the event loop: Starlette would call a plain function in a thread."""

    async def call(request: Request) -> Response:
        answer = handle(request)
        return await answer if asyncio.iscoroutine(answer) else answer

    return call


RL = {
    "/pause",
    "/resume",
    "/is_paused",
    "/collective_rpc",
    "/update_weight_version",
    "/weight_info",
    "/server_info",
    "/get_world_size",
}
"""Mounted with VLLM_SERVER_DEV_MODE=1."""
LORA = {"/v1/load_lora_adapter", "/v1/unload_lora_adapter"}
"""Mounted with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1."""


@dataclass
class Faults:
    """What goes wrong; the numbers of a path count down."""

    die: dict[str, int] = field(default_factory=dict)
    """The process is gone at the nth request to this path from now, before its work."""
    die_after: dict[str, int] = field(default_factory=dict)
    """The same after its work, before the answer."""
    die_idle: dict[str, int] = field(default_factory=dict)
    """The same a moment after the answer."""
    kill_worker_at: int = 0
    """The worker is gone at the nth generate request from now: requests in flight get 500, then the
    server ends."""
    fail: dict[str, int] = field(default_factory=dict)
    """So many requests to this path answer 500."""
    hang: dict[str, int] = field(default_factory=dict)
    """So many never answer."""
    lose: dict[str, int] = field(default_factory=dict)
    """So many are done, but their answer is lost."""
    delay: dict[str, float] = field(default_factory=dict)
    """Seconds before each request to this path."""
    slow: float = 0.0
    """Seconds after each decoded token."""
    fail_reload: int = 0
    """So many reloads fail; the next generate request ends the server."""
    stale_head: bool = False
    """A change of weights leaves the head as it was."""


def counted(left: dict[str, int], path: str) -> bool:
    """Whether a fault still has a number for this path; counts it down."""
    if left.get(path, 0) <= 0:
        return False
    left[path] -= 1
    return True


def last(left: dict[str, int], path: str) -> bool:
    """Whether this is the nth request; counts it down."""
    return counted(left, path) and not left[path]


def parser() -> argparse.ArgumentParser:
    """vLLM's flags, as far as they have an effect here."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    made.add_argument("--model", required=True)
    made.add_argument("--host", default="127.0.0.1")
    made.add_argument("--port", type=int, default=8000)
    made.add_argument("--served-model-name")
    made.add_argument("--dtype", default="auto")
    made.add_argument("--max-model-len", type=int)
    made.add_argument("--max-num-seqs", type=int, default=256)
    made.add_argument("--logprobs-mode", default="raw_logprobs")
    made.add_argument("--max-logprobs", type=int, default=20)
    made.add_argument("--enable-scale-out", action="store_true")
    made.add_argument("--enable-lora", action="store_true")
    made.add_argument("--max-loras", type=int, default=1)
    made.add_argument("--max-cpu-loras", type=int)
    made.add_argument("--max-lora-rank", type=int, default=16)
    made.add_argument("--worker-extension-cls", default="")
    return made
