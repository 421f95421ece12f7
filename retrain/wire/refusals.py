"""RemoteError, and how a reply that refuses a call becomes one.

Services write the cause of an error into the body in different ways; `error_body` reads them all.
"""

from __future__ import annotations

import email.utils
import json
import math
import re
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from retrain.errors import AdapterError

if TYPE_CHECKING:
    import httpx


class RemoteError(AdapterError):
    """A service refused a call, failed it, or could not be reached."""

    def __init__(
        self,
        message: str,
        *,
        status: int | None = None,
        code: str = "",
        retryable: bool = False,
        may_have_acted: bool = False,
        request_id: str = "",
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        """HTTP status; None when no reply came, or when a job failed behind a good reply."""
        self.code = code
        """`timeout`, `connect`, `disconnect`, `malformed`, or the service's own code."""
        self.retryable = retryable
        """The same call may succeed later."""
        self.may_have_acted = may_have_acted
        """The service may have executed the call: only an idempotent call is sent again."""
        self.request_id = request_id
        """The service's id of the request, for its support; empty when it gave none."""
        self.retry_after = retry_after
        """Seconds that the service asked to wait; None when it did not ask."""

    def __str__(self) -> str:
        facts = [str(self.status) if self.status else "", self.code]
        facts += [f"request {self.request_id}" if self.request_id else ""]
        known = ", ".join(fact for fact in facts if fact)
        return f"{self.args[0]} [{known}]" if known else str(self.args[0])


@contextmanager
def ignored(*statuses: int) -> Iterator[None]:
    """Ignore a refusal with one of these statuses."""
    try:
        yield
    except RemoteError as error:
        if error.status not in statuses:
            raise


@dataclass(frozen=True, slots=True)
class ErrorBody:
    """What the body of a refusal says."""

    message: str
    code: str = ""
    retryable: bool | None = None
    """None when the body does not say; so for `retry_after`."""
    request_id: str = ""
    retry_after: float | None = None
    html: bool = False
    """An HTML page: the sender may be another server, or a proxy in front of the service."""


def refused(message: str, response: httpx.Response, body: ErrorBody) -> RemoteError:
    """The error of a reply whose status says that the call did not succeed."""
    status, headers = response.status_code, response.headers
    broken = status == 408 or (status >= 500 and status != 501)  # 501: it doesn't know the call
    # A service that says "503, try again" rejected the call before it did anything.
    turned_away = status == 503 and body.retryable is True
    asked = retry_after(headers)
    expired = 'error="invalid_token"' in headers.get("www-authenticate", "")
    return RemoteError(
        message,
        status=status,
        code="invalid_token" if expired else body.code,
        retryable=_retryable(response, body, broken),
        may_have_acted=broken and not turned_away,
        request_id=headers.get("x-request-id") or headers.get("request-id") or body.request_id,
        retry_after=body.retry_after if asked is None else asked,
    )


def _retryable(response: httpx.Response, body: ErrorBody, broken: bool) -> bool:
    if "x-should-retry" in response.headers:
        return response.headers["x-should-retry"] == "true"
    if body.retryable is not None:
        return body.retryable
    return broken or response.status_code in (425, 429)


def error_body(content: bytes) -> ErrorBody:
    """The message of an error, and the other facts that its JSON has."""
    text = content[:2000].decode(errors="replace").strip()
    if text.startswith("<"):
        title = re.search(r"<title>([^<]{1,80})", text, re.IGNORECASE)
        named = f" ({' '.join(title[1].split())})" if title else ""
        return ErrorBody(f"an HTML page{named}", html=True)
    try:
        body = json.loads(content)
    except ValueError:
        return ErrorBody(text)
    if isinstance(body, dict) and isinstance(body.get("error"), dict):
        body = body["error"]
    return _from_json(body, text) if isinstance(body, dict) else ErrorBody(text)


def _from_json(body: Mapping[str, Any], text: str) -> ErrorBody:
    names = ("message", "error_message", "error", "detail")
    message = next((body[name] for name in names if body.get(name)), text)
    retryable = body.get("retryable")
    return ErrorBody(
        message if isinstance(message, str) else json.dumps(message),
        _code(body, message),
        retryable if isinstance(retryable, bool) else None,
        str(body.get("request_id") or ""),
        _asked_pause(body.get("details")),
    )


def _code(body: Mapping[str, Any], message: Any) -> str:
    """The service's code: `code`, or `error` where the message has a key of its own."""
    code = body.get("code") or body.get("error_code") or body.get("error")
    known = code is not message and isinstance(code, (str, int))
    return str(code) if code and known else ""


def _asked_pause(details: Any) -> float | None:
    """The pause in seconds that the details of an error ask for (Weaver's 429)."""
    if not isinstance(details, dict):
        return None
    for name, unit in (("retry_after_seconds", 1.0), ("retry_after_milliseconds", 1e-3)):
        if isinstance(details.get(name), (int, float)):
            return _pause(details[name], unit)
    return None


def _pause(asked: Any, unit: float = 1.0) -> float | None:
    """Seconds; None for NaN. Raises ValueError on text that is not a number."""
    try:
        seconds = float(asked) * unit
    except OverflowError:  # an integer above the range of floats
        return math.inf
    return None if math.isnan(seconds) else seconds


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that `Retry-After` (seconds or a date) or `retry-after-ms` asks for."""
    given = headers.get("retry-after", "")
    try:
        if "retry-after-ms" in headers:
            return _pause(headers["retry-after-ms"], 1e-3)
        return _pause(given)
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(given).timestamp()
    except (ValueError, OverflowError):  # the latter: a year outside the system's clock
        return None
    return max(0.0, date - (time.time() if now is None else now))
