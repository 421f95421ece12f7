"""`url: local`: the training service inside this process, behind an ASGI transport.

It serves the run's own model and keeps its checkpoints in the run's directory, where a resumed run
finds them. `keep` also puts a checkpoint into the run's own checkpoint, so that another run can
start from it. torch is loaded when the service starts, so only for `url: local`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.config import RunConfig
from retrain.config.paths import TINY
from retrain.observe.naming import wanted_folder

if TYPE_CHECKING:
    import httpx


_KEPT = "local_service"
"""The subfolder of a run's checkpoint."""


def local_model(config: RunConfig) -> str:
    """The model's name in the local service: a folder's full path, or the config's name."""
    folder = (config.base_dir / config.model).resolve()
    return str(folder) if config.model != TINY and folder.is_dir() else config.model


@asynccontextmanager
async def in_process(config: RunConfig) -> AsyncIterator[httpx.AsyncBaseTransport]:
    """A transport to a service that runs as long as the block.

    httpx's timeouts and the app's lifespan don't work over ASGI: the clients have their own time
    limits, and the service is entered here.
    """
    import httpx

    from retrain.service.app import ServiceApp
    from retrain.service.state import ServiceSettings

    settings = ServiceSettings(model=local_model(config), folder=_folder(config))
    async with ServiceApp(settings) as app:
        yield httpx.ASGITransport(app, raise_app_exceptions=False)


async def keep(config: RunConfig, path: str, folder: Path) -> None:
    """Put the service's checkpoint `path` into `folder`, as hard links if the disk allows."""
    name = path.rpartition("/")[2]  # unique: it has a random part
    await asyncio.to_thread(_copy, _folder(config), f"*/*/{name}", folder / _KEPT)


async def bring(config: RunConfig, folder: Path) -> None:
    """Copy what `keep` put into `folder` back to the service, unless it still has it."""
    await asyncio.to_thread(_copy, folder / _KEPT, "*/*/*", _folder(config))


def _folder(config: RunConfig) -> Path:
    return wanted_folder(config) / "service"


def _copy(source: Path, pattern: str, target: Path) -> None:
    """The store replaces files and never changes one, so a link is as good as a copy."""
    for file in source.glob(f"{pattern}/*"):
        place = target / file.relative_to(source)
        place.parent.mkdir(parents=True, exist_ok=True)
        if place.exists():
            continue
        try:
            os.link(file, place)
        except OSError:  # another disk, or a disk without links
            shutil.copy2(file, place)
