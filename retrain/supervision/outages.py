"""Recognise an outage by its exception: what user code needs can't be reached for a while.

An outage is a refused or lost connection, a timeout, or the HTTP status 429 or 5xx. Code that
exceeds a deadline of the config is none: it may be an endless loop. Libraries are recognised by
the names of their classes and attributes, so that none of them is imported.
"""

from __future__ import annotations

import errno
import socket
from collections.abc import Iterator
from contextlib import suppress

from retrain.errors import LateError
from retrain.supervision.crashes import kinds_of

KINDS = (ConnectionError, TimeoutError, socket.gaierror)
NUMBERS = frozenset(
    getattr(errno, name)
    for name in ("ENETDOWN", "ENETUNREACH", "ENETRESET", "EHOSTDOWN", "EHOSTUNREACH", "ETIMEDOUT")
)
"""Of an OSError. Others, such as a missing file, are no outage."""
NAMES = frozenset(
    {
        "TransportError",  # httpx
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",
        "APIConnectionError",  # openai, anthropic
        "RateLimitError",
        "InternalServerError",
        "ConnectionError",  # requests
        "Timeout",
        "EndpointConnectionError",  # botocore
        "ConnectionClosed",  # websockets
        "ServiceUnavailable",  # google.api_core
    }
)
"""Of a class or one of its bases."""
TOO_MANY = 429
MOST_LINKS = 32


def is_outage(error: BaseException) -> bool:
    """Whether the error, or one that caused it, is an outage."""
    return not isinstance(error, LateError) and any(map(_unreachable, chain(error)))


def chain(error: BaseException, *, contexts: bool = True) -> Iterator[BaseException]:
    """The error and its causes, outermost first, with the members of groups.

    Without `contexts`, an error that was being handled when the next one was raised is no cause.
    """
    links: list[BaseException] = [error]
    for link in links:  # it grows meanwhile
        yield link
        handled = contexts and not link.__suppress_context__
        context: BaseException | None = link.__context__ if handled else None
        members = link.exceptions if isinstance(link, BaseExceptionGroup) else ()
        for further in (link.__cause__, context, *members):
            if further is None or len(links) >= MOST_LINKS:
                continue
            if all(further is not known for known in links):
                links.append(further)


def _unreachable(error: BaseException) -> bool:
    status = _status(error)
    if status is not None:
        return status == TOO_MANY or 500 <= status < 600
    if isinstance(error, KINDS) or (isinstance(error, OSError) and error.errno in NUMBERS):
        return True
    return not NAMES.isdisjoint(kinds_of(error))


def _status(error: BaseException) -> int | None:
    """The HTTP status: of httpx and openai, requests, aiohttp or urllib."""
    for path in (("response", "status_code"), ("status_code",), ("status",), ("code",)):
        found: object = error
        with suppress(Exception):  # a property of user code may raise anything
            for name in path:
                found = getattr(found, name)
            if isinstance(found, int) and 400 <= found < 600:
                return found
    return None
