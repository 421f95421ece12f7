"""A sampling session: completions and log-probs of one fixed set of weights."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence

from retrain.adapters.remote.published import SampledTokens, sampling_payload
from retrain.adapters.weaver import wire
from retrain.adapters.weaver.connection import WeaverConnection
from retrain.sampler import SamplingParams
from retrain.wire.refusals import RemoteError, ignored


class WeaverSession:
    """Made by `WeaverClient.sampling_session`; `close` deletes it."""

    def __init__(
        self,
        connection: WeaverConnection,
        id: str,
        forget: Callable[[str], object],
    ) -> None:
        """`forget` is called with the id when the session is deleted."""
        self.id = id
        self.after: Callable[[], Awaitable[None]] | None = None
        """Called once the session is deleted, to delete its weights too."""
        self._connection = connection
        self._forget = forget

    async def sample(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1
    ) -> list[SampledTokens]:
        """`n` sequences in the service's order, including empty ones.

        Raises RemoteError, with the code `malformed` when the service returns another number.
        """
        wanted = sampling_payload(params)
        if params.stop:
            wanted["stop"] = list(params.stop)
        if params.stop_token_ids:
            wanted["stop_token_ids"] = list(params.stop_token_ids)
        payload = {
            "prompt": wire.prompt(prompt_ids),
            "sampling_params": wanted,
            "num_samples": n,
            "prompt_logprobs": False,
            "topk_prompt_logprobs": 0,
        }
        operation = await self._connection.submit(
            f"sampling-sessions/{self.id}/samples",
            payload,
            wire.sequences,
            what="sampling",
        )
        sequences = await operation.result()
        if len(sequences) != n:
            raise RemoteError(
                f"sampling: got {len(sequences)} sequences, expected {n}",
                code="malformed",
                retryable=True,
                request_id=operation.id,
            )
        return sequences

    async def compute_logprobs(self, token_ids: Sequence[int]) -> list[float | None]:
        """Log-prob of each token given those before it; None for the first. Raises RemoteError."""
        operation = await self._connection.submit(
            f"sampling-sessions/{self.id}/logprobs",
            {"prompt": wire.prompt(token_ids)},
            wire.prompt_logprobs,
            what="computing log-probs",
        )
        return await operation.result()

    async def close(self) -> None:
        """Delete the session; no error if it no longer exists. Raises RemoteError."""
        self._forget(self.id)
        with ignored(404):
            await self._connection.call("DELETE", f"sampling-sessions/{self.id}")
        if self.after is not None:
            await self.after()
