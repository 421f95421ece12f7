"""TinkerClient: a session with a Tinker service; it creates models and sampling sessions.

Entering opens the session and keeps it alive by heartbeats. Leaving finishes it with the reason, so
that the service frees its resources. Endpoints that a server lacks (404) are skipped.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
import time
import urllib.parse
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING, Any, Self

from retrain.adapters.tinker.connection import (
    Flags,
    JobKind,
    TinkerConnection,
    Wire,
    json_object,
)
from retrain.adapters.tinker.sampling import SamplingClient
from retrain.adapters.tinker.training import TrainingClient
from retrain.wire.client import Call, HttpClient
from retrain.wire.refusals import RemoteError, ignored
from retrain.wire.retries import NO_RETRY, RetryPolicy
from retrain.wire.training import LoraConfig
from retrain.wire.vendors import TINKER

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

SDK_VERSION = "0.38.0"
"""The version of the official client whose protocol this is; services answer accordingly."""
HEARTBEAT = 10.0
"""Seconds between heartbeats."""
HEARTBEAT_WARNING = 120.0
"""Seconds without a successful heartbeat before a warning."""
GOODBYE = 10.0
"""Seconds that finishing the session may take."""
SNAPSHOT_TTL = 24 * 3600
"""Seconds that a named snapshot is kept, on a service without snapshots for one session."""


class TinkerClient:
    """A session, as an async context manager. The key appears in no repr, log or error.

    async with TinkerClient() as tinker:                         # key: TINKER_API_KEY
        model = await tinker.create_model("Qwen/Qwen3-8B", LoraConfig(rank=32))
        passed = await model.forward_backward(data, "importance_sampling")
        stepped = await model.optim_step(AdamParams(learning_rate=1e-4))
        print((await passed).metrics, await stepped)
        sampler = await tinker.sampler_of(model)
        print(await sampler.sample(prompt, SamplingParams(max_tokens=64)))
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        wire: Wire = "proto",
        tags: Sequence[str] = (),
        project: str | None = None,
        policy: RetryPolicy | None = None,
        result_timeout: float = 3600.0,
        http: httpx.AsyncClient | httpx.AsyncBaseTransport | None = None,
    ) -> None:
        """Connects to nothing yet.

        Raises ConfigError on a bad URL or key, or when the hosted service is to be used without a
        key.

        Args:
            url: by default TINKER_BASE_URL, then the hosted service.
            api_key: by default TINKER_API_KEY; "" sends none.
            wire: `json` is for servers that don't speak protobuf.
            result_timeout: seconds that a job may take, unless a call has its own timeout.
            http: an httpx client (it stays open) or transport (it is closed with this client) that
                carries the requests in place of our own connections.
        """
        url = url or os.environ.get("TINKER_BASE_URL") or TINKER.url
        key = TINKER.api_key(url, api_key)
        self._http = HttpClient(
            url,
            headers={"User-Agent": f"AsyncTinker/Python {SDK_VERSION}"},
            secrets={"X-API-Key": key} if key else {},
            policy=policy,
            http=http,
            vendor=TINKER,
        )
        self._key = key
        self._renewal = asyncio.Lock()
        self._connection = TinkerConnection(self._http, wire=wire, result_timeout=result_timeout)
        self._session: dict[str, Any] = {
            "tags": list(tags),
            "user_metadata": {},
            "sdk_version": SDK_VERSION,
            "project_id": project,
            "type": "create_session",
        }
        self.session_id = ""
        self._models: list[TrainingClient] = []
        self._model_seq_ids = itertools.count()
        self._sampling_seq_ids = itertools.count()
        self._tasks: list[asyncio.Task[None]] = []

    def __repr__(self) -> str:
        return f"TinkerClient({self._http.url!r}, session_id={self.session_id!r})"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._http.close)
            await self._handshake()
            reply = await self._connection.post("create_session", self._session, "session_id")
            stack.pop_all()
        self.session_id = reply["session_id"]
        for level, name in ((20, "info"), (30, "warning"), (40, "error")):
            if reply.get(f"{name}_message"):
                log.log(level, "%s: %s", self._http.url, reply[f"{name}_message"])
        self._tasks.append(asyncio.create_task(self._beat(), name="tinker heartbeat"))
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            for task in self._tasks:
                task.cancel()
            await asyncio.gather(*self._tasks, return_exceptions=True)
            await self._connection.drain(GOODBYE)
            await self._finish(error)
        finally:
            await self._http.close()

    def stop_retrying(self) -> None:
        """The run is ending: retry failed calls for a short time only."""
        self._http.stop_retrying()

    async def context_lengths(self) -> dict[str, int | None]:
        """The context length of each model that the service has; None where it is not known."""
        call = Call("GET", "api/v1/get_server_capabilities")
        body = await self._http.send(call, json_object)
        return {
            str(model["model_name"]): model.get("max_context_length")
            for model in body.get("supported_models") or ()
            if model.get("model_name")
        }

    async def create_model(
        self,
        base_model: str,
        lora: LoraConfig | None = None,
        *,
        timeout: float | None = None,
    ) -> TrainingClient:
        """A new LoRA of `base_model`."""
        payload = {
            "session_id": self.session_id,
            "model_seq_id": next(self._model_seq_ids),
            "base_model": base_model,
            "lora_config": (lora or LoraConfig()).payload(),
            "type": "create_model",
        }
        future = await self._connection.submit_json("create_model", payload, CREATE_MODEL)
        return self._added(TrainingClient(self._connection, await future.result(timeout)))

    async def load_model(
        self, path: str, *, optimizer: bool = True, timeout: float | None = None
    ) -> TrainingClient:
        """A new model that continues from `path`, with or without the optimizer's state.

        Raises ValueError on a sampler's path, which holds no weights to train.
        """
        if "/sampler_weights/" in path:
            raise ValueError(f"{path!r} is a sampler's: only .../weights/NAME can be trained on")
        seq_id = next(self._model_seq_ids)
        payload = {
            "session_id": self.session_id,
            "model_seq_id": seq_id,
            "path": path,
            "optimizer": optimizer,
            "type": "load_weights",
        }
        try:
            future = await self._connection.submit_json("load_weights", payload, LOAD_MODEL)
        except RemoteError as error:
            if error.status not in (400, 404, 422):
                raise
            log.debug("the service can't create a model by loading: %s", error)
            base_model, lora = await self.saved_model(path)
            model = await self.create_model(base_model, lora, timeout=timeout)
            await (await model.load_weights(path, optimizer=optimizer)).result(timeout)
            return model
        model_id = await future.result(timeout) or f"{self.session_id}:train:{seq_id}"
        return self._added(TrainingClient(self._connection, model_id))

    async def unload(self, model: TrainingClient) -> None:
        """Free a model before the session ends; some services do not support it."""
        await model.unload()
        self._models.remove(model)

    async def saved_model(self, path: str) -> tuple[str, LoraConfig]:
        """The base model and the LoRA of the weights at `path`.

        Raises RemoteError with status 404 when nothing is there.
        """
        body = await self._connection.post("weights_info", {"tinker_path": path}, "base_model")
        places = {
            name: bool(body[name])
            for name in ("train_mlp", "train_attn", "train_unembed")
            if body.get(name) is not None
        }
        return body["base_model"], LoraConfig(r=body.get("lora_rank") or LoraConfig().r, **places)

    async def delete(self, path: str) -> None:
        """Delete saved weights; no error if they no longer exist."""
        model_id, _, rest = path.removeprefix("tinker://").partition("/")
        where = f"{urllib.parse.quote(model_id)}/checkpoints/{urllib.parse.quote(rest)}"
        call = Call("DELETE", f"api/v1/training_runs/{where}")
        with ignored(404):
            await self._http.send(call, lambda reply: None)

    async def sampling_session(
        self, *, model_path: str | None = None, base_model: str | None = None
    ) -> SamplingClient:
        """A session that samples saved weights or an untrained base model.

        Some services sample paths of `save_weights_for_sampler` only. Raises ValueError unless
        exactly one is given.
        """
        if (model_path is None) == (base_model is None):
            raise ValueError("got neither or both of model_path and base_model, expected one")
        payload = {
            "session_id": self.session_id,
            "sampling_session_seq_id": next(self._sampling_seq_ids),
            "base_model": base_model,
            "model_path": model_path,
            "type": "create_sampling_session",
        }
        made = await self._connection.post(
            "create_sampling_session", payload, "sampling_session_id"
        )
        return SamplingClient(self._connection, made["sampling_session_id"])

    async def sampler_of(
        self, model: TrainingClient, *, timeout: float | None = None
    ) -> SamplingClient:
        """A session that samples the present weights; later steps do not change them.

        The snapshot belongs to the session and leaves no checkpoint behind. On a service without
        such snapshots it gets a name and a time to live.
        """
        try:
            future = await model.save_weights_for_sampler(
                sampling_session_seq_id=next(self._sampling_seq_ids)
            )
            saved = await future.result(timeout)
        except RemoteError as error:
            if error.status not in (400, 404, 422):
                raise
            log.debug("the service makes no snapshots for one session: %s", error)
            name = f"sampler-{time.time_ns():x}"
            future = await model.save_weights_for_sampler(name, ttl_seconds=SNAPSHOT_TTL)
            saved = await future.result(timeout)
        if saved.sampling_session_id is not None:
            return SamplingClient(self._connection, saved.sampling_session_id)
        sampler = await self.sampling_session(model_path=saved.path)
        sampler.snapshot = saved.path
        return sampler

    async def _handshake(self) -> None:
        body = {"sdk_version": SDK_VERSION}
        config = await self._post_if_known("client/config", body)
        if Flags.read(config).pjwt_auth_enabled and self._key:
            await self._renew_token()
            self._http.refresh = self._renew_token
        dynamic = await self._post_if_known("client/dynamic_config", body)
        self._connection.configure(Flags.read(config, dynamic))

    async def _post_if_known(self, endpoint: str, payload: Mapping[str, Any]) -> dict[str, Any]:
        try:
            return await self._connection.post(endpoint, payload)
        except RemoteError as error:
            if error.status not in (404, 405, 501):
                raise
            return {}

    async def _renew_token(self) -> None:
        """Exchange the key for a token; concurrent callers share one renewal."""
        expired = self._http.secrets["X-API-Key"]
        async with self._renewal:
            if self._http.secrets["X-API-Key"] == expired:
                key = {"X-API-Key": self._key}
                reply = await self._connection.post("auth/token", {}, "jwt", headers=key)
                self._http.hide(reply["jwt"])
                self._http.secrets["X-API-Key"] = reply["jwt"]

    async def _beat(self) -> None:
        heard = time.monotonic()
        payload = {"session_id": self.session_id, "type": "session_heartbeat"}
        while True:
            await asyncio.sleep(HEARTBEAT)
            try:
                await self._connection.post(
                    "session_heartbeat", payload, timeout=HEARTBEAT, policy=NO_RETRY
                )
                heard = time.monotonic()
            except RemoteError as error:
                if error.status == 410:
                    log.error("session %s was ended by the service", self.session_id)
                    return
                silent = time.monotonic() - heard
                if silent > HEARTBEAT_WARNING:
                    log.warning(
                        "no heartbeat for %.0f s; the service may end the session: %s",
                        silent,
                        error,
                    )

    async def _finish(self, error: BaseException | None) -> None:
        interrupted = isinstance(error, (asyncio.CancelledError, KeyboardInterrupt))
        reason = "success" if error is None else "interrupted" if interrupted else "errored"
        payload = {
            "reason": {"type": reason},
            "detail": None if error is None else type(error).__name__,
        }
        where = f"sessions/{self.session_id}/finish"
        try:
            await self._connection.post(where, payload, timeout=GOODBYE, policy=NO_RETRY)
            return
        except RemoteError as refusal:
            log.debug("the session could not be finished: %s", refusal)
        for model in self._models:  # a service without `finish` would keep them
            try:
                async with asyncio.timeout(GOODBYE):
                    await model.unload()
            except (RemoteError, TimeoutError) as refusal:
                log.debug("%s could not be unloaded: %s", model.model_id, refusal)

    def _added(self, model: TrainingClient) -> TrainingClient:
        self._models.append(model)
        return model


CREATE_MODEL: JobKind[str] = JobKind("CreateModel", lambda body: str(body["model_id"]))
LOAD_MODEL: JobKind[str] = JobKind("LoadWeights", lambda body: str(body.get("model_id") or ""))
