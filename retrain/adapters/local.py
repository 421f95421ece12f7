"""`url: local`: the training service inside this process, behind an ASGI transport.

It serves the run's own model and keeps its checkpoints in the run's directory, so that a resumed
run finds them. Its torch is loaded when it starts, and for `url: local` alone.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.config import RunConfig
from retrain.engine.models import TINY

if TYPE_CHECKING:
    import httpx


def local_model(config: RunConfig) -> str:
    """The model's name in the local service: a folder's full path, or as the config has it."""
    folder = (config.base_dir / config.model).resolve()
    return str(folder) if config.model != TINY and folder.is_dir() else config.model


@asynccontextmanager
async def in_process(config: RunConfig) -> AsyncIterator[httpx.AsyncBaseTransport]:
    """A transport to a service that lives as long as the block.

    httpx's timeouts and the app's lifespan don't work over ASGI: the clients set limits of their
    own, and the service is entered here.
    """
    import httpx

    from retrain.service.app import create_app
    from retrain.service.state import Settings

    run_dir = config.run_dir or Path("runs") / (config.name or "run")
    settings = Settings(model=local_model(config), folder=run_dir / "service")
    async with create_app(settings) as app:
        yield httpx.ASGITransport(app, raise_app_exceptions=False)
