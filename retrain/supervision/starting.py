"""A line every 20 seconds while something starts that can take minutes."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from retrain.supervision.children import tail

EVERY_SECONDS = 20.0
LENGTH = 120
"""Of a quoted line."""
_NOT_TEXT = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|[^\x20-\x7e\xa0-\uffff]")
_LOG = logging.getLogger(__name__)


@asynccontextmanager
async def announced(what: str, logs: Sequence[Path] = (), begin: int = 0) -> AsyncIterator[None]:
    """While the block runs, log `what` with its seconds, and the last line of the first of `logs`
    that has one.

    Lines before the byte `begin` are of an earlier start.
    """
    task = asyncio.create_task(_announce(what, logs, begin))
    try:
        yield
    finally:
        task.cancel()


async def _announce(what: str, logs: Iterable[Path], begin: int) -> None:
    since = time.monotonic()
    while True:
        await asyncio.sleep(EVERY_SECONDS)
        said = next((f" ({log.name}: {line})" for log in logs if (line := _last(log, begin))), "")
        # A warning, since the console shows no less.
        _LOG.warning("%s: %.0f s ...%s", what, time.monotonic() - since, said)


def _last(log: Path, begin: int) -> str:
    """The last line with text, without what a terminal would not print."""
    lines = [_NOT_TEXT.sub("", line).strip() for line in tail(log, begin)]
    return next((line[:LENGTH] for line in reversed(lines) if line), "")
