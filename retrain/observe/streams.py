"""Streams whose other end is closed: a pipe or terminal."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO


def let_go(stream: IO[str]) -> None:
    """Redirect its file to the null device, since Python flushes the stream again at exit.

    Does nothing if the stream has no file or is closed.
    """
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, stream.fileno())
        finally:
            os.close(nothing)
