"""What to do with a stream whose other end is gone: a closed pipe or terminal."""

from __future__ import annotations

import os
from contextlib import suppress
from typing import IO


def let_go(stream: IO[str]) -> None:
    """Point its file at nothing: what the stream holds would fail again when Python exits.

    A stream without a file, or a closed one, is left as it is.
    """
    with suppress(OSError, ValueError):
        nothing = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(nothing, stream.fileno())
        finally:
            os.close(nothing)
