"""Runs the app under uvicorn, on a socket that already listens, until a signal."""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import uvicorn

from retrain.errors import ConfigError
from retrain.service.app import create_app
from retrain.service.state import Settings

SHUTDOWN = 10
"""Seconds that running requests may take after a signal."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than in clients, so that the service never
closes one while a client sends a request on it."""


async def serve(settings: Settings, listening: socket.socket, announcement: str) -> None:
    """Serve until SIGINT or SIGTERM; a second SIGINT doesn't wait for running requests.

    The socket already accepts connections when the announcement is printed. Raises ConfigError if
    the model or the device is not available.
    """
    _check_device(settings.device)
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


def _check_device(device: str | None) -> None:
    try:
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:  # the latter in a build without CUDA
        reason = str(error).splitlines()[0]
        raise ConfigError(f"--device {device} is not available: {reason}; cpu always is") from error


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Disabled: uvicorn would raise signals again before the service has ended."""
        yield
