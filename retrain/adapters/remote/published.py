"""The sampler of a remote backend: it serves the weights that were published last.

A publish swaps the session in one assignment, so a sample uses either the old weights or the new
ones. Samples in flight end on the session they began with; a replaced session is closed when its
last sample has ended.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, Self, TypeVar

from retrain.sampler import SamplingParams, Tokenizer
from retrain.supervision.sharing import Leases
from retrain.types import Completion, StopReason
from retrain.wire.refusals import RemoteError

T = TypeVar("T")
ABORTED = "abort"
"""The stop reason of a completion that the service cut short, such as by an engine reload."""
SCORED_AT_ONCE = 64
"""Sequences that are scored at the same time."""
GONE = 410
"""The status of an error after which the same request may succeed, sampled anew."""
TRIES = 3
"""Attempts at a request whose result the service loses or cuts short."""


@dataclass(frozen=True, slots=True)
class SampledTokens:
    """One sequence as a service's client returns it."""

    tokens: Sequence[int]
    logprobs: Sequence[float]
    stop_reason: str
    """`stop`, `length` or `abort` (the service cut it short)."""


class ServingSession(Protocol):
    """One set of weights on the service."""

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1
    ) -> Sequence[SampledTokens]: ...
    async def compute_logprobs(self, token_ids: Sequence[int]) -> Sequence[float | None]: ...
    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True, eq=False)
class _Served:
    session: ServingSession
    version: int

    def __str__(self) -> str:
        return f"the sampling session of version {self.version}"


class PublishedSampler:
    """A `retrain.sampler.Sampler`; `swap` publishes."""

    def __init__(self, tokenizer: Tokenizer, context_length: int) -> None:
        self._tokenizer = tokenizer
        self._context_length = context_length
        self._served: Leases[_Served] = Leases(lambda served: served.session.close())

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        """`n` completions; raises AdapterError when the service fails or cuts them short."""

        async def sample() -> list[Completion]:
            with self._served.in_use() as served, on_the_service():
                found = await served.session.sample(prompt_ids, params, n)
            if any(one.stop_reason == ABORTED for one in found):
                raise RemoteError("the service cut the completions short", status=GONE)
            return [self._completion(one, len(prompt_ids), served.version) for one in found]

        return await until_kept(sample)

    async def compute_logprobs(self, token_ids: Sequence[int]) -> Sequence[float | None]:
        """Log-probs of given tokens under the present weights; None for the first."""
        with self._served.in_use() as served, on_the_service():
            return await served.session.compute_logprobs(token_ids)

    def swap(self, session: ServingSession, version: int) -> None:
        """Sample from `session` from now on; its weights have this version."""
        self._served.use(_Served(session, version))

    @contextmanager
    def pinned(self) -> Iterator[Self]:
        """A sampler of the present session, which is kept until the block ends."""
        with self._served.in_use() as served:
            kept = copy.copy(self)
            kept._served = Leases(lambda served: served.session.close())
            kept._served.use(served)  # and none after it: it closes no session
            yield kept

    async def close(self) -> None:
        """Wait until every replaced session is closed; the client closes the present one."""
        await self._served.freed()

    def _completion(self, one: SampledTokens, prompt_length: int, version: int) -> Completion:
        full = prompt_length + len(one.tokens) >= self._context_length
        reason: StopReason = "stop"
        if one.stop_reason == "length":
            reason = "context" if full else "length"
        text = self._tokenizer.decode(one.tokens, skip_special_tokens=True)
        return Completion(list(one.tokens), list(one.logprobs), text, reason, version)


async def until_kept(request: Callable[[], Awaitable[T]]) -> T:
    """The result of a request, which is made again if the service loses it or cuts it short."""
    for _ in range(TRIES - 1):
        try:
            return await request()
        except RemoteError as error:
            if error.status != GONE:
                raise
    return await request()


@contextmanager
def on_the_service() -> Iterator[None]:
    """Report a 404 of a call on the run's own model as the loss of that model.

    Many calls fail so at the same time, each with its own id; all raise the same message.
    """
    try:
        yield
    except RemoteError as error:
        if error.status != 404:
            raise
        raise RemoteError(
            "the service has lost this run's model (was it restarted?): --resume continues from "
            "the last checkpoint",
            status=404,
            code="lost",
        ) from error


def sampling_payload(params: SamplingParams) -> dict[str, Any]:
    """The settings of a sample that both protocols have alike; an unset seed is omitted."""
    sent: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
    }
    return sent if params.seed is None else {**sent, "seed": params.seed}


async def logprobs_of(
    compute: Callable[[Sequence[int]], Awaitable[Sequence[float | None]]],
    sequences: Sequence[Sequence[int]],
) -> list[list[float]]:
    """The log-prob of each token, 0.0 for the first; `SCORED_AT_ONCE` requests at a time."""
    turns = asyncio.Semaphore(SCORED_AT_ONCE)

    async def score(token_ids: Sequence[int]) -> list[float]:
        async with turns:
            return [lp or 0.0 for lp in await until_kept(lambda: compute(token_ids))]

    return list(await asyncio.gather(*map(score, sequences)))
