"""What must be true of a server before a run uses it, each problem with what to do.

The last check compares log-probs of server and trainer after the first publish: it finds a wrong
model, weights that did not arrive, and another precision, before the first step.
"""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING, Any, Literal

from retrain.errors import AdapterError, ConfigError
from retrain.vllm.client import AdapterSlots, Facts, VllmClient
from retrain.vllm.transfer import EXTENSION
from retrain.wire.refusals import RemoteError

if TYPE_CHECKING:
    from retrain.vllm.sampler import VllmSampler

OLDEST = (0, 32)
"""The first vLLM that returns weight versions per token."""
SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""Keys of a config.json by which models of one vocabulary differ."""
PROBE = (
    "The sun rose over the harbour, and the first boats came back with their nets full. On the "
    "quay, 12 people were already waiting to buy fish for the market."
)
PROBED = 32
"""Log-probs that the last check compares."""
FIRST_REQUEST = 300.0
"""Seconds; kernels may be compiled meanwhile."""
START = 600.0
"""Seconds that a server may load."""
UNREACHED = 60.0
"""Seconds that a server may refuse connections, as vLLM does while it loads; a wrong address does
so for ever."""
POLL = 0.5
"""Seconds between two looks at a server that starts."""
log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ServerNeeds:
    """What a run needs of each server."""

    way: Literal["adapter", "folder", "group"]
    vocabulary: int
    tokens: int = 2
    """The least context: of prompt and completion together."""
    dtype: str = "float32"
    lora: AdapterSlots | None = None
    """Of `adapter`."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """The keys of the model's config.json."""


async def wait_until_up(client: VllmClient, limit: float | None) -> None:
    """Wait for a server that is still loading; raises AdapterError after `limit` seconds.

    Without a limit, one that was never reached gets `UNREACHED` seconds, and another `START`.
    """
    began, seconds, reached = time.monotonic(), 0.0, False
    while (error := await client.trouble()) and (error.status is None or error.status >= 500):
        reached = reached or error.code != "connect"
        before, seconds = seconds, limit or (START if reached else UNREACHED)
        if seconds != before:
            log.warning("waiting up to %g s for the vLLM server %s: %s", seconds, client.url, error)
        if time.monotonic() - began >= seconds:
            raise AdapterError(
                f"no vLLM server answers at {client.url} after {seconds:g} s ({error}). Check "
                "that it runs and that sampler.url has its host and port; if it needs longer to "
                "load, raise sampler.start_seconds"
            )
        await asyncio.sleep(POLL)


async def check_server(client: VllmClient, needs: ServerNeeds) -> Facts:
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
            f"is vLLM {found}, expected {'.'.join(map(str, OLDEST))} or later, which reports the "
            "weights that sampled each token: upgrade it",
        )


def _flags(facts: Facts, needs: ServerNeeds) -> Iterator[str]:
    if other := _sizes(facts.config, needs.config):
        yield (
            f"serves a different model ({facts.model} has {other}). Start it with the run's `model`"
        )
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
    if needs.way == "group" and facts.extension != EXTENSION:
        yield (
            "does not have retrain's worker extension, but sampler.publish is group. Start it with "
            f"--worker-extension-cls {EXTENSION} and with PYTHONPATH set to a folder that "
            "retrain.vllm.server.write_worker(folder) wrote, or set sampler.publish: folder"
        )
    if needs.lora is not None and needs.way == "adapter":
        yield from _adapters(facts.lora, needs.lora)


def _adapters(found: AdapterSlots | None, wanted: AdapterSlots) -> Iterator[str]:
    if found is None or found.rank < wanted.rank or found.slots < wanted.slots:
        has = f"--max-lora-rank {found.rank}, --max-loras {found.slots}" if found else "none"
        yield (
            f"can't hold the run's adapters (it has {has}): backend.lora.r is {wanted.rank}, and "
            f"up to {wanted.slots} versions are in use at the same time (staleness.max + 2, and 1 "
            f"more with `eval`). Start it with --enable-lora --max-lora-rank {wanted.rank} "
            f"--max-loras {wanted.slots}, or set sampler.publish: folder"
        )


def _sizes(found: Mapping[str, Any], wanted: Mapping[str, Any]) -> str:
    """The sizes of a server's model that are not those of the run's, as far as both are known."""
    found = found.get("text_config", found)
    known = [name for name in SIZES if None not in (found.get(name), wanted.get(name))]
    other = [name for name in known if found[name] != wanted[name]]
    return ", ".join(f"{name} {found[name]}, expected {wanted[name]}" for name in other)


async def _check_generate(client: VllmClient, needs: ServerNeeds) -> None:
    """One request with the highest id: a smaller vocabulary is another model's."""
    settings = {"max_tokens": 1, "logprobs": 0, "detokenize": False}
    body = {"token_ids": [needs.vocabulary - 1], "sampling_params": settings}
    await client.resume()  # a run that was killed while it published left the server paused
    try:
        async with asyncio.timeout(FIRST_REQUEST):
            await client.generate(body)
    except TimeoutError:
        raise _wrong(
            client, f"did not sample one token in {FIRST_REQUEST:g} s. Restart it, and read its log"
        ) from None
    except RemoteError as error:
        if (problem := _refusal(error, needs)) is None:
            raise
        raise _wrong(client, problem) from error


def _refusal(error: RemoteError, needs: ServerNeeds) -> str | None:
    """What a status of the first request says about the server."""
    said, highest = error.args[0], needs.vocabulary - 1
    if error.status is None or error.status >= 500:  # None: the server has died
        return (
            f"fails at its first request ({said}). Its log shows the cause; on a CPU vLLM "
            "supports only some head sizes, such as 32, 64 and 128, but not the 16 of `tiny`"
        )
    return {
        400: f"rejects token id {highest} ({said}), but the model that is trained has a vocabulary "
        f"of {needs.vocabulary}. Start it with the run's `model`",
        401: "rejects the API key. Set the environment variable VLLM_API_KEY to the server's key",
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
            f"token, expected at most {limit:g} (sampler.check): it serves a different model, a "
            "weight did not arrive, or its precision is lower. Start it with the run's `model` "
            "and `dtype`; if the difference is only slightly too large, raise sampler.check and "
            "set algorithm.mismatch"
        )
    return gap
