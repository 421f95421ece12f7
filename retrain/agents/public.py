"""The endpoint of one model for any client, at http://HOST:PORT/v1.

Each call is a rollout of its own, so the server remembers nothing, and needs no more memory the
longer it runs. It rejects web pages of other sites as the training service does; without a key, it
only answers calls that are addressed to a loopback name.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from retrain.agents.api import Api, Decode, Request
from retrain.agents.calls import CallError, Calls
from retrain.agents.completions import Text
from retrain.agents.connections import as_json, has_key, while_connected
from retrain.agents.guests import Guest
from retrain.agents.live import Live, Stream
from retrain.agents.openai import ChatCompletions
from retrain.agents.server import EndpointServer, sampled
from retrain.config import EndpointConfig
from retrain.wire.web import foreign

LOOPBACK = ("localhost", "127.0.0.1", "::1")
ADVICE = "to allow others, start with --api-key-env"


class PublicServer(EndpointServer):
    """Serves the model that `present` gives it; all arguments of clients that it knows count."""

    below = "/v1"

    def __init__(self, host: str, port: int, key: str | None) -> None:
        config = EndpointConfig(
            host=host,
            port=port,
            honour=("max_tokens", "temperature", "top_p", "top_k", "stop", "seed"),
        )
        super().__init__(config, repr)  # until `present` gives the decoder
        self._key = key
        self._calls: Callable[[], Calls] | None = None

    @property
    def url(self) -> str:
        """The base URL of clients."""
        return f"{self._url}/v1"

    def present(self, calls: Callable[[], Calls], decode: Decode, model: str) -> None:
        """Answer each call by what `calls` makes for it; before, calls get status 503."""
        self._calls, self._decode, self._model = calls, decode, model

    def _own_route(self) -> Route:
        return Route("/health", self._safe(self._health), methods=["GET"])

    async def _health(self, http: HttpRequest) -> Response:
        """Needs no key."""
        self._check_site(http)
        self._ready()
        return as_json({"status": "ok"})

    def _guest(self, http: HttpRequest) -> Guest:
        """A rollout for this call; raises CallError if the client may not call."""
        self._check_site(http)
        if self._key is not None and not has_key(http, self._key):
            self.rejected += 1
            raise CallError(401, "invalid_api_key", "the API key is wrong")
        kind = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if http.method == "POST" and kind != "application/json":
            raise CallError(
                415,
                "unsupported_media_type",
                f"Content-Type: got {kind[:200]!r}, expected application/json",
            )
        http.path_params["rollout"] = secrets.token_hex(12)  # answers have ids of their own
        return Guest(self._ready()(), ())

    def _check_site(self, http: HttpRequest) -> None:
        hosts = LOOPBACK if self._key is None else None
        if reason := foreign(http.headers, hosts, ADVICE):
            raise CallError(403, "forbidden", reason)

    def _ready(self) -> Callable[[], Calls]:
        if self._calls is None:
            raise CallError(503, "server_error", "the model is loading; try again soon")
        return self._calls

    def _allowed(self, request: Request) -> dict[str, Any]:
        """All sampling arguments, and what else the local sampler can do."""
        self._warn("has no effect", request.unused)
        return {**request.options, "extra": request.extra}

    async def _reply(self, http: HttpRequest, guest: Guest, api: Api, request: Request) -> Response:
        """A stream begins with the first token, so that an error before it has its status."""
        simple = len(request.prompts) < 2 and not request.extra.echo
        if not (request.stream and simple and isinstance(api, ChatCompletions | Text)):
            return await super()._reply(http, guest, api, request)
        live = Live()
        request = replace(request, options={**request.options, "watch": live})
        call = asyncio.ensure_future(sampled(guest, request))
        call.add_done_callback(live.end)
        with ExitStack() as failed:
            failed.callback(call.cancel)
            await while_connected(http, live.news())
            if call.done():
                call.result()
            failed.pop_all()
        head = api.head(request, f"{api.prefix}-{http.path_params['rollout']}-0")
        finish = partial(self._answer, http, guest, api, request)
        return Stream(api, request, head, live, call, finish)
