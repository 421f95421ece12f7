"""Environments on an OpenEnv server: each instance has a session there.

    environment: {type: openenv, url: "http://localhost:8000", action: message}

See docs/games.md.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from retrain import (
    Action,
    ConfigError,
    Environment,
    Message,
    Prompt,
    StepResult,
    UserCodeError,
    find_function,
    needing,
)

OWN_LIMIT = 1e9
"""Seconds: the run's deadlines limit the calls."""


class OpenEnv(Environment):
    """A session with any environment of an OpenEnv server, over its WebSocket.

    Args:
        url: The server, as http://HOST:PORT.
        action: The field of the action that takes the text of the reply, or path/file.py:function
            that converts that text into an action (a mapping).
        observation: The field of the observation that the model reads, or path/file.py:function
            that converts the observation (a mapping) into text. By default its only field, or all
            fields as JSON.
        reset: Arguments of the server's reset, in addition to the seed.
        system: The system message.
        size: The number of tasks in an epoch, each with its own seed.
    """

    def __init__(
        self,
        *,
        url: str,
        action: str = "message",
        observation: str | None = None,
        reset: dict[str, Any] | None = None,
        system: str = "",
        size: int = 1000,
        base_dir: Path = Path(),
    ) -> None:
        with needing("openenv"):
            from openenv.core.generic_client import GenericEnvClient
            from websockets.exceptions import ConnectionClosed
        if not url.startswith(("http://", "https://")):
            raise ConfigError(f"environment.url: got {url!r}, expected http://... or https://...")
        self.parse: Callable[[str], Mapping[str, Any]] = lambda text: {action: text}
        if ":" in action:
            self.parse = find_function(action, base_dir, "environment.action")
        self.read: Callable[[Mapping[str, Any]], str] = lambda seen: _text(seen, observation)
        if observation is not None and ":" in observation:
            self.read = find_function(observation, base_dir, "environment.observation")

        class Client(GenericEnvClient):
            async def _send(self, message: dict[str, Any]) -> None:
                # A server at capacity says so and closes: that message is still to be received.
                with suppress(ConnectionClosed):
                    await super()._send(message)

        self.client = Client(url, message_timeout_s=OWN_LIMIT, mode="simulation")
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.arguments, self.size = reset or {}, size

    def prompts(self) -> int:
        return self.size

    async def setup(self) -> None:
        await self.client.connect()

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        try:
            result = await self.client.reset(**{"seed": prompt.seed, **self.arguments})
        except RuntimeError as error:
            if "(code: CAPACITY_REACHED)" not in str(error):
                raise
            raise UserCodeError(
                "the OpenEnv server is at capacity. Raise its max_concurrent_envs to rollout.slots "
                f"x algorithm.group_size, or lower these ({error})"
            ) from error
        text = "\n\n".join(filter(None, (prompt.text, str(self.read(result.observation)))))
        return [*self.system, *prompt.messages[:-1], {"role": "user", "content": text}]

    async def step(self, action: Action) -> StepResult:
        try:
            result = await self.client.step(dict(self.parse(action.text)))
        except RuntimeError as error:
            if "(code: VALIDATION_ERROR)" not in str(error):
                raise
            hint: Message = {"role": "user", "content": "This is not a valid action."}
            return StepResult([hint], 0.0, False, False, {"unreadable": True})
        ended = bool(result.done)
        text: Message = {"role": "user", "content": str(self.read(result.observation))}
        info = {"openenv": result.observation}
        return StepResult([] if ended else [text], float(result.reward or 0), ended, False, info)

    async def close(self) -> None:
        await self.client.close()


def _text(observation: Mapping[str, Any], field: str | None) -> str:
    """The field of an observation, or its only one, or all of them."""
    if field is not None and field not in observation:
        raise ValueError(
            f"environment.observation: got {field!r}, but the server sends {', '.join(observation)}"
        )
    values = [observation[field]] if field is not None else list(observation.values())
    value = values[0] if len(values) == 1 else observation
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
