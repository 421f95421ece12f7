"""The app behind uvicorn, on a socket that listens already, until a signal ends it."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import uvicorn

from retrain.service.app import create_app
from retrain.service.state import Settings

SHUTDOWN = 10
"""Seconds that requests under way may take once the service is to end."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, so that none is
closed just as a request goes out on it."""


async def serve(settings: Settings, listening: socket.socket, announcement: str) -> None:
    """Until SIGINT or SIGTERM; a second SIGINT doesn't wait for the requests under way.

    The socket takes connections already when the announcement is printed, and they are answered
    once the server runs. Raises ConfigError when the model can't be served.
    """
    async with create_app(settings) as app:
        config = uvicorn.Config(
            app,
            lifespan="off",
            log_level="warning",
            access_log=False,
            timeout_keep_alive=KEEP_ALIVE,
            timeout_graceful_shutdown=SHUTDOWN,
        )
        server = _Server(config)
        loop = asyncio.get_running_loop()
        for number in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(number, server.handle_exit, number, None)
        sys.stdout.write(announcement)
        sys.stdout.flush()
        await server.serve(sockets=[listening])


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again before the service has ended."""
        yield
