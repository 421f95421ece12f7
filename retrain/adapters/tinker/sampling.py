"""One sampling session: completions and log-probs of the weights that it was created with.

A sample does not change the model, so its submission is retried until its deadline: one that may
have been lost is sent again with the same seq_id, which the service recognises. A result that the
service lost is an error with status 410; `PublishedSampler` samples again.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

from retrain.adapters.remote.published import SampledTokens, sampling_payload
from retrain.adapters.tinker.connection import Future, JobKind, TinkerConnection
from retrain.adapters.tinker.limits import BYTES_A_TOKEN
from retrain.errors import AdapterError, DeadlineError
from retrain.sampler import SamplingParams, Tokenizer
from retrain.wire.refusals import RemoteError
from retrain.wire.retries import NO_RETRY, RetryBudget
from retrain.wire.tinker import messages, payloads
from retrain.wire.tinker.values import SampledSequence, SampleResult

SAMPLE = JobKind("Sample", payloads.sample_from_json, messages.decode_sample)


class SamplingClient:
    """Made by `TinkerClient.sampling_session`; any number of samples may run at once."""

    def __init__(self, connection: TinkerConnection, session_id: str) -> None:
        self.session_id = session_id
        self.snapshot: str | None = None
        """The path of weights that were saved only for this session; delete them with it."""
        self._connection = connection
        self._seq_ids = itertools.count()

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

        Raises RemoteError when the service refuses or fails, DeadlineError when the time is over.
        Cancelling the call also cancels the sample on a service that supports it.
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
            "seq_id": next(self._seq_ids),
        }
        limit = self._connection.result_timeout if timeout is None else timeout
        try:
            async with asyncio.timeout(limit), self._connection.backpressure.in_flight.take():
                future = await self._submit(payload, len(prompt))
                return await future.result(math.inf)  # this deadline is running
        except TimeoutError as error:
            raise DeadlineError(
                f"a sample of {self.session_id} was not done within {limit:g} s: the service is "
                "overloaded, slow or unreachable. Raise the deadline, or lower the load."
            ) from error

    async def compute_logprobs(
        self, tokens: Sequence[int], *, timeout: float | None = None
    ) -> list[float | None]:
        """The log-prob of each token given the tokens before it; None for the first."""
        params = SamplingParams(max_tokens=1)
        result = await self.sample(tokens, params, prompt_logprobs=True, timeout=timeout)
        if result.prompt_logprobs is None:
            raise AdapterError(
                f"{self._connection.http.url} returned no log-probs of the prompt; this service "
                "does not compute them"
            )
        logprobs = list(result.prompt_logprobs)
        if len(logprobs) == len(tokens) - 1:  # some servers omit the first
            logprobs.insert(0, None)
        if len(logprobs) != len(tokens):
            raise AdapterError(f"got {len(logprobs)} log-probs for {len(tokens)} tokens")
        return logprobs

    async def _submit(self, payload: dict[str, Any], tokens: int) -> Future[SampleResult]:
        """Submit the sample; the same request is sent again until the service accepts it."""
        pressure = self._connection.backpressure
        headers = {"X-Tinker-Sampling-Backpressure": "1"}
        budget: RetryBudget | None = None
        while True:
            async with pressure.submissions.take(), pressure.bytes.take(BYTES_A_TOKEN * tokens):
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
    """One set of weights as the adapter's sampler uses it (`published.Session`).

    A completion ends as on every backend: with the first token that is a stop token or that
    completes a stop string. The protocol takes token ids or strings, not both: ids are sent where
    there are any, and tokens after a stop are cut off here.
    """

    def __init__(
        self,
        sampler: SamplingClient,
        tokenizer: Tokenizer,
        deadline: float,
        delete: Callable[[str], Awaitable[None]],
    ) -> None:
        """A sample may take `deadline` seconds; `delete` deletes saved weights by their path."""
        self._delete = delete
        self._sampler = sampler
        self._tokenizer = tokenizer
        self._deadline = deadline

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1
    ) -> list[SampledTokens]:
        """`n` completions; raises AdapterError when one of them or its log-probs are missing."""
        result = await self._sampler.sample(prompt_ids, params, n=n, timeout=self._deadline)
        if len(result.sequences) != n:
            raise AdapterError(
                f"got {len(result.sequences)} completions from the service, expected {n}"
            )
        return [cut(one, params, self._tokenizer) for one in result.sequences]

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float | None]:
        """The log-prob of each token given the tokens before it; None for the first."""
        return await self._sampler.compute_logprobs(token_ids, timeout=self._deadline)

    async def close(self) -> None:
        """Delete the snapshot if it has a path of its own; the session ends by itself."""
        if self._sampler.snapshot is not None:
            await self._delete(self._sampler.snapshot)


def cut(sequence: SampledSequence, params: SamplingParams, tokenizer: Tokenizer) -> SampledTokens:
    """The sequence up to and including its first stop."""
    if sequence.logprobs is None or len(sequence.logprobs) != len(sequence.tokens):
        raise AdapterError(
            "the service returned a completion without a log-prob for each token, which can't be "
            "trained on"
        )
    stops = [i for i, token in enumerate(sequence.tokens) if token in params.stop_token_ids]
    completed = _completed(sequence.tokens, params.stop, tokenizer)
    end = min((*stops[:1], *completed), default=None)
    if end is None:
        return SampledTokens(sequence.tokens, sequence.logprobs, sequence.stop_reason)
    return SampledTokens(sequence.tokens[: end + 1], sequence.logprobs[: end + 1], "stop")


def _completed(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> list[int]:
    """A list with the index of the token that completes the first stop string, or an empty one."""

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
    sent = sampling_payload(params)
    if params.stop_token_ids or params.stop:
        sent["stop"] = list(params.stop_token_ids or params.stop)
    return sent
