"""What a refusal says of itself, in whichever of the usual shapes its body and headers came."""

from __future__ import annotations

import email.utils
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Fault = Literal["user", "server", "unknown"]


@dataclass(frozen=True, slots=True)
class ErrorBody:
    message: str
    code: str = ""
    fault: Fault | None = None
    retryable: bool | None = None
    """None when the body does not say."""
    request_id: str = ""
    retry_after: float | None = None
    html: bool = False
    """A page for people: what answered may be no such service, or a proxy before it."""


def error_body(content: bytes) -> ErrorBody:
    """What the body of an error says, in whichever of the usual shapes it came."""
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
    if not isinstance(body, dict):
        return ErrorBody(text)
    names = ("message", "error_message", "error", "detail")
    message = next((body[name] for name in names if body.get(name)), text)
    fault = body.get("category") or body.get("fault")
    retryable = body.get("retryable")
    return ErrorBody(
        message if isinstance(message, str) else json.dumps(message),
        _code(body, message),
        fault if fault in ("user", "server") else None,
        retryable if isinstance(retryable, bool) else None,
        str(body.get("request_id") or ""),
        _asked_pause(body.get("details")),
    )


def _code(body: Mapping[str, Any], message: Any) -> str:
    """The service's word for the failure: `code`, or `error` where the message stands apart."""
    word = body.get("code") or body.get("error_code") or body.get("error")
    return str(word) if word and word is not message and isinstance(word, (str, int)) else ""


def _asked_pause(details: Any) -> float | None:
    """The pause in seconds that the details of an error ask for (Weaver's 429)."""
    if not isinstance(details, dict):
        return None
    for name, unit in (("retry_after_seconds", 1.0), ("retry_after_milliseconds", 1e-3)):
        if isinstance(details.get(name), (int, float)):
            return float(details[name]) * unit
    return None


def retry_after(headers: Mapping[str, str], now: float | None = None) -> float | None:
    """Seconds that `Retry-After` (seconds or a date) or `retry-after-ms` asks for."""
    try:
        if "retry-after-ms" in headers:
            return float(headers["retry-after-ms"]) / 1000.0
        return float(headers["retry-after"])
    except KeyError:
        return None
    except ValueError:
        pass
    try:
        date = email.utils.parsedate_to_datetime(headers["retry-after"])
    except (KeyError, ValueError):
        return None
    return max(0.0, date.timestamp() - (time.time() if now is None else now))
