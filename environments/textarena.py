"""Games of TextArena, for one player or several: each player is a seat.

    environment: {type: textarena, id: TicTacToe-v0, players: 2}

See docs/games.md.
"""

from __future__ import annotations

import difflib
import random
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from retrain import (
    Action,
    ConfigError,
    Environment,
    Message,
    Prompt,
    StepResult,
    in_thread,
    needing,
)

T = TypeVar("T")
_playing = threading.Lock()
"""Held while a game computes: games use Python's global random numbers."""
_tried: set[str] = set()
"""The games that were played by this process, by their keys."""


class TextArena(Environment):
    """A TextArena game. Several players are the seats `player_0`, `player_1` and so on.

    Args:
        id: The game, such as GuessTheNumber-v0.
        kwargs: Arguments of the game.
        players: The number of players.
        system: The system message of each player.
        size: The number of games in an epoch, each with its own seed.
    """

    def __init__(
        self,
        *,
        id: str,
        kwargs: dict[str, Any] | None = None,
        players: int = 1,
        system: str = "",
        size: int = 1000,
    ) -> None:
        self.seats = tuple(f"player_{player}" for player in range(players)) if players > 1 else ()
        self.id, self.kwargs, self.players = id, kwargs or {}, players
        self.system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.size = size
        if (key := repr((id, kwargs, players))) not in _tried:
            self._check()
            _tried.add(key)

    def prompts(self) -> int:
        return self.size

    async def reset(self, prompt: Prompt) -> Sequence[Message]:
        self.state = random.Random(prompt.seed).getstate()
        return await in_thread(partial(self._apart, partial(self._start, prompt)))

    async def step(self, action: Action) -> StepResult:
        return await in_thread(partial(self._apart, partial(self._step, action.text)))

    def _start(self, prompt: Prompt) -> Sequence[Message]:
        from textarena.core import Wrapper
        from textarena.envs.registration import make

        self.game = self.table = make(self.id, **self.kwargs)
        while isinstance(self.table, Wrapper):  # those of actions apply; texts are not repeated
            self.table = self.table.env
        self.heard: set[int] = set()
        self.game.reset(num_players=self.players, seed=prompt.seed)
        return [*prompt.messages, *self._observed()]

    def _step(self, reply: str) -> StepResult:
        mover = self.table.state.current_player_id
        done, info = self.game.step(action=reply)
        if not done:
            seat = {"seat": self.seats[self.table.state.current_player_id]} if self.seats else {}
            return StepResult(self._observed(), 0.0, False, False, {"textarena": info, **seat})
        rewards, players = self.game.close()
        by_player = {player: float(reward) for player, reward in (rewards or {}).items()}
        reward = by_player.pop(mover, 0.0)
        others = {"rewards": {self.seats[player]: by_player[player] for player in by_player}}
        return StepResult([], reward, True, False, {"textarena": {**info, **players}, **others})

    def _observed(self) -> list[Message]:
        """What the player to move has not heard yet, but for what that player said."""
        player, said = self.table.get_observation()
        tags = {by: f"[{name}] " for by, name in self.table.state.role_mapping.items() if by >= 0}
        text = "\n".join(f"{tags.get(by, '')}{line}" for by, line, _ in said if by != player)
        first = self.system if player not in self.heard else []
        self.heard.add(player)
        return [*first, {"role": "user", "content": text}]

    def _apart(self, play: Callable[[], T]) -> T:
        """Call `play` with the random numbers of this game, whatever others draw."""
        with _playing:
            outside = random.getstate()
            random.setstate(self.state)
            try:
                return play()
            finally:
                self.state = random.getstate()
                random.setstate(outside)

    def _check(self) -> None:
        """Start the game once; raises ConfigError if that fails."""
        with needing("textarena"):
            from textarena.envs.registration import ENV_REGISTRY
        if self.id not in ENV_REGISTRY:
            near = " or ".join(difflib.get_close_matches(self.id, ENV_REGISTRY) or ENV_REGISTRY)
            raise ConfigError(f"environment.id: unknown game {self.id!r}; did you mean {near}?")
        self.state = random.getstate()
        try:
            self._apart(partial(self._start, Prompt("0.0.0", ())))
        except Exception as error:
            said = " ".join(str(error).replace("*", "").split())  # NLTK frames its errors
            raise ConfigError(
                f"environment.id: {self.id}: {type(error).__name__}: {said}"
            ) from error
