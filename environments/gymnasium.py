"""Environments of Gymnasium: the model reads them as text, and answers with an action.

    environment: {type: gymnasium, id: FrozenLake-v1, actions: [left, down, right, up]}

See docs/games.md.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

from retrain import (
    Action,
    ConfigError,
    DaemonPool,
    Environment,
    Message,
    Prompt,
    StepResult,
    find_function,
    find_object,
    needing,
)

COLOURED = re.compile(r"\x1b\[[\d;]+m(.*?)\x1b\[0m", re.DOTALL)
NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?")
_made: dict[str, tuple[Callable[[], Any], Any]] = {}
"""By its keys: what makes an environment, and the space of its actions."""


class Gymnasium(Environment):
    """A Gymnasium environment, played as text.

    Args:
        id: A registered id, or a class as module:Class or path/file.py:Class.
        kwargs: Arguments of the environment.
        actions: The names of the actions of a Discrete space, in order, or path/file.py:function
            that converts the text of a reply into an action. By default a reply contains numbers.
        render: `auto`: its own text (the mode `ansi`) if it has one, otherwise the observation;
            `observation`; or path/file.py:function that renders the observation as text, called
            with the observation and the environment.
        system: The system message.
        hint: The response to a reply without a valid action; by default it lists what is valid.
        penalty: What a reply without a valid action costs.
        max_turns: End the episode as truncated after this many turns; `rollout.max_turns` also
            applies.
        size: The number of tasks in an epoch, each with its own seed.
    """

    def __init__(  # noqa: PLR0913 - its keys in the YAML
        self,
        *,
        id: str,
        kwargs: dict[str, Any] | None = None,
        actions: list[str] | str | None = None,
        render: str = "auto",
        system: str = "",
        hint: str = "",
        penalty: float = 0.0,
        max_turns: int | None = None,
        size: int = 1000,
        base_dir: Path = Path(),
    ) -> None:
        if (key := repr((id, kwargs, render == "auto", base_dir))) not in _made:
            _made[key] = _tried(id, kwargs or {}, render == "auto", base_dir)
        self.make, self.space = _made[key]
        names = actions if isinstance(actions, list) else []
        self.parse: Callable[[str], Any] = partial(action_of, self.space, names)
        if isinstance(actions, str):
            self.parse = find_function(actions, base_dir, "environment.actions")
        elif problem := unreadable(self.space, names):
            raise ConfigError(f"environment.actions: {problem}")
        self.render: Callable[[Any, Any], object] = shown
        if render not in ("auto", "observation"):
            self.render = find_function(render, base_dir, "environment.render")
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.hint = hint or f"Answer with {valid(self.space, names)}."
        self.penalty, self.max_turns, self.size = penalty, max_turns, size
        self.thread = DaemonPool(1)  # some environments want all calls in one thread

    def prompts(self) -> int:
        return self.size

    async def setup(self) -> None:
        self.env = await self.thread.run(self.make)

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        self.turns = 0
        first = await self.thread.run(partial(self._start, prompt.seed))
        text = "\n\n".join(filter(None, (prompt.text, first)))
        return [*self.system, *prompt.messages[:-1], {"role": "user", "content": text}]

    async def step(self, action: Action) -> StepResult:
        self.turns += 1
        last, chosen = self.turns == self.max_turns, self.parse(action.text)
        if chosen is None or not self.space.contains(chosen):
            hint: Message = {"role": "user", "content": self.hint}
            return StepResult([hint], -self.penalty, False, last, {"unreadable": action.text})
        result = await self.thread.run(lambda: self._play(chosen))
        return result._replace(truncated=result.truncated or last)

    async def close(self) -> None:
        if hasattr(self, "env"):
            await self.thread.run(self.env.close)
        self.thread.close()

    def _start(self, seed: int) -> str:
        return str(self.render(self.env.reset(seed=seed)[0], self.env))

    def _play(self, action: Any) -> StepResult:
        seen, reward, ended, truncated, info = self.env.step(action)
        text: Message = {"role": "user", "content": str(self.render(seen, self.env))}
        return StepResult([text], float(reward), bool(ended), bool(truncated), {"gymnasium": info})


def shown(observation: Any, env: Any) -> str:
    """The environment's own text, with [] around what is coloured; else the observation."""
    if env.render_mode == "ansi":
        return COLOURED.sub(r"[\1]", str(env.render())).strip("\n")
    return observation if isinstance(observation, str) else json.dumps(observation, default=_plain)


def _plain(value: Any) -> Any:
    """NumPy's numbers as Python's, with four decimals."""
    return (value.astype(float).round(4) if value.dtype.kind == "f" else value).tolist()


def action_of(space: Any, names: Sequence[str], reply: str) -> Any:
    """The last action that a reply names, or its last numbers; None if there is none."""
    if hasattr(space, "characters"):  # a space of texts
        return reply.strip()
    words = "|".join(rf"(?<!\w){re.escape(n)}(?!\w)" for n in sorted(names, key=len, reverse=True))
    if names and (found := re.findall(words, reply, re.IGNORECASE)):
        return space.start + [name.lower() for name in names].index(found[-1].lower())
    return _numbers_in(reply, space)


def _numbers_in(reply: str, space: Any) -> Any:
    """The last numbers of a reply, as an action; None if they are none."""
    import numpy

    numbers = NUMBER.findall(reply)
    count = numpy.prod(space.shape, dtype=int)  # 1 of a Discrete space
    last = numpy.array([float(number) for number in numbers[-count:]])
    small = len(last) == count and (numpy.abs(last) < 2**53).all()
    if not small or (space.dtype.kind in "iu" and (last % 1).any()):
        return None
    return last.reshape(space.shape).astype(space.dtype)[()]


def valid(space: Any, names: Sequence[str]) -> str:
    """What an action of the space is, for the model."""
    if names:
        return f"one of {', '.join(names)}"
    if hasattr(space, "start"):
        return f"a number from {space.start} to {space.start + space.n - 1}"
    return f"an action of {space}"


def unreadable(space: Any, names: Sequence[str]) -> str:
    """Why `action_of` can't read actions of the space by these names; empty if it can."""
    if names and not (hasattr(space, "start") and space.n == len(names)):
        return f"got {len(names)} names, but an action is of {space}"
    if space.shape is None and not hasattr(space, "characters"):
        return f"expected path/file.py:function, since an action is of {space}"
    return ""


def _tried(
    id: str, kwargs: dict[str, Any], ansi: bool, base_dir: Path
) -> tuple[Callable[[], Any], Any]:
    """Make the environment once, so that what is wrong is known before the run."""
    with needing("gymnasium"):
        from gymnasium.envs.registration import make
    maker = partial(make, id, disable_env_checker=True, **kwargs)
    if ":" in id and not re.search(r"-v\d+$", id):
        maker = partial(find_object(id, base_dir, "environment.id"), **kwargs)
    try:
        with closing(maker()) as env:
            env.reset(seed=0)
    except Exception as error:
        raise ConfigError(f"environment.id: {id}: {type(error).__name__}: {error}") from error
    if ansi and "ansi" in env.metadata.get("render_modes", ()):
        maker = partial(maker, render_mode="ansi")
    return maker, env.action_space
