"""WeaverClient: a session with a Weaver service; it creates models and sampling sessions.

Leaving the client terminates its models and deletes its sampling sessions. What a cancelled call
creates is removed (`or_undo`).
"""

from __future__ import annotations

import asyncio
import itertools
import logging
import os
from collections.abc import Mapping
from contextlib import AsyncExitStack, suppress
from typing import TYPE_CHECKING, Any, Literal, Self

from retrain import __version__
from retrain.adapters.weaver import wire
from retrain.adapters.weaver.connection import PACE, Operation, WeaverConnection, clean_up, or_undo
from retrain.adapters.weaver.model import WeaverModel
from retrain.adapters.weaver.sampling import WeaverSession
from retrain.wire.client import HttpClient
from retrain.wire.refusals import RemoteError
from retrain.wire.retries import RetryPolicy
from retrain.wire.training import LoraConfig
from retrain.wire.vendors import WEAVER

if TYPE_CHECKING:
    import httpx

log = logging.getLogger(__name__)

HEARTBEAT = 30.0
"""Seconds between heartbeats."""


class WeaverClient:
    """An async context manager: entering opens the session, leaving removes what it created.

    async with WeaverClient(url) as client:                      # key: WEAVER_API_KEY
        model = await client.create_model("Qwen/Qwen3-8B", lora=LoraConfig(rank=16))
        passed = await model.forward_backward(rows, "cross_entropy")
        stepped = await model.optim_step(AdamParams(learning_rate=1e-4))
        print(await passed.result(), await stepped.result())
        path = await (await model.save_for_sampler("step_1")).result()
        session = await client.sampling_session(path=path, model=model)
        print(await session.sample([1, 2, 3], SamplingParams(max_tokens=16), n=4))

    Every method raises RemoteError when the service refuses, fails or stays silent.
    """

    def __init__(
        self,
        url: str = WEAVER.url,
        *,
        api_key: str | None = None,
        http: httpx.AsyncClient | httpx.AsyncBaseTransport | None = None,
        policy: RetryPolicy | None = None,
        pace: RetryPolicy = PACE,
        deadline: float = 3600.0,
        resend: bool = False,
        metadata: Mapping[str, Any] | None = None,
    ) -> None:
        """Connects to nothing yet.

        Raises ConfigError on a bad URL or key, or when the hosted service is to be used without a
        key.

        Args:
            api_key: by default WEAVER_API_KEY; "" sends none.
            http: an httpx client (it stays open) or transport (it is closed with this client) that
                carries the requests in place of our own connections.
            pace: the pauses between polls of an operation.
            deadline: seconds that one operation may take.
            resend: the service recognises a repeated seq_id, so a training call whose reply was
                lost is sent again. Otherwise a lost reply is an error: the call may have been
                applied.
            metadata: shown by the service with the session. The ids of the organization and the
                project come from WEAVER_ORGANIZATION_ID and WEAVER_PROJECT_ID.
        """
        key = WEAVER.api_key(url, api_key)
        self._http = HttpClient(
            url,
            headers={"User-Agent": f"retrain/{__version__}"},
            secrets={"X-WEAVER-API-KEY": key} if key else {},
            policy=policy,
            http=http,
            vendor=WEAVER,
        )
        self.session_id = ""
        self._connection = WeaverConnection(self._http, deadline, pace, resend)
        self._session = {
            "tags": [],
            "user_metadata": dict(metadata or {}),
            "sdk_version": f"retrain-{__version__}",
            **_scope(),
        }
        self._models: list[WeaverModel] = []
        self._samplers: dict[str, WeaverSession] = {}
        self._model_seq = itertools.count(1)
        self._sampler_seq = itertools.count(1)
        self._beating: asyncio.Task[None]

    def __repr__(self) -> str:
        return f"WeaverClient({self._http.url!r}, session={self.session_id!r})"

    async def __aenter__(self) -> Self:
        async with AsyncExitStack() as stack:
            stack.push_async_callback(self._http.close)
            self.session_id = await self._connection.call(
                "POST", "sessions", self._session, wire.identifier
            )
            stack.pop_all()
        self._beating = asyncio.create_task(self._beat(), name="weaver heartbeat")
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        """Delete the sampling sessions, terminate the models, stop the heartbeat, disconnect.

        Failures are only logged: the service ends a silent session by itself.
        """
        made: list[WeaverSession | WeaverModel] = [*self._samplers.values(), *self._models]
        try:
            await asyncio.gather(*(clean_up(one.close()) for one in made))
        finally:
            self._beating.cancel()
            with suppress(asyncio.CancelledError):
                await self._beating
            await self._http.close()

    def stop_retrying(self) -> None:
        """The run is ending: retry failed calls for a short time only."""
        self._http.stop_retrying()

    async def create_model(
        self,
        base_model: str,
        *,
        training_mode: Literal["lora", "full_ft"] = "lora",
        lora: LoraConfig | None = None,
    ) -> WeaverModel:
        """A new model to train. The service allocates GPUs on its first operation."""
        payload: dict[str, Any] = {
            "model_seq_id": next(self._model_seq),
            "base_model": base_model,
            "training_mode": training_mode,
        }
        if training_mode == "lora":
            payload["lora_config"] = (lora or LoraConfig()).payload()
        return await or_undo(self._create_model(payload), self.terminate)

    async def terminate(self, model: WeaverModel) -> None:
        """Free a model before the session ends."""
        self._models.remove(model)
        await model.close()

    async def _create_model(self, payload: dict[str, Any]) -> WeaverModel:
        path, base_model = f"sessions/{self.session_id}/models", payload["base_model"]
        name, id = await self._connection.call(
            "POST",
            path,
            payload,
            lambda made: (wire.read(made, "base_model", base_model), wire.identifier(made)),
        )
        model = WeaverModel(self._connection, id, base_model=str(name))
        self._models.append(model)
        return model

    async def sampling_session(
        self,
        *,
        path: str | None = None,
        model: WeaverModel | None = None,
        base_model: str | None = None,
    ) -> WeaverSession:
        """A session that samples the weights at `path`, or the untrained `base_model`.

        The session is ready when this returns: if the service loads the weights in the background,
        the client waits for that, and deletes the session if loading fails.
        """
        payload: dict[str, Any] = {
            "sampling_session_seq_id": next(self._sampler_seq),
            "base_model": model.base_model if model and not base_model else base_model,
            "model_path": path,
        }
        if model is not None:
            payload["model_id"] = model.id
        session, loading = await or_undo(self._open(payload), lambda made: made[0].close())
        if loading is not None:
            what = "loading weights into a sampling session"
            async with AsyncExitStack() as stack:
                stack.push_async_callback(lambda: clean_up(session.close()))
                await Operation(self._connection, loading, lambda _: None, what=what).result()
                stack.pop_all()
        return session

    async def _open(
        self, payload: dict[str, Any]
    ) -> tuple[WeaverSession, wire.OperationState | None]:
        """A new session, and the operation that loads its weights, if there is one."""
        where = f"sessions/{self.session_id}/sampling-sessions"
        id, loading = await self._connection.call("POST", where, payload, wire.sampling_session)
        session = WeaverSession(
            self._connection, id, forget=lambda id: self._samplers.pop(id, None)
        )
        self._samplers[session.id] = session
        return session, loading

    async def _beat(self) -> None:
        """Send heartbeats. A failed one is ignored; the next may succeed."""
        while True:
            try:
                await self._connection.call("POST", f"sessions/{self.session_id}/heartbeat")
            except RemoteError as error:
                log.debug("heartbeat: %s", error)
            await asyncio.sleep(HEARTBEAT)


def _scope() -> dict[str, str]:
    """The ids of the organization and project in the environment."""
    names = ("organization_id", "project_id")
    found = {name: os.environ.get(f"WEAVER_{name.upper()}", "").strip() for name in names}
    return {name: value for name, value in found.items() if value}
