"""The vendors of the protocols: the URL of each one's own service, and its API key.

A key comes from the environment or from the caller. It is checked here before it becomes a header,
and appears in no message.
"""

from __future__ import annotations

import os
import urllib.parse
from dataclasses import dataclass

from retrain.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Vendor:
    """The vendor of a protocol; other services may speak it too."""

    name: str
    url: str
    """The URL of the vendor's own service."""
    key_variable: str
    """The environment variable of the key."""

    def runs(self, url: str) -> bool:
        """Whether `url` is the vendor's own service, where requests cost money."""
        return _host(url) == _host(self.url)

    def api_key(self, url: str, given: str | None = None) -> str:
        """The key for the service at `url`: the given one, else the environment's; "" is no key.

        Raises ConfigError when the environment has none for the vendor's own service, or when no
        header can carry it.
        """
        key = os.environ.get(self.key_variable, "").strip() if given is None else given
        if not key and given is None and self.runs(url):
            raise ConfigError(
                f"{self.key_variable} is not set: export {self.key_variable}=... with your API key"
            )
        if not (key.isascii() and key.isprintable()):
            where = self.key_variable if given is None else "api_key"
            raise ConfigError(
                f"{where} contains a line break or another character that is not allowed in a "
                "header. Copy the key again."
            )
        return key


TINKER = Vendor(
    "Tinker", "https://tinker.thinkingmachines.dev/services/tinker-prod", "TINKER_API_KEY"
)
WEAVER = Vendor("Weaver", "https://weaver-console.nex-agi.cn", "WEAVER_API_KEY")


def checked_url(url: str, beside: str = "") -> str:
    """`url` without its trailing slash; raises ConfigError unless it can be a base URL.

    `beside` names the other values that the key accepts.
    """
    parts = urllib.parse.urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"url: got {url!r}, expected http(s)://host[:port][/path]{beside}")
    if parts.username or parts.password:
        raise ConfigError(
            f"url: the URL of {parts.hostname} contains a password: put it into the environment"
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
