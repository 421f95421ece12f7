"""Opponents: who speaks for a seat that is not trained.

    opponents: {O: {type: my_player.py:answer}}
    opponents: {O: {type: openai, url: "https://.../v1", model: ..., api_key_env: ...}}

An opponent gets the conversation of its seat and returns the text of its reply. Its turns are not
recorded and not trained. One that fails, or takes longer than `deadlines.step`, fails its rollout
like any user code.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from retrain.config import Plugin
from retrain.config.binding import bind
from retrain.config.plugins import construct, find_function
from retrain.errors import ConfigError, PluginError, shown
from retrain.supervision.threads import in_thread
from retrain.types import Message
from retrain.wire.chat import ChatClient


class Opponent(ABC):
    """Speaks for a seat."""

    name: str
    """For messages."""

    @abstractmethod
    async def reply(self, messages: Sequence[Message], seed: int) -> str:
        """The reply to the seat's conversation; the same call has the same `seed` in every run."""

    async def close(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """The run ends."""


class Script(Opponent):
    """A function of `messages`, and of `seed` if it declares that; a plain one runs in a thread."""

    def __init__(self, function: Callable[..., Any], name: str) -> None:
        """Raises ValueError if the function requires other arguments."""
        parameters = inspect.signature(function).parameters
        needed = [p.name for p in parameters.values() if p.default is p.empty]
        if "messages" not in parameters or set(needed) - {"messages", "seed"}:
            raise ValueError(
                f"the function takes ({', '.join(parameters)}), expected (messages) or "
                "(messages, seed)"
            )
        self.name, self._function, self._seeded = name, function, "seed" in parameters

    async def reply(self, messages: Sequence[Message], seed: int) -> str:
        arguments = {"seed": seed} if self._seeded else {}
        call = partial(self._function, messages=[{**m} for m in messages], **arguments)
        answer = call() if inspect.iscoroutinefunction(self._function) else await in_thread(call)
        text = await answer if inspect.isawaitable(answer) else answer
        if not isinstance(text, str):
            raise TypeError(f"it returned {shown(text)}, expected a reply as a string")
        return text


class ChatServer(Opponent):
    """A model on a server with OpenAI's API.

    Args:
        url: Its base URL, such as https://api.openai.com/v1.
        model: The name of the model there.
        api_key_env: The environment variable that holds the key; by default none is sent.
        max_tokens: The most tokens of a reply.
        temperature: The sampling temperature.
    """

    def __init__(
        self,
        *,
        url: str,
        model: str,
        api_key_env: str | None = None,
        max_tokens: int = 256,
        temperature: float = 1.0,
    ) -> None:
        """Raises ValueError if the variable is not set, ConfigError for a wrong URL."""
        self.name = f"{model} at {url}"
        self._client = ChatClient(
            url, model, api_key_env=api_key_env, max_tokens=max_tokens, temperature=temperature
        )

    async def reply(self, messages: Sequence[Message], seed: int) -> str:
        return (await self._client.ask(messages, seed=seed)).text

    async def close(self) -> None:
        await self._client.close()


def opponent_of(plugin: Plugin, where: str, base_dir: Path) -> Opponent:
    """The opponent that a section names; raises ConfigError."""
    if plugin.type != "openai":
        if ":" not in plugin.type:
            raise PluginError(
                f"{where}.type: got {plugin.type!r}, expected openai, or a function as "
                "path/file.py:name or module:name"
            )
        function = find_function(plugin.type, base_dir, f"{where}.type")
        if plugin.arguments:
            raise PluginError(
                f"{where}: got {', '.join(plugin.arguments)}, but a function takes no keys"
            )
        return construct(where, partial(Script, function, plugin.type))
    keys = bind(ChatServer, plugin.arguments, where, beside=("type",))
    try:
        return construct(where, partial(ChatServer, **keys))
    except PluginError:
        raise
    except ConfigError as error:
        raise PluginError(f"{where}: {error}") from error
