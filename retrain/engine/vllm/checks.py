"""What must be true of a server before a run uses it, each problem with what to do.

The last check compares log-probs of server and trainer after the first publish: it finds a wrong
model, weights that did not arrive, and another precision, before the first step.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import TYPE_CHECKING, Literal

from retrain.engine.vllm.client import Facts, VllmClient
from retrain.engine.vllm.transfer import ENGINE
from retrain.errors import AdapterError, ConfigError
from retrain.transport.refusals import RemoteError

if TYPE_CHECKING:
    from retrain.engine.vllm.sampler import VllmSampler

OLDEST = (0, 32)
"""The first vLLM that returns weight versions per token."""
PROBE = (
    "The sun rose over the harbour, and the first boats came back with their nets full. On the "
    "quay, 12 people were already waiting to buy fish for the market."
)
PROBED = 32
"""Log-probs that the last check compares."""
FIRST_REQUEST = 300.0
"""Seconds; kernels may be compiled meanwhile."""
POLL = 0.5
"""Seconds between two looks at a server that starts."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Needs:
    """What a run needs of each server."""

    way: Literal["adapter", "folder", "group"]
    vocabulary: int
    tokens: int = 2
    """The least context: of prompt and completion together."""
    dtype: str = "float32"
    lora_rank: int = 0
    adapters: int = 1
    """Versions of adapters that are served at the same time."""


async def wait_until_up(client: VllmClient, seconds: float) -> None:
    """Wait for a server that is still loading; raises AdapterError after `seconds`."""
    ends, announced = time.monotonic() + seconds, False
    while not await client.health():
        if time.monotonic() >= ends:
            raise AdapterError(
                f"no vLLM server answers at {client.url} after {seconds:g} s (sampler."
                "start_seconds): start it, or correct sampler.url"
            )
        if not announced:
            announced = True
            log.warning("waiting for the vLLM server %s, up to %g s", client.url, seconds)
        await asyncio.sleep(POLL)


async def check_server(client: VllmClient, needs: Needs) -> Facts:
    """Whether a running server fits; raises ConfigError with all problems of its flags."""
    await _check_release(client)
    models = [str(model["id"]) for model in await client.models() if not model.get("parent")]
    if len(models) != 1:
        raise _wrong(client, f"serves {len(models)} models ({', '.join(models)}), expected one")
    try:
        facts = await client.facts()
    except RemoteError as error:
        if error.status != 404:
            raise
        raise _wrong(
            client, "has no endpoints for training. Start it with VLLM_SERVER_DEV_MODE=1"
        ) from None
    problems = list(_flags(facts, needs))
    if needs.way == "adapter" and not await client.takes_adapters():
        problems.append(
            "can't load adapters while it runs. Start it with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
        )
    if problems:
        raise _wrong(client, *problems)
    await _check_generate(client, needs)
    if facts.dtype != needs.dtype:
        log.warning(
            "the vLLM server %s computes in %s, but the trainer in %s: log-probs differ. Start it "
            "with --dtype %s",
            client.url,
            facts.dtype,
            needs.dtype,
            needs.dtype,
        )
    return facts


async def _check_release(client: VllmClient) -> None:
    try:
        found = await client.version()
    except RemoteError as error:
        if error.status is None and error.code != "malformed":
            raise
        raise _wrong(client, "does not answer /version: is this a vLLM server?") from error
    numbers = re.match(r"v?(\d+)\.(\d+)", found)
    if numbers and (int(numbers[1]), int(numbers[2])) < OLDEST:
        raise _wrong(
            client,
            f"is vLLM {found}, expected {'.'.join(map(str, OLDEST))} or later, which says by which "
            "weights each token was sampled: upgrade it",
        )


