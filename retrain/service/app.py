"""The ASGI app: both protocols over one service.

async with ServiceApp(ServiceSettings(model="tiny")) as app:
    httpx.ASGITransport(app, raise_app_exceptions=False)
"""

from __future__ import annotations

from typing import Self

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware

from retrain.service.access import AccessCheck
from retrain.service.core import Service
from retrain.service.errors import ServiceError
from retrain.service.protocol import answer_error
from retrain.service.state import ServiceSettings
from retrain.service.tinker import TinkerProtocol
from retrain.service.weaver import WeaverProtocol


class ServiceApp(Starlette):
    """A Starlette app and, for use without a server, an async context manager.

    Entering loads the model, leaving ends all threads.
    """

    def __init__(self, settings: ServiceSettings) -> None:
        self.service = Service(settings)
        super().__init__(
            routes=[*TinkerProtocol(self.service).routes(), *WeaverProtocol(self.service).routes()],
            middleware=[Middleware(AccessCheck, settings)],
            exception_handlers=dict.fromkeys(
                (ServiceError, HTTPException, Exception), answer_error
            ),
        )

    async def __aenter__(self) -> Self:
        await self.service.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.service.__aexit__(*error)
