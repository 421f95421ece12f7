"""VllmClient: the endpoints of one vLLM server (0.32 or later) that sampling and publishing need.

Sampling is idempotent, so a lost request is sent again. Publishing is not: a call that may have
acted raises, and its server counts as broken. Paths and payloads are those of vLLM's
`/inference/v1/generate` and of its development mode (`VLLM_SERVER_DEV_MODE=1`).
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from retrain.vllm.options import InFlight
from retrain.wire.client import Call, HttpClient
from retrain.wire.refusals import RemoteError
from retrain.wire.retries import NO_RETRY, Outlook, RetryPolicy

PAUSES: Mapping[InFlight, str] = {
    "recompute": "pause?mode=keep",
    "keep_cache": "pause?mode=keep&clear_cache=false",
    "drain": "pause?mode=wait",
}
LONGEST = 86_400.0
"""Seconds of one attempt where the caller sets the limit: `deadlines.sample` and `publish`."""
SAMPLING = RetryPolicy(attempts=2, first=0.1, total=LONGEST)
"""A reused connection may have closed meanwhile. More attempts are the fleet's, at any server."""
HEALTH = RetryPolicy(attempts=2, first=0.05)
"""vLLM closes the connection of a failed call, which the next call may notice too late."""
ASKING = RetryPolicy(attempts=3, first=0.2, total=60.0)
RESUMING = RetryPolicy(first=0.1, cap=1.0, total=60.0)
PUBLISHING = RetryPolicy(attempts=3, first=0.2, total=LONGEST)
LARGE = 1 << 18
"""Bytes from which a reply is decoded in a thread: about 2,000 tokens, 3 ms."""

Json = dict[str, Any]  # a JSON object, whose values depend on the endpoint


@dataclass(frozen=True)
class AdapterSlots:
    """The adapters that a server can hold, or must."""

    rank: int
    slots: int
    """How many may be in one batch; a run needs `staleness.max` + 2."""


@dataclass(frozen=True)
class Facts:
    """What a server's config says."""

    model: str
    dtype: str
    context: int
    logprobs_mode: str
    cpu: bool
    lora: AdapterSlots | None
    """None: it takes no adapters."""
    extension: str
    """The class of its `--worker-extension-cls`."""

    @property
    def config(self) -> Json:
        """Its model's config.json; empty if its folder isn't here."""
        try:
            return _object((Path(self.model) / "config.json").read_bytes())
        except (OSError, ValueError):
            return {}

    @property
    def tied(self) -> bool:
        """Whether its model is known to tie the head to the embeddings."""
        return bool(self.config.get("tie_word_embeddings", False))


