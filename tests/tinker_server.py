"""A Tinker server without a model, for the client's tests: it keeps the protocol and counts.

A "model" is the number of optimizer steps it took and the datums whose gradients wait; the log-prob
of a token is a fixed function of the token and the steps, so that a test can tell which weights
served it. `Peer` makes it deviate from the hosted service as other people's servers do.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx
import zstandard
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrain.wire.tinker import messages, payloads
from retrain.wire.tinker.values import (
    Datum,
    ForwardBackward,
    ForwardBackwardOutput,
    SampledSequence,
    SampleResult,
    Tensor,
)


@dataclass(frozen=True)
class Peer:
    """How a server deviates from the hosted service."""

    handshake: bool = True
    proto: bool = True
    loads_on_create: bool = True
    session_snapshots: bool = True
    finishes: bool = True
    jobs_fail_as_400: bool = False
    failure: Callable[[str], dict[str, Any]] = lambda text: {"error": text, "category": "user"}
    model_id: str = "{session}:train:{n}"
    sampler_path: str = "tinker://{model}/sampler_weights/{name}"
    metrics: Callable[[float], dict[str, float]] = lambda loss: {"loss:sum": loss}
    optim_metrics: dict[str, float] = field(default_factory=dict)
    first_prompt_logprob: bool = True
    flags: dict[str, Any] = field(default_factory=dict)


HOSTED = Peer()
SKYRL = Peer(
    handshake=False,
    loads_on_create=False,
    session_snapshots=False,
    finishes=False,
    jobs_fail_as_400=True,
    failure=lambda text: {"detail": text},
    model_id="model_{n}",
    sampler_path="tinker://{model}/{name}",
    metrics=lambda loss: {},
    optim_metrics={"skyrl.ai/grad_norm": 2.0, "lr:last": 0.1, "plain": 3.0},
    first_prompt_logprob=False,
)
OPEN_RL = Peer(
    handshake=False,
    proto=False,
    loads_on_create=False,
    session_snapshots=False,
    finishes=False,
    jobs_fail_as_400=True,
    failure=lambda text: {"type": "RequestFailedResponse", "error_message": text},
    model_id="m-{n}",
    sampler_path="/data/{model}/{name}",
)


@dataclass
class Model:
    base_model: str
    lora: dict[str, Any]
    steps: int = 0
    gathered: int = 0
    applied: list[int] = field(default_factory=list)
    """The number of datums of each optimizer step, in order."""
    rates: list[float] = field(default_factory=list)
    seen: dict[int, tuple[bytes, str]] = field(default_factory=dict)
    """seq_id -> (body, request_id)."""
    arrivals: list[tuple[int, str]] = field(default_factory=list)
    adam: dict[str, float] = field(default_factory=dict)


@dataclass
class Session:
    steps: int
    seen: dict[int, str] = field(default_factory=dict)


def logprob(token: int, steps: int) -> float:
    """What every model here says of a token."""
    return -0.25 - 0.125 * (token % 4) - 0.0625 * steps


class TinkerServer:
    def __init__(self, peer: Peer = HOSTED, *, key: str | None = None) -> None:
        self.peer, self.key = peer, key
        self.calls: Counter[str] = Counter()
        self.bodies: dict[str, list[Any]] = defaultdict(list)
        self.models: dict[str, Model] = {}
        self.saved: dict[str, Model] = {}
        self.snapshots: dict[str, int] = {}
        self.sessions: dict[str, Session] = {}
        self.finished: list[str] = []
        self.cancelled: list[str] = []
        self.unloaded: list[str] = []
        self.jobs: dict[str, Callable[[], Response]] = {}
        self.fail_jobs: dict[str, str] = {}
        """Endpoint -> what its next job fails with."""
        self.polls: dict[str, list[Response]] = defaultdict(list)
        """Kind of request -> replies before the result."""
        self.hold = asyncio.Event()
        self.hold.set()
        """Cleared: samples don't finish."""
        self.headers: list[dict[str, str]] = []
        self._progress = asyncio.Event()
        names = [n.removeprefix("on_") for n in dir(self) if n.startswith("on_")]
        routes = [Route(f"/api/v1/{n}", self._handler(n), methods=["POST"]) for n in names]
        self.app = Starlette(
            routes=[
                *routes,
                Route("/api/v1/client/{which}", self._config, methods=["POST"]),
                Route("/api/v1/sessions/{id}/finish", self._finish, methods=["POST"]),
                Route("/api/v1/get_server_capabilities", self._capabilities),
                Route(
                    "/api/v1/training_runs/{model}/checkpoints/{rest:path}",
                    self._delete,
                    methods=["DELETE"],
                ),
            ]
        )

    def transport(self) -> httpx.ASGITransport:
        return httpx.ASGITransport(self.app, raise_app_exceptions=False)

    async def called(self, name: str, times: int) -> None:
        """Wait until an endpoint was called so often."""
        while self.calls[name] < times:
            self._progress.clear()
            await self._progress.wait()

    # Endpoints; each gets the decoded body and the raw one, and returns the reply.

    def on_create_session(self, body: dict[str, Any], _: bytes) -> Response:
        return JSONResponse({"session_id": "sess", "info_message": "hello", "unknown": 1})

    def on_session_heartbeat(self, body: dict[str, Any], _: bytes) -> Response:
        return JSONResponse({})

    def on_create_model(self, body: dict[str, Any], _: bytes) -> Response:
        made = self._made(body["base_model"], body.get("lora_config") or {})
        return self._job("create_model", lambda: {"model_id": made, "type": "create_model"})

    def on_load_weights(self, body: dict[str, Any], raw: bytes) -> Response:
        if "model_id" not in body:
            if not self.peer.loads_on_create:
                return JSONResponse({"detail": "model_id: field required"}, 422)
            source = self.saved[body["path"]]
            made = self._made(source.base_model, source.lora)
            self._copy(source, self.models[made], body["optimizer"])
            return self._job("load_weights", lambda: {"model_id": made})
        model = self.models[body["model_id"]]

        def run() -> dict[str, Any]:
            self._copy(self.saved[body["path"]], model, body["optimizer"])
            return {}

        return self._ordered(model, body["seq_id"], "load_weights", raw, run)

    def on_weights_info(self, body: dict[str, Any], _: bytes) -> Response:
        saved = self.saved.get(body["tinker_path"])
        if saved is None:
            return JSONResponse({"detail": "no such path"}, 404)
        return JSONResponse(
            {"base_model": saved.base_model, "lora_rank": saved.lora.get("rank"), "is_lora": True}
        )

    def on_forward_backward(self, body: dict[str, Any], raw: bytes) -> Response:
        request = self._request(body, raw)
        model = self.models[request.model_id]

        def run() -> ForwardBackwardOutput:
            if not request.forward_only:
                model.gathered += len(request.data)
            return self._output(model, request)

        return self._ordered(model, request.seq_id, "forward_backward", raw, run)

    def on_forward(self, body: dict[str, Any], raw: bytes) -> Response:
        request = self._request(body, raw)
        model = self.models[request.model_id]
        return self._ordered(
            model, request.seq_id, "forward", raw, lambda: self._output(model, request)
        )

    def on_optim_step(self, body: dict[str, Any], raw: bytes) -> Response:
        model = self.models[body["model_id"]]

        def run() -> dict[str, Any]:
            model.adam = body["adam_params"]
            model.rates.append(model.adam["learning_rate"])
            model.applied.append(model.gathered)
            model.gathered = 0
            model.steps += 1
            return {"metrics": self.peer.optim_metrics}

        return self._ordered(model, body["seq_id"], "optim_step", raw, run)

    def on_save_weights(self, body: dict[str, Any], raw: bytes) -> Response:
        model = self.models[body["model_id"]]
        path = f"tinker://{body['model_id']}/weights/{body['path']}"

        def run() -> dict[str, Any]:
            self.saved[path] = dataclasses.replace(model, seen={}, arrivals=[])
            return {"path": path}

        return self._ordered(model, body["seq_id"], "save_weights", raw, run)

    def on_save_weights_for_sampler(self, body: dict[str, Any], raw: bytes) -> Response:
        model = self.models[body["model_id"]]
        if "path" not in body and not self.peer.session_snapshots:
            return JSONResponse({"detail": "path: field required"}, 422)

        def run() -> dict[str, Any]:
            if "path" not in body:
                name = f"snap{len(self.sessions)}"
                self.sessions[name] = Session(model.steps)
                return {"sampling_session_id": name}
            path = self.peer.sampler_path.format(model=body["model_id"], name=body["path"])
            self.snapshots[path] = model.steps
            return {"path": path}

        return self._ordered(model, body["seq_id"], "save_weights_for_sampler", raw, run)

    def on_create_sampling_session(self, body: dict[str, Any], _: bytes) -> Response:
        name = f"sampling{len(self.sessions)}"
        steps = 0 if "base_model" in body else self.snapshots[body["model_path"]]
        self.sessions[name] = Session(steps)
        return JSONResponse({"sampling_session_id": name})

    def on_asample(self, body: dict[str, Any], _: bytes) -> Response:
        session = self.sessions[body["sampling_session_id"]]
        if body["seq_id"] not in session.seen:
            reply = self._job("asample", lambda: self._sampled(session, body))
            session.seen[body["seq_id"]] = json.loads(reply.body)["request_id"]
        return JSONResponse({"request_id": session.seen[body["seq_id"]]})

    async def on_retrieve_future(self, body: dict[str, Any], _: bytes) -> Response:
        name = body["request_id"]
        kind = self.headers[-1].get("x-tinker-request-type", "")
        if self.polls[kind]:
            return self.polls[kind].pop(0)
        if kind == "Sample":
            await self.hold.wait()
        return self.jobs[name]()

    def on_cancel_future(self, body: dict[str, Any], _: bytes) -> Response:
        self.cancelled.append(body["request_id"])
        return JSONResponse({})

    def on_unload_model(self, body: dict[str, Any], _: bytes) -> Response:
        self.unloaded.append(body["model_id"])
        return self._job("unload_model", dict)

    # Parts

    def _handler(self, name: str) -> Callable[[Request], Awaitable[Response]]:
        async def handle(request: Request) -> Response:
            raw = await request.body()
            self.calls[name] += 1
            self._progress.set()
            self.headers.append(dict(request.headers))
            if self.key is not None and request.headers.get("x-api-key") != self.key:
                return JSONResponse({"detail": f"bad key {request.headers.get('x-api-key')}"}, 401)
            if request.headers.get("content-encoding") == "zstd":
                raw = zstandard.ZstdDecompressor().decompressobj().decompress(raw)
            is_json = request.headers.get("content-type") == "application/json"
            if not is_json and not self.peer.proto:
                return JSONResponse({"detail": "expected JSON"}, 415)
            body = json.loads(raw) if is_json else {}
            self.bodies[name].append(body or raw)
            reply = getattr(self, f"on_{name}")(body, raw)
            return await reply if asyncio.iscoroutine(reply) else reply

        return handle

    async def _config(self, request: Request) -> Response:
        self.calls["config"] += 1
        return JSONResponse(self.peer.flags, 200 if self.peer.handshake else 404)

    async def _finish(self, request: Request) -> Response:
        if not self.peer.finishes:
            return Response(status_code=404)
        self.finished.append((await request.json())["reason"]["type"])
        return JSONResponse({})

    async def _capabilities(self, request: Request) -> Response:
        models = [{"model_name": "org/base", "max_context_length": 64}, {"model_name": None}]
        return JSONResponse({"supported_models": models})

    async def _delete(self, request: Request) -> Response:
        path = f"tinker://{request.path_params['model']}/{request.path_params['rest']}"
        return Response(status_code=204 if self.saved.pop(path, None) else 404)

    def _made(self, base_model: str, lora: dict[str, Any]) -> str:
        name = self.peer.model_id.format(session="sess", n=len(self.models))
        self.models[name] = Model(base_model, lora)
        return name

    @staticmethod
    def _copy(source: Model, target: Model, optimizer: bool) -> None:
        target.steps = source.steps
        target.adam = dict(source.adam) if optimizer else {}

    def _request(self, body: dict[str, Any], raw: bytes) -> ForwardBackward:
        if not body:
            return messages.decode_request(raw)
        forward = "forward_input" in body
        inner = body["forward_input" if forward else "forward_backward_input"]
        data = [
            Datum(
                datum["model_input"]["chunks"][0]["tokens"],
                {n: Tensor(t["data"], t["dtype"]) for n, t in datum["loss_fn_inputs"].items()},
            )
            for datum in inner["data"]
        ]
        config = inner.get("loss_fn_config") or {}
        return ForwardBackward(
            body["model_id"], body["seq_id"], data, inner["loss_fn"], config, forward
        )

    def _output(self, model: Model, request: ForwardBackward) -> ForwardBackwardOutput:
        rows = [
            [logprob(int(t), model.steps) for t in datum.inputs["target_tokens"].data]
            for datum in request.data
        ]
        outputs = [{"logprobs": Tensor(row, "float32", (len(row),))} for row in rows]
        return ForwardBackwardOutput(outputs, self.peer.metrics(float(len(rows))), "scalar")

    def _sampled(self, session: Session, body: dict[str, Any]) -> SampleResult:
        prompt = [t for chunk in body["prompt"]["chunks"] for t in chunk["tokens"]]
        count = body["sampling_params"]["max_tokens"]
        prompt_logprobs: list[float | None] | None = None
        if body["prompt_logprobs"]:
            scored: list[float | None] = [logprob(t, session.steps) for t in prompt[1:]]
            prompt_logprobs = [None, *scored] if self.peer.first_prompt_logprob else scored
        tokens = [(sum(prompt) + i) % 90 + 7 for i in range(count)]
        logprobs = [logprob(t, session.steps) for t in tokens]
        one = SampledSequence(tokens, logprobs, "length")
        return SampleResult([one] * body["num_samples"], prompt_logprobs)

    def _ordered(
        self, model: Model, seq_id: int, name: str, raw: bytes, run: Callable[[], Any]
    ) -> Response:
        """Each seq_id once: the same body again gets the same job, another body is a conflict."""
        if seq_id in model.seen:
            before, request_id = model.seen[seq_id]
            if before != raw:
                return JSONResponse({"detail": f"seq_id {seq_id} was another request"}, 409)
            return JSONResponse({"request_id": request_id})
        reply = self._job(name, run)
        model.seen[seq_id] = raw, json.loads(reply.body)["request_id"]
        model.arrivals.append((seq_id, name))
        return reply

    def _job(self, name: str, run: Callable[[], Any]) -> JSONResponse:
        request_id = f"r{len(self.jobs)}"
        failure = self.fail_jobs.pop(name, None)
        if failure is not None:
            status = 400 if self.peer.jobs_fail_as_400 else 200
            self.jobs[request_id] = lambda: JSONResponse(self.peer.failure(failure), status)
        else:
            result = run()
            self.jobs[request_id] = lambda: self._reply(result)
        return JSONResponse({"request_id": request_id})

    def _reply(self, result: Any) -> Response:
        if isinstance(result, dict):
            return JSONResponse(result)
        if self.peer.proto:
            encode: Any = (
                messages.encode_sample
                if isinstance(result, SampleResult)
                else messages.encode_output
            )
            return Response(encode(result), media_type="application/x-protobuf")
        if isinstance(result, SampleResult):
            return JSONResponse(payloads.sample_to_json(result))
        outputs = [{n: payloads.tensor_to_json(t) for n, t in o.items()} for o in result.outputs]
        return JSONResponse({"loss_fn_outputs": outputs, "metrics": dict(result.metrics)})


class Faulty(httpx.AsyncBaseTransport):
    """Breaks a call before or after the server has worked on it, as often as it is told."""

    def __init__(self, inner: httpx.AsyncBaseTransport) -> None:
        self._inner = inner
        self.before: dict[str, list[httpx.Response | Exception]] = defaultdict(list)
        self.after: dict[str, list[httpx.Response | Exception]] = defaultdict(list)

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        name = request.url.path.rpartition("/")[2]
        if self.before[name]:
            return self._fault(self.before[name].pop(0))
        response = await self._inner.handle_async_request(request)
        if self.after[name]:
            await response.aread()
            return self._fault(self.after[name].pop(0))
        return response

    @staticmethod
    def _fault(fault: httpx.Response | Exception) -> httpx.Response:
        if isinstance(fault, Exception):
            raise fault
        return fault
