"""What the HTTP servers of this package share: the settings of uvicorn, and the limit of files."""

from __future__ import annotations

import resource
from typing import Any

import uvicorn

BACKLOG = 2048
"""Connections that wait in the kernel to be accepted."""
KEEP_ALIVE = 75
"""Seconds that an idle connection stays open: longer than in clients, so that a server never closes
one while a client sends a request on it."""


def settings_of(
    app: Any,  # any: uvicorn's and starlette's types differ
    http: Any,
    *,
    shutdown: int | None,
    backlog: int = BACKLOG,
) -> uvicorn.Config:
    """uvicorn without websockets, logs and headers of its own.

    `http` makes the protocol of a connection. A shutdown waits `shutdown` seconds for requests.
    """
    return uvicorn.Config(
        app,
        http=http,
        ws="none",
        lifespan="off",
        log_config=None,
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        backlog=backlog,
        timeout_keep_alive=KEEP_ALIVE,
        timeout_graceful_shutdown=shutdown,
    )


def allow_files(wanted: int) -> int:
    """Let this process open `wanted` files, if the system allows it; returns how many it may."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return max(soft, wanted)
    soft = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    return soft