def _flags(facts: Facts, needs: Needs) -> Iterator[str]:
    if facts.logprobs_mode != "processed_logprobs":
        yield (
            f"returns {facts.logprobs_mode}, not the log-probs of the distribution that it samples "
            "from. Start it with --logprobs-mode processed_logprobs"
        )
    if facts.context < needs.tokens:
        yield (
            f"has --max-model-len {facts.context}, but the run needs {needs.tokens} tokens: raise "
            "it, or lower sampling.max_tokens or rollout.max_sequence_length"
        )
    if needs.way == "group" and facts.transfer != ENGINE:
        yield (
            f"has the weight transfer {facts.transfer!r}, but sampler.publish is group. Start it "
            "as docs/vllm.md shows, or set sampler.publish: folder"
        )
    if needs.way != "adapter":
        return
    if facts.lora is None:
        yield (
            f"serves no adapters. Start it with --enable-lora --max-lora-rank {needs.lora_rank} "
            f"--max-loras {needs.adapters}, or set sampler.publish: folder"
        )
        return
    rank, slots = facts.lora
    if rank < needs.lora_rank:
        yield (
            f"has --max-lora-rank {rank}, but backend.lora.r is {needs.lora_rank}. Raise it to "
            f"{needs.lora_rank}"
        )
    if slots < needs.adapters:
        yield (
            f"has --max-loras {slots}, but up to {needs.adapters} versions of the adapter are "
            f"in use at once (staleness.max + 2). Raise it to {needs.adapters}"
        )


async def _check_generate(client: VllmClient, needs: Needs) -> None:
    """One request with the highest id: a smaller vocabulary is another model's."""
    settings = {"max_tokens": 1, "logprobs": 0, "detokenize": False}
    body = {"token_ids": [needs.vocabulary - 1], "sampling_params": settings}
    await client.resume()  # a run that was killed while it published left the server paused
    try:
        async with asyncio.timeout(FIRST_REQUEST):
            reply = await client.generate(body)
    except TimeoutError:
        raise _wrong(
            client, f"did not sample one token in {FIRST_REQUEST:g} s. Restart it, and read its log"
        ) from None
    except RemoteError as error:
        if (problem := _refusal(error, needs)) is None:
            raise
        raise _wrong(client, problem) from error
    if not reply["choices"][0].get("weight_versions"):
        raise _wrong(client, "does not return weight versions. Upgrade it to vLLM 0.32 or later")


def _refusal(error: RemoteError, needs: Needs) -> str | None:
    """What a status of the first request says about the server."""
    said, highest = error.args[0], needs.vocabulary - 1
    if error.status is None or error.status >= 500:  # None: the server has died
        return (
            f"fails at its first request ({said}). Its log has the cause; on a CPU vLLM supports "
            "only some head sizes, such as 32, 64 and 128, and not the 16 of `tiny`"
        )
    return {
        400: f"rejects token id {highest} ({said}), but the model that is trained has a vocabulary "
        f"of {needs.vocabulary}. Start it with the run's `model`",
        401: "rejects the API key. Set the environment variable VLLM_API_KEY to its key",
        403: "does not allow /inference/v1/generate. Start it with --enable-scale-out",
    }.get(error.status)


def _wrong(client: VllmClient, *problems: str) -> ConfigError:
    return ConfigError(*(f"the vLLM server {client.url} {problem}" for problem in problems))


def probe_of(encoded: Sequence[int], vocabulary: int) -> list[int]:
    """The ids of `PROBED` + 1 tokens: of PROBE's text, `encoded`, or of any tokens."""
    ids = [i for i in encoded if i < vocabulary] or list(range(vocabulary))
    return (ids * (PROBED + 1))[: PROBED + 1]


async def check_logprobs(
    sampler: VllmSampler, probe: Sequence[int], expected: Sequence[float], limit: float
) -> float:
    """The mean difference in nats between the server's log-probs of `probe` and the trainer's.

    Raises AdapterError if it is above `limit`.
    """
    [found] = await sampler.logprobs_of([probe])
    pairs = zip(found[1:], expected[1:], strict=True)
    gap = fmean(abs(server - trainer) for server, trainer in pairs)
    if not gap <= limit:  # also NaN
        raise AdapterError(
            f"the log-probs of the vLLM server differ from the trainer's by {gap:.3g} nats per "
            f"token, expected at most {limit:g} (sampler.check): it serves another model, a weight "
            "did not arrive, or its precision is lower. Start it with the run's `model` and "
            "`dtype`; docs/vllm.md lists the causes"
        )
    return gap
