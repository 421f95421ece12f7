"""Who may call the service: checked before a request's body is read, and before its path is known.

- With an API key, every request needs it, except those for `/api/v1/healthz`.
- With `ServiceSettings.hosts`, a request must be addressed to one of them. A web page whose name
  resolves to this machine (DNS rebinding) sends its own name.
- A browser names the page that sends a request: pages from elsewhere are refused.
"""

from __future__ import annotations

import hmac

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from retrain.service.errors import ServiceError
from retrain.service.protocol import answer_error
from retrain.service.state import ServiceSettings
from retrain.wire.web import foreign

HEALTH = "/api/v1/healthz"
"""The only path that needs no key."""
ADVICE = "if this name is right, start the service with --allow-host"


class AccessCheck:
    """Middleware that answers requests that must not reach `app`: with status 401 or 403."""

    def __init__(self, app: ASGIApp, settings: ServiceSettings) -> None:
        self._app, self._settings = app, settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers, settings = Headers(scope=scope), self._settings
        try:
            if reason := foreign(headers, settings.hosts, ADVICE):
                raise ServiceError(403, reason)
            if settings.api_key is not None and scope["path"] != HEALTH:
                given = headers.get("x-api-key") or headers.get("x-weaver-api-key") or ""
                if not hmac.compare_digest(given.encode("latin-1"), settings.api_key.encode()):
                    raise ServiceError(401, "the API key is missing or wrong")
        except ServiceError as error:
            reply = await answer_error(Request(scope), error)
            await reply(scope, receive, send)
        else:
            await self._app(scope, receive, send)
