"""The app behind uvicorn, on a socket that listens already, until a signal ends it."""

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
"""Seconds that requests under way may take once the service is to end."""

KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than clients keep theirs, so that none is
closed just as a request goes out on it."""


async def serve(settings: Settings, listening: socket.socket, announcement: str) -> None:
    """Until SIGINT or SIGTERM; a second SIGINT doesn't wait for the requests under way.

    The socket takes connections already when the announcement is printed, and they are answered
    once the server runs. Raises ConfigError when the model or the device can't be had.
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
    except (RuntimeError, AssertionError) as error:  # the latter from a build without CUDA
        reason = str(error).splitlines()[0]
        raise ConfigError(
            f"--device {device} can't be had: {reason}; cpu is always there"
        ) from error


class _Server(uvicorn.Server):
    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are ours: uvicorn would raise them again before the service has ended."""
        yield
