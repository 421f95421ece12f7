"""Budget: what the calls of a chat model may cost together, and what they have cost."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Sequence

from retrain.errors import BudgetError, RunError
from retrain.types import Message, Metrics
from retrain.wire.chat import ChatClient


class Budget:
    """Limits the calls of a client, and counts them and their tokens; `open` it first.

    `concurrency` is the most calls at the same time, `price` the dollars per million tokens of
    prompts and of replies. None means no limit.
    """

    def __init__(
        self,
        *,
        concurrency: int,
        price: tuple[float, float] | None = None,
        max_calls: int | None = None,
        max_total_tokens: int | None = None,
        max_cost: float | None = None,
    ) -> None:
        """Raises ValueError for keys that make no sense."""
        if concurrency < 1:
            raise ValueError(f"concurrency: got {concurrency}, expected an integer >= 1")
        self._price = price or (0.0, 0.0)
        if max_cost is not None and self._price == (0.0, 0.0):
            raise ValueError("max_cost: needs the price of tokens; set price")
        self._concurrency = concurrency
        self._limits = {
            "max_calls": max_calls, "max_total_tokens": max_total_tokens, "max_cost": max_cost
        }  # fmt: skip
        self._spent: Counter[str] = Counter()
        """What the whole run has used: calls, prompt_tokens and completion_tokens."""
        self._reported: Counter[str] = Counter()
        self._under_way = 0

    def open(self) -> None:
        """For the event loop that runs now."""
        self._bound, self._settled = asyncio.Semaphore(self._concurrency), asyncio.Condition()

    async def ask(self, client: ChatClient, messages: Sequence[Message]) -> str:
        """The text of `client.ask`; raises BudgetError when the budget is used up."""
        async with self._bound:
            async with self._settled:
                await self._settled.wait_for(self._admits)
                self._under_way += 1
            spent: Counter[str] = Counter(calls=1)
            try:
                reply = await client.ask(messages)
                spent["prompt_tokens"] = reply.prompt_tokens
                spent["completion_tokens"] = reply.completion_tokens
                return reply.text
            except RunError as error:
                if getattr(error, "status", None) or getattr(error, "code", "") == "connect":
                    spent.clear()  # a call that the server rejected or failed costs nothing
                raise
            finally:
                self._under_way -= 1
                self._spent += spent
                async with self._settled:
                    self._settled.notify_all()

    def metrics(self) -> Metrics:
        """Calls, tokens and dollars since the last call of this."""
        new = self._spent - self._reported
        self._reported = self._spent.copy()
        return {"calls": new["calls"], "tokens": _tokens(new), "cost": self._cost(new)}

    def _admits(self) -> bool:
        """Whether a call may begin now; raises BudgetError when it never may."""
        used: dict[str, float] = {
            "max_calls": self._spent["calls"],
            "max_total_tokens": _tokens(self._spent),
            "max_cost": self._cost(self._spent),
        }
        for name, limit in self._limits.items():
            if limit is not None and used[name] >= limit:
                raise BudgetError(f"{name} = {limit:g} is used up")
        most = self._limits["max_calls"]
        return most is None or used["max_calls"] + self._under_way < most

    def _cost(self, spent: Counter[str]) -> float:
        """Dollars."""
        given, said = self._price
        return (given * spent["prompt_tokens"] + said * spent["completion_tokens"]) / 1e6


def _tokens(spent: Counter[str]) -> int:
    return spent["prompt_tokens"] + spent["completion_tokens"]
