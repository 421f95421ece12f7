"""The endpoint of one model for any client, at http://HOST:PORT/v1.

Each call is a rollout of its own, so the server remembers nothing, and needs no more memory the
longer it runs. Without a key, it only answers calls that are addressed to a loopback name: a web
page in a browser on this machine can't use it.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from retrain.config import EndpointConfig
from retrain.endpoint.api import Decode
from retrain.endpoint.connections import has_key
from retrain.endpoint.guests import Guest
from retrain.endpoint.server import EndpointServer
from retrain.rollout.calls import CallError, Calls

LOOPBACK = ("localhost", "127.0.0.1", "::1")


class PublicServer(EndpointServer):
    """Serves the model that `present` gives it; all sampling arguments of clients count."""

    def __init__(self, host: str, port: int, key: str | None) -> None:
        config = EndpointConfig(
            host=host,
            port=port,
            honour=("max_tokens", "temperature", "top_p", "top_k", "stop", "seed"),
        )
        super().__init__(config, self._text)
        self._key = key
        self._calls: Callable[[], Calls] | None = None
        self._spell: Decode | None = None

    @property
    def url(self) -> str:
        """The base URL of clients."""
        return f"{self._url}/v1"

    def present(self, calls: Callable[[], Calls], decode: Decode) -> None:
        """Answer each call by what `calls` makes for it; before, calls get status 503."""
        self._calls, self._spell = calls, decode

    def _text(self, token_ids: Sequence[int]) -> str:
        assert self._spell is not None, "a call was answered"
        return self._spell(token_ids)

    def _app(self) -> Starlette:
        """The routes of a rollout, but for its reward, below /v1."""
        app = super()._app()
        routes = [
            Route(
                route.path.removeprefix("/r/{rollout}"),
                route.endpoint,
                methods=sorted(route.methods or ()),
            )
            for route in app.routes
            if isinstance(route, Route) and not route.path.endswith("/reward")
        ]
        return Starlette(routes=routes, exception_handlers=app.exception_handlers)

    def _guest(self, http: HttpRequest) -> Guest:
        """A rollout for this call; raises CallError if the client may not call."""
        self._check(http)
        if self._calls is None:
            raise CallError(503, "server_error", "the model is loading; try again soon")
        http.path_params["rollout"] = secrets.token_hex(12)  # answers have ids of their own
        return Guest(self._calls(), ())

    def _check(self, http: HttpRequest) -> None:
        if self._key is None:
            origin = urlsplit(http.headers.get("origin", "")).hostname
            if http.url.hostname not in LOOPBACK or (origin or LOOPBACK[0]) not in LOOPBACK:
                raise CallError(
                    403,
                    "forbidden",
                    f"without a key, calls must be addressed to one of {', '.join(LOOPBACK)}, and "
                    "must not come from a web page; to allow others, start with --api-key-env",
                )
            return
        if not has_key(http, self._key):
            self.rejected += 1
            raise CallError(401, "invalid_api_key", "the API key is wrong")
