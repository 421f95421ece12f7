"""Which requests of browsers a server on this machine rejects: all from pages of other sites.

A web page can send requests to this machine, but it can't choose what a browser says about them:
where the page is from (`Origin`, `Sec-Fetch-Site`), and the name that the request is addressed to
(`Host`), by which a page whose name resolves to this machine (DNS rebinding) is recognised.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([^\s/@:\[\]]+))(?::[0-9]+)?")


def foreign(headers: Mapping[str, str], hosts: Sequence[str] | None, advice: str) -> str | None:
    """Why a request with these headers, in lower case, is rejected; None if it isn't.

    If there are `hosts`, it must be addressed to one of them; `advice` says how to add one.
    """
    if headers.get("sec-fetch-site", "none") not in ("none", "same-origin"):
        return "requests from web pages of other sites are not accepted"
    origin, host = headers.get("origin"), headers.get("host", "").lower()
    if origin is not None and _netloc(origin) != host:
        return f"requests from web pages of {origin[:200]!r} are not accepted"
    if hosts is not None and _name(host) not in hosts:
        return f"Host: got {host[:200]!r}, expected one of {', '.join(hosts)}; {advice}"
    return None


def _name(host: str) -> str:
    """The name or address in a Host header, without its port; empty if there is none."""
    found = _HOST.fullmatch(host)
    return (found[1] or found[2]).rstrip(".") if found else ""


def _netloc(url: str) -> str | None:
    try:
        return urlsplit(url).netloc.lower()
    except ValueError:  # half an IPv6 address
        return None
