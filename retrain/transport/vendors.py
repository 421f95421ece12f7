"""The services that have a vendor: where each is, and which key it wants.

A key comes from the environment or from its caller. It is checked here, before a header is made of
it, and no message holds it.
"""

from __future__ import annotations

import os
import urllib.parse
from dataclasses import dataclass

from retrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Vendor:
    """Whose protocol is spoken; the service itself may be anybody's."""

    name: str
    url: str
    """Of the vendor's own service."""
    key_variable: str
    """The environment's name of the key."""

    def api_key(self, url: str, given: str | None = None) -> str:
        """The key for the service at `url`: the given one, else the environment's, "" for none.

        Raises ConfigError when the environment has none for the vendor's own service, or when no
        header can carry it.
        """
        key = os.environ.get(self.key_variable, "").strip() if given is None else given
        if not key and given is None and _host(url) == _host(self.url):
            raise ConfigError(
                f"{self.key_variable} is not set: export {self.key_variable}=... with your API key"
            )
        if not (key.isascii() and key.isprintable()):
            where = self.key_variable if given is None else "api_key"
            raise ConfigError(
                f"{where} holds a line break, or another character that no header can carry: "
                "copy the key anew"
            )
        return key


TINKER = Vendor(
    "Tinker", "https://tinker.thinkingmachines.dev/services/tinker-prod", "TINKER_API_KEY"
)
WEAVER = Vendor("Weaver", "https://weaver-console.nex-agi.cn", "WEAVER_API_KEY")


def checked_url(url: str, beside: str = "") -> str:
    """`url` without its trailing slash; raises ConfigError unless it can be a base URL.

    `beside` is what else may stand in its place.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url: got {url!r}, expected http(s)://host[:port][/path]{beside}")
    if parts.username or parts.password:
        raise ConfigError(
            f"url: {parts.hostname} comes with a password; put the key in the environment instead"
        )
    try:
        port = parts.port
    except ValueError:
        port = 0
    if port == 0:
        raise ConfigError(f"url: got {url!r}, expected a port from 1 to 65535")
    return url.rstrip("/")


def _host(url: str) -> str | None:
    return urllib.parse.urlsplit(url).hostname
