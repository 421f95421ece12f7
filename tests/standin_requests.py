"""What the stand-in for vLLM reads from requests, and the errors that it answers with."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
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
