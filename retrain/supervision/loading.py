"""Imports of large libraries, without the garbage collections that they would cause."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Collect no garbage in the block: it would walk through all objects of torch and its
    companions again and again, a sixth of the time of their import, and find nothing."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
