"""The frames between the run and a worker process: 8 bytes of length, then the content.

The run sends pickles. A worker answers in JSON: it runs code that may not be trusted, and reading a
pickle executes what its writer wants.
"""

from __future__ import annotations

import asyncio
import json
import struct
from typing import Any

from retrain.errors import UserCodeError
from retrain.scoring.base import Reward
from retrain.supervision.outages import is_outage

HEADER = struct.Struct(">Q")
LARGEST_FRAME = 2**40
"""Bytes. A longer one is no frame, but text: what faulthandler writes before a process dies."""
Judged = Reward | UserCodeError


class NotAFrame(Exception):
    """The stream has the text `args[0]` in place of a frame."""


def framed(content: bytes) -> bytes:
    return HEADER.pack(len(content)) + content


async def read_frame(stream: asyncio.StreamReader) -> bytes:
    """The content of the next frame. Raises NotAFrame, or IncompleteReadError at the end."""
    head = await stream.readexactly(HEADER.size)
    (size,) = HEADER.unpack(head)
    if size > LARGEST_FRAME:
        raise NotAFrame(head)
    return await stream.readexactly(size)


def encoded(verdicts: list[Judged]) -> bytes:
    """A worker's answer: one item per rollout, or a single error for all of them."""
    return json.dumps([_item(verdict) for verdict in verdicts]).encode()


def decoded(answer: bytes) -> list[Judged]:
    """The verdicts in an answer."""
    return [_verdict(item) for item in json.loads(answer)]


def _item(verdict: Judged) -> Any:
    if isinstance(verdict, UserCodeError):
        return {"error": str(verdict), "outage": is_outage(verdict)}
    parts = [list(verdict.turns), list(verdict.tokens), verdict.applies]
    return [verdict.value, dict(verdict.components), verdict.outcome, *parts]


def _verdict(item: Any) -> Judged:
    if isinstance(item, list):
        return Reward(*item)
    error = UserCodeError(item["error"])
    if item["outage"]:  # the exception stays in the worker; what it means must not
        error.__cause__ = ConnectionError()
    return error