class VllmClient:
    """Calls one server; an async context manager. Every method raises RemoteError on failure.

    The API key, if the server has one, is the environment's VLLM_API_KEY.
    """

    def __init__(self, url: str) -> None:
        """Connects to nothing yet; raises ConfigError on a URL that is not http(s)."""
        key = os.environ.get("VLLM_API_KEY", "").strip()
        secrets = {"Authorization": f"Bearer {key}"} if key else {}
        outlook = Outlook(reached=True)  # the fleet decides how long a server may be away
        self._sampling = HttpClient(url, secrets=secrets, policy=SAMPLING, outlook=outlook)
        # Long requests may hold every connection of a pool, and a pause must not wait for one.
        self._control = HttpClient(url, secrets=secrets, policy=ASKING, outlook=outlook)
        self.url = self._control.url

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections, which aborts the requests in flight."""
        await self._sampling.close()
        await self._control.close()

    # --- asking

    async def health(self) -> bool:
        """Whether the server answers, and its engine lives."""
        return await self.trouble() is None

    async def trouble(self) -> RemoteError | None:
        """Why the server is not healthy; None if it is."""
        try:
            await self._control.send(
                Call("GET", "health", timeout=10.0, policy=HEALTH), lambda reply: None
            )
        except RemoteError as error:
            return error
        return None

    async def version(self) -> str:
        """vLLM's own version, such as `0.32.0`."""
        return str((await self._get("version"))["version"])

    async def models(self) -> list[Json]:
        """The served models and adapters: each with `id`, `root`, `parent` and `max_model_len`."""
        return list((await self._get("v1/models"))["data"])

    async def facts(self) -> Facts:
        """Its config. The first call takes seconds."""
        found = await self._get("server_info?config_format=json", timeout=60.0)
        config = found["vllm_config"]
        model, device = config["model_config"], config.get("device_config") or {}
        lora = config.get("lora_config")
        return Facts(
            str(model["model"]),
            str(model["dtype"]).removeprefix("torch."),
            int(model["max_model_len"]),
            str(model.get("logprobs_mode")),
            "cpu" in (device.get("device"), device.get("device_type")),
            AdapterSlots(int(lora["max_lora_rank"]), int(lora["max_loras"])) if lora else None,
            str((config.get("parallel_config") or {}).get("worker_extension_cls")),
        )

    async def takes_adapters(self) -> bool:
        """Whether adapters can be loaded while it runs (`VLLM_ALLOW_RUNTIME_LORA_UPDATING=1`)."""
        try:
            await self._post("v1/load_lora_adapter", {}, timeout=30.0, policy=NO_RETRY)
        except RemoteError as error:  # 400: it asks for a name
            return error.status not in (404, 405)
        return True

    async def world_size(self) -> int:
        """How many worker processes have weights."""
        return int((await self._get("get_world_size"))["world_size"])

    # --- sampling

    async def generate(self, body: Mapping[str, Any]) -> Json:
        """The reply of `/inference/v1/generate`. Cancelling closes the connection, which aborts
        the request in the server."""
        call = Call.json("POST", "inference/v1/generate", body, timeout=LONGEST)
        content = await self._sampling.send(call, lambda reply: _not_empty(reply.content))
        try:
            return await decoded(content)
        except ValueError as error:
            raise RemoteError(
                f"POST {call.path}: can't read the reply of {self.url}: {error}", code="malformed"
            ) from error

    # --- publishing

    async def pause(self, mode: InFlight) -> None:
        """Stop before the next token; `drain` waits for the running requests."""
        await self._post(PAUSES[mode], timeout=LONGEST)

    async def resume(self) -> None:
        """Continue; sent again until it is answered, since a lost one freezes the server."""
        await self._post("resume", idempotent=True, timeout=15.0, policy=RESUMING)

    async def call(self, method: str, **arguments: Any) -> None:
        """Call a method of vLLM's worker, or of our extension, in each worker process.

        A failure may leave the server unusable.
        """
        await self._post("collective_rpc", {"method": method, "kwargs": arguments})

    async def set_version(self, version: str) -> None:
        """Label the weights."""
        await self._post("update_weight_version", {"new_version": version}, idempotent=True)

    async def load_lora(self, name: str, folder: Path) -> None:
        """Serve an adapter under `name`; a name is loaded once."""
        await self._post(
            "v1/load_lora_adapter",
            {"lora_name": name, "lora_path": str(folder), "load_inplace": False},
        )

    async def unload_lora(self, name: str) -> None:
        """Free an adapter's slot, once its requests have ended."""
        await self._post("v1/unload_lora_adapter", {"lora_name": name})

    async def _get(self, path: str, timeout: float = 30.0) -> Json:
        return await self._control.send(
            Call("GET", path, timeout=timeout), lambda reply: _object(reply.content)
        )

    async def _post(
        self,
        path: str,
        body: Mapping[str, Any] | None = None,
        *,
        idempotent: bool = False,
        timeout: float = LONGEST,
        policy: RetryPolicy = PUBLISHING,
    ) -> None:
        call = Call.json(
            "POST", path, body or {}, idempotent=idempotent, timeout=timeout, policy=policy
        )
        await self._control.send(call, lambda reply: None)


async def decoded(content: bytes) -> Json:
    """The JSON object of a reply, without blocking the event loop for long."""
    if len(content) < LARGE:
        return _object(content)
    return await asyncio.to_thread(_object, content, _pass_on)


def _pass_on(value: Json) -> Json:
    """A hook that does nothing: json's own loop never yields the interpreter, but a call of a
    Python function for each object of the reply lets the event loop's thread run."""
    return value


def _object(content: bytes, hook: Any = None) -> Json:
    value = json.loads(content, object_hook=hook)
    if not isinstance(value, dict):
        raise ValueError(f"got a JSON {type(value).__name__}, expected an object")
    return value


def _not_empty(content: bytes) -> bytes:
    if not content.strip():
        raise ValueError("it is empty")
    return content
