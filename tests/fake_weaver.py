"""A Weaver service in one file, for tests: the wire of the protocol over a bigram table.

The model is a V x V table of logits, row = the token before; it trains for real (cross_entropy,
importance_sampling, surrogate, Adam with all six fields), in plain Python. `serve` puts it on
loopback; `faults` break the replies of chosen calls; `log` and `applied` say what arrived and what
was done.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
import json
import math
import random
import re
import socket
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

VOCABULARY = 8
KEY = "sk-a-test-key"


@dataclass
class Fault:
    """What goes wrong with the next `times` calls that match `path`."""

    path: str
    """A regular expression over "METHOD path"."""
    kind: str = "reply"
    """reply | drop_before | drop_after | hang | garbage_after | empty_after | slow"""
    status: int = 500
    body: dict[str, Any] = field(default_factory=dict)
    headers: dict[str, str] = field(default_factory=dict)
    times: int = 1
    skip: int = 0
    """Matching calls that go through first."""


@dataclass
class Model:
    table: list[list[float]]
    gradient: list[list[float]]
    moments: dict[str, Any]
    base_model: str = "tiny"
    steps: int = 0
    replies: dict[int, tuple[bytes, dict[str, Any]]] = field(default_factory=dict)


def zeros() -> list[list[float]]:
    return [[0.0] * VOCABULARY for _ in range(VOCABULARY)]


def log_softmax(row: list[float]) -> list[float]:
    top = max(row)
    norm = top + math.log(sum(math.exp(value - top) for value in row))
    return [value - norm for value in row]


class Refused(Exception):
    def __init__(self, status: int, code: str, message: str) -> None:
        self.status, self.code, self.message = status, code, message


class FakeWeaver:
    """The service's state, and its ASGI application in `app`."""

    def __init__(self) -> None:
        self.models: dict[str, Model] = {}
        self.samplers: dict[str, list[list[float]]] = {}
        self.saved: dict[str, Any] = {}
        self.operations: dict[str, dict[str, Any]] = {}
        self.looks: Counter[str] = Counter()
        self.log: list[tuple[str, str, Any]] = []
        """Method, path and JSON body of each call that was worked on."""
        self.applied: Counter[str] = Counter()
        """Work done: forward_backward, optim_step, ..."""
        self.sessions: list[str] = []
        self.terminated: list[str] = []
        self.deleted: list[str] = []
        self.expired: list[str] = []
        self.faults: list[Fault] = []
        self.pending_looks = 1
        self.spelling = "id"
        self.direct_results = False
        self.sync: str | None = None
        """None: 201; `done`, `error` or `hang`: 202 with an operation that ends so."""
        self.fail_operation: dict[str, Any] | None = None
        """Error fields of the next operation."""
        self.dedupes = True
        self.empty_samples = False
        self.hold_samples: asyncio.Event | None = None
        self.hanging = asyncio.Event()
        self.released = asyncio.Event()
        self.key = KEY
        self._ids = 0
        self.app = self._application()

    # Plumbing

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """The application behind its faults."""
        fault = self._fault(f"{scope.get('method')} {scope['path']}")
        if fault is None:
            await self.app(scope, receive, send)
        elif fault.kind == "reply":
            await JSONResponse(fault.body, fault.status, fault.headers)(scope, receive, send)
        elif fault.kind == "hang":
            self.hanging.set()
            await self.released.wait()
        elif fault.kind == "slow":
            self.hanging.set()
            await self.released.wait()
            await self.app(scope, receive, send)
        elif fault.kind == "drop_before":
            send.__self__.transport.abort()
        else:
            held: list[Any] = []

            async def hold(message: Any) -> None:
                held.append(message)

            await self.app(scope, receive, hold)
            if fault.kind == "drop_after":
                send.__self__.transport.abort()
            else:
                body = b"" if fault.kind == "empty_after" else b'{"id": "op'
                await Response(body, 202)(scope, receive, send)

    def _fault(self, call: str) -> Fault | None:
        for fault in self.faults:
            if fault.times and re.search(fault.path, call):
                if fault.skip:
                    fault.skip -= 1
                    continue
                fault.times -= 1
                return fault
        return None

    def _application(self) -> Starlette:
        def route(path: str, method: str, work: Callable[..., Any]) -> Route:
            async def endpoint(request: Request) -> Response:
                if self.key and request.headers.get("x-weaver-api-key") != self.key:
                    return self._error(401, "unauthorized", "the API key is wrong")
                raw = await request.body()
                body = json.loads(raw) if raw else None
                self.log.append((method, request.url.path, body))
                try:
                    return await self._answer(work, request, raw, body)
                except Refused as refused:
                    return self._error(refused.status, refused.code, refused.message)

            return Route(f"/api/v1/{path}", endpoint, methods=[method])

        return Starlette(
            routes=[
                route("sessions", "POST", self.create_session),
                route("sessions/{id}/heartbeat", "POST", lambda **_: Response(status_code=204)),
                route("sessions/{id}/models", "POST", self.create_model),
                route("sessions/{id}/sampling-sessions", "POST", self.create_sampler),
                route("supported-models", "GET", lambda **_: {"items": []}),
                route("models/{id}/forward-passes", "POST", self.train),
                route("models/{id}/forward-backward-passes", "POST", self.train),
                route("models/{id}/optimizer-steps", "POST", self.train),
                route("models/{id}/export-sampler", "POST", self.train),
                route("models/{id}/checkpoints", "POST", self.save),
                route("models/{id}/checkpoints", "GET", self.checkpoints),
                route("models/{id}/checkpoints/ttl", "PATCH", self.expire),
                route("models/{id}/load", "POST", self.load),
                route("models/{id}/terminate", "POST", self.terminate),
                route("operations/{id}", "GET", self.look),
                route("sampling-sessions/{id}/samples", "POST", self.sample),
                route("sampling-sessions/{id}/logprobs", "POST", self.logprobs),
                route("sampling-sessions/{id}", "DELETE", self.delete_sampler),
            ]
        )

    async def _answer(
        self, work: Callable[..., Any], request: Request, raw: bytes, body: Any
    ) -> Response:
        reply = work(id=request.path_params.get("id", ""), request=request, raw=raw, body=body)
        if asyncio.iscoroutine(reply):
            reply = await reply
        if isinstance(reply, Response):
            return reply
        status, payload = reply if isinstance(reply, tuple) else (200, reply)
        return JSONResponse(payload, status)

    def _error(self, status: int, code: str, message: str) -> Response:
        body = {"error": code, "message": message, "retryable": status >= 500}
        return JSONResponse(body, status, {"X-Request-ID": "req-7"})

    def _id(self, kind: str) -> str:
        self._ids += 1
        return f"{kind}-{self._ids}"

    def _operation(self, response: Any) -> dict[str, Any]:
        id = self._id("op")
        done: dict[str, Any] = {"status": "done", "response": response}
        if self.fail_operation is not None:
            done = {"status": "error", **self.fail_operation}
            self.fail_operation = None
        self.operations[id] = done
        return self._state(id)

    def _state(self, id: str) -> dict[str, Any]:
        done = self.looks[id] >= self.pending_looks
        state = self.operations[id] if done else {"status": "pending", "pending_info": {}}
        if not done:
            state["pending_info"] = {"code": "queued", "message": "waiting for a GPU"}
        return {self.spelling: id, **state}

    # Resources

    def create_session(self, body: Any, **_: Any) -> Any:
        self.sessions.append(self._id("session"))
        return 201, {self.spelling: self.sessions[-1], **body}

    def create_model(self, body: Any, **_: Any) -> Any:
        id = self._id("model")
        self.models[id] = Model(zeros(), zeros(), {"m": zeros(), "v": zeros()}, body["base_model"])
        return 201, {self.spelling: id, "base_model": body["base_model"], "tokenizer_path": None}

    def _model(self, id: str) -> Model:
        if id not in self.models:
            raise Refused(404, "not_found", f"no model {id}")
        return self.models[id]

    def create_sampler(self, body: Any, **_: Any) -> Any:
        path = body["model_path"]
        if path is not None and path not in self.saved:
            raise Refused(404, "not_found", f"no weights at {path}")
        id = self._id("sampler")
        self.samplers[id] = copy.deepcopy(self.saved[path].table) if path else zeros()
        session = {self.spelling: id, "model_path": path}
        if self.sync is None:
            return 201, session
        operation = self._operation({})
        if self.sync == "error":
            failed = {"status": "error", "error": "sync_failed", "error_message": "no engine"}
            self.operations[operation[self.spelling]] = failed
        if self.sync == "hang":
            self.looks[operation[self.spelling]] = -(10**9)
            self.hanging.set()
        return 202, {"sampling_session": session, "sync_operation": operation}

    def delete_sampler(self, id: str, **_: Any) -> Response:
        if self.samplers.pop(id, None) is None:
            raise Refused(404, "not_found", f"no sampling session {id}")
        self.deleted.append(id)
        return Response(status_code=204)

    def terminate(self, id: str, **_: Any) -> Any:
        self._model(id)
        self.terminated.append(id)
        return {}

    def look(self, id: str, **_: Any) -> Any:
        if id not in self.operations:
            raise Refused(404, "not_found", f"no operation {id}")
        self.looks[id] += 1
        return self._state(id)

    # Training: one reply a (model, seq_id)

    def train(self, id: str, request: Request, raw: bytes, body: Any) -> Any:
        model = self._model(id)
        kind = request.url.path.rsplit("/", 1)[-1]
        payload = body.get("payload", body)
        seq_id = payload["seq_id"]
        if self.dedupes and seq_id in model.replies:
            sent, operation = model.replies[seq_id]
            if sent != raw:
                raise Refused(409, "seq_conflict", f"seq_id {seq_id} came with another body")
            return 202, self._state(operation[self.spelling])
        work = {
            "forward-passes": self._forward,
            "forward-backward-passes": self._forward_backward,
            "optimizer-steps": self._optimizer_step,
            "export-sampler": self._export,
        }[kind]
        operation = self._operation(work(id, model, payload))
        model.replies[seq_id] = raw, operation
        return 202, operation

    def _forward(self, id: str, model: Model, payload: Any) -> Any:
        self.applied["forward"] += 1
        return self._passed(model, payload["forward_input"], backward=False)

    def _forward_backward(self, id: str, model: Model, payload: Any) -> Any:
        result = self._passed(model, payload["forward_backward_input"], backward=True)
        self.applied["forward_backward"] += 1
        return result

    def _passed(self, model: Model, wanted: Any, *, backward: bool) -> Any:
        outputs, loss = [], 0.0
        for row in wanted["data"]:
            tokens = [t for chunk in row["model_input"]["chunks"] for t in chunk["tokens"]]
            inputs = {name: value["data"] for name, value in row["loss_fn_inputs"].items()}
            for name, values in inputs.items():
                if len(values) != len(tokens):
                    raise Refused(400, "invalid_request", f"{name} has the wrong length")
            scored = [log_softmax(model.table[token]) for token in tokens]
            logprobs = [row[t] for row, t in zip(scored, inputs["target_tokens"], strict=True)]
            outputs.append({"logprobs": {"data": logprobs, "dtype": "float32"}})
            for t, lp in enumerate(logprobs):
                value, slope = self._loss(wanted["loss_fn"], inputs, t, lp)
                loss += value
                if backward and slope:
                    for j in range(VOCABULARY):
                        picked = float(j == inputs["target_tokens"][t])
                        change = slope * (picked - math.exp(scored[t][j]))
                        model.gradient[tokens[t]][j] += change
        report = {"loss_fn_outputs": outputs, "metrics": {"loss:sum": loss}}
        return report if self.direct_results else {"status": "ok", "result": report}

    @staticmethod
    def _loss(name: str, inputs: Any, t: int, lp: float) -> tuple[float, float]:
        """Value and derivative at one position."""
        if name == "forward_logprob":
            return 0.0, 0.0
        if name == "cross_entropy":
            return -inputs["weights"][t] * lp, -inputs["weights"][t]
        if name == "surrogate":
            return inputs["surrogate_weights"][t] * lp, inputs["surrogate_weights"][t]
        if name == "importance_sampling":
            credit = inputs["advantages"][t] * inputs["loss_mask"][t]
            slope = -math.exp(lp - inputs["logprobs"][t]) * credit
            return slope, slope
        raise Refused(400, "invalid_request", f"unknown loss {name}")

    def _optimizer_step(self, id: str, model: Model, payload: Any) -> Any:
        adam = payload["adam_params"]
        norm = math.sqrt(sum(g * g for row in model.gradient for g in row))
        clip = adam["grad_clip_norm"]
        scale = min(1.0, clip / norm) if clip and norm else 1.0
        model.steps += 1
        self.applied["optim_step"] += 1
        first, second = model.moments["m"], model.moments["v"]
        for i in range(VOCABULARY):
            for j in range(VOCABULARY):
                g = model.gradient[i][j] * scale
                first[i][j] = adam["beta1"] * first[i][j] + (1 - adam["beta1"]) * g
                second[i][j] = adam["beta2"] * second[i][j] + (1 - adam["beta2"]) * g * g
                m = first[i][j] / (1 - adam["beta1"] ** model.steps)
                v = second[i][j] / (1 - adam["beta2"] ** model.steps)
                model.table[i][j] *= 1 - adam["learning_rate"] * adam["weight_decay"]
                model.table[i][j] -= adam["learning_rate"] * m / (math.sqrt(v) + adam["eps"])
        model.gradient = zeros()
        return {"metrics": {"grad_norm": norm}}

    def _export(self, id: str, model: Model, payload: Any) -> Any:
        self.applied["export"] += 1
        path = f"weaver://{id}/checkpoints/{payload.get('path') or self._id('export')}"
        self.saved[path] = copy.deepcopy(model)
        return {"ModelPath": path}

    def save(self, id: str, body: Any, **_: Any) -> Any:
        self.applied["save"] += 1
        path = f"weaver://{id}/checkpoints/{body['name']}"
        self.saved[path] = copy.deepcopy(self._model(id))
        return 202, self._operation({"id": self._id("ckpt"), "path": path, **body})

    def checkpoints(self, id: str, **_: Any) -> Any:
        return {"items": [{"id": path, "path": path} for path in reversed(self.saved)]}

    def expire(self, body: Any, **_: Any) -> Any:
        if self.saved.pop(body["path"], None) is None:
            raise Refused(404, "not_found", f"no checkpoint {body['path']}")
        self.expired.append(body["path"])
        return {}

    def load(self, id: str, body: Any, **_: Any) -> Any:
        if body["path"] not in self.saved:
            raise Refused(404, "not_found", f"no checkpoint {body['path']}")
        model, saved = self._model(id), copy.deepcopy(self.saved[body["path"]])
        model.table = saved.table
        if body["include_optimizer"]:
            model.moments, model.steps = saved.moments, saved.steps
        self.applied["load"] += 1
        return 202, self._operation({})

    # Sampling

    async def sample(self, id: str, body: Any, **_: Any) -> Any:
        if id not in self.samplers:
            raise Refused(404, "not_found", f"no sampling session {id}")
        table = self.samplers[id]
        if self.hold_samples is not None:
            self.hanging.set()
            await self.hold_samples.wait()
        params = body["sampling_params"]
        prompt = [t for chunk in body["prompt"]["chunks"] for t in chunk["tokens"]]
        found = []
        for n in range(body["num_samples"]):
            draw = random.Random(f"{params.get('seed')} {n}")
            tokens: list[int] = []
            logprobs: list[float] = []
            reason = "length"
            while len(tokens) < params["max_tokens"] and not (self.empty_samples and n == 0):
                scored = log_softmax(table[(tokens or prompt)[-1]])
                tokens += draw.choices(range(VOCABULARY), [math.exp(lp) for lp in scored])
                logprobs.append(scored[tokens[-1]])
                if tokens[-1] in params.get("stop_token_ids", ()):
                    reason = "stop"
                    break
            text = "".join(map(str, tokens))
            found.append(
                {"tokens": tokens, "logprobs": logprobs, "text": text, "stop_reason": reason}
            )
        return 202, self._operation({"result": {"sequences": found}})

    def logprobs(self, id: str, body: Any, **_: Any) -> Any:
        table = self.samplers[id]
        tokens = [t for chunk in body["prompt"]["chunks"] for t in chunk["tokens"]]
        scored = [log_softmax(table[a])[b] for a, b in itertools.pairwise(tokens)]
        return 202, self._operation({"result": {"prompt_logprobs": [None, *scored]}})


@asynccontextmanager
async def serve(app: Any) -> AsyncIterator[str]:
    """The application on loopback; its URL."""
    # asyncio turns Nagle's algorithm off for sockets that name TCP: 40 ms a reply otherwise.
    listener = socket.socket(proto=socket.IPPROTO_TCP)
    listener.bind(("127.0.0.1", 0))
    config = uvicorn.Config(app, log_level="critical", lifespan="off", ws="none")
    config.load()
    server = uvicorn.Server(config)
    server.lifespan = config.lifespan_class(config)
    await server.startup(sockets=[listener])
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        for connection in list(server.server_state.connections):
            connection.transport.abort()  # the tests' clients have left; a hanging call has not
        for listening in server.servers:
            listening.close()
            await listening.wait_closed()
        listener.close()
