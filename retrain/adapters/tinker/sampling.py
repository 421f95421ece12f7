"""One sampling session: completions and log-probs of the weights that it was made with.

A sample has no effect on the model, so it is asked for until its deadline: a submission that may
have been lost is sent again with the same seq_id, by which the service knows it, and a result that
the service lost is sampled anew.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from retrain.adapters.remote.published import Sampled
from retrain.adapters.tinker.connection import Connection, Future, Kind
from retrain.errors import AdapterError, DeadlineError
from retrain.protocols.tinker import messages, payloads
from retrain.protocols.tinker.values import SampledSequence, SampleResult
from retrain.sampler import SamplingParams, Tokenizer
from retrain.transport.refusals import RemoteError
from retrain.transport.retries import NO_RETRY, RetryBudget

SAMPLE = Kind("Sample", payloads.sample_from_json, messages.decode_sample)
LOST_RESULTS = 3
"""How often a result may get lost on the service before that is an error."""


class SamplingClient:
    """Made by `TinkerClient.sampling_session`; any number of samples may be under way."""

    def __init__(self, connection: Connection, session_id: str) -> None:
        self.session_id = session_id
        self.snapshot: str | None = None
        """The path of weights that were saved for this session alone, to be deleted after it."""
        self._connection = connection
        self._seq_ids = itertools.count()

    def __repr__(self) -> str:
        return f"SamplingClient({self.session_id!r})"

    async def sample(
        self,
        prompt: Sequence[int],
        params: SamplingParams,
        *,
        n: int = 1,
        prompt_logprobs: bool = False,
        timeout: float | None = None,
    ) -> SampleResult:
        """`n` completions of `prompt`, within `timeout` seconds.

        Raises RemoteError when the service refuses or fails, DeadlineError when it is not done in
        time. Cancelling the call cancels the sample on the service, where that knows how.
        """
        payload: dict[str, Any] = {
            "sampling_session_id": self.session_id,
            "num_samples": n,
            "prompt": payloads.prompt_to_json(prompt),
            "sampling_params": _payload(params),
            "prompt_logprobs": prompt_logprobs,
            "topk_prompt_logprobs": 0,
            "topk_sample_logprobs": 0,
            "type": "sample",
        }
        limit = self._connection.result_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(limit), self._connection.backpressure.in_flight.take():
                return await self._until_done(payload, len(prompt))
        except TimeoutError as error:
            raise DeadlineError(
                f"a sample of {self.session_id} was not done within {limit:g} s: the service is "
                "full, slow or away; raise the deadline or lower the load"
            ) from error

    async def compute_logprobs(
        self, tokens: Sequence[int], *, timeout: float | None = None
    ) -> list[float | None]:
        """The log-prob of each token after those before it; None for the first."""
        params = SamplingParams(max_tokens=1)
        result = await self.sample(tokens, params, prompt_logprobs=True, timeout=timeout)
        if result.prompt_logprobs is None:
            raise AdapterError(
                f"{self._connection.http.url} returned no prompt log-probs: "
                "it does not compute them"
            )
        logprobs = list(result.prompt_logprobs)
        if len(logprobs) == len(tokens) - 1:  # some servers leave the first one out
            logprobs.insert(0, None)
        if len(logprobs) != len(tokens):
            raise AdapterError(f"{len(logprobs)} log-probs came for {len(tokens)} tokens")
        return logprobs

    async def _until_done(self, payload: dict[str, Any], tokens: int) -> SampleResult:
        for attempt in itertools.count(1):
            future = await self._submit({**payload, "seq_id": next(self._seq_ids)}, tokens)
            try:
                return await future.result(math.inf)  # the caller's deadline is running
            except RemoteError as error:
                if error.status != 410 or attempt >= LOST_RESULTS:
                    raise
        raise AssertionError("unreachable: the loop above has no end")

    async def _submit(self, payload: dict[str, Any], tokens: int) -> Future[SampleResult]:
        """Hand the sample over; sent again, always as the same request, until it is accepted."""
        pressure = self._connection.backpressure
        headers = {"X-Tinker-Sampling-Backpressure": "1"}
        budget: RetryBudget | None = None
        while True:
            async with pressure.submissions.take(), pressure.weight(tokens):
                await pressure.pause_over()
                try:
                    return await self._connection.submit_json(
                        "asample", payload, SAMPLE, headers=headers, policy=NO_RETRY
                    )
                except RemoteError as error:
                    if error.status in (402, 429):
                        pressure.pause(tokens, error.retry_after)
                        pause = 0.0
                    else:
                        budget = budget or self._connection.http.retry_budget()
                        pause = budget.pause(error)
            await asyncio.sleep(pause)


class ServedWeights:
    """A `retrain.adapters.remote.published.Session` over one set of weights."""

    def __init__(
        self,
        sampler: SamplingClient,
        tokenizer: Tokenizer,
        deadline: float,
        delete: Callable[[str], Awaitable[None]],
    ) -> None:
        """`deadline` is how many seconds a sample may take."""
        self._delete = delete
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._deadline = deadline

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1
    ) -> list[Sampled]:
        """`n` completions; raises AdapterError when the service leaves one or its log-probs out."""
        result = await self._sampler.sample(prompt_ids, params, n=n, timeout=self._deadline)
        if len(result.sequences) != n:
            raise AdapterError(
                f"asked the service for {n} completions, got {len(result.sequences)}"
            )
        return [cut(one, params, self._tokenizer) for one in result.sequences]

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float | None]:
        """The log-prob of each token after those before it; None for the first."""
        return await self._sampler.compute_logprobs(token_ids, timeout=self._deadline)

    async def close(self) -> None:
        """Free the snapshot, where it is a checkpoint of its own; sessions end by themselves."""
        if self._sampler.snapshot is not None:
            await self._delete(self._sampler.snapshot)


def cut(sequence: SampledSequence, params: SamplingParams, tokenizer: Tokenizer) -> Sampled:
    """The sequence up to its first stop, that included."""
    if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
        raise AdapterError(
            "the service returned a completion without a log-prob for each token: it can't be "
            "trained on"
        )
    stops = [i for i, token in enumerate(sequence.tokens) if token in params.stop_token_ids]
    completed = _completed(sequence.tokens, params.stop, tokenizer)
    end = min((*stops[:1], *completed), default=None)
    if end is None:
        return Sampled(sequence.tokens, sequence.logprobs, sequence.stop_reason)
    return Sampled(sequence.tokens[: end + 1], sequence.logprobs[: end + 1], "stop")


def _completed(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """The index of the token that completes the first stop string, in a list, if any does."""

    def has_stop(length: int) -> bool:
        text = tokenizer.decode(tokens[:length])
        return any(one in text for one in stop)

    if not stop or not has_stop(len(tokens)):
        return []
    low, high = 0, len(tokens)  # no stop within `low` tokens, one within `high`
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if has_stop(middle) else (middle, high)
    return [high - 1]


def _payload(params: SamplingParams) -> dict[str, Any]:
    """The protocol takes token ids or strings to stop at, not both; ids go first."""
    sent: dict[str, Any] = {
        "max_tokens": params.max_tokens,
        "temperature": params.temperature,
        "top_p": params.top_p,
        "top_k": params.top_k or -1,
    }
    if params.stop_token_ids or params.stop:
        sent["stop"] = list(params.stop_token_ids or params.stop)
    if params.seed is not None:
        sent["seed"] = params.seed
    return sent
