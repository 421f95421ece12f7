"""The Weaver protocol: REST resources, and operations that are polled.

- A model's training requests run in the order of arrival: its clients send one after the other and
  may skip a `seq_id`. A number that is sent again gets the operation that it started first.
- Losses are sums over tokens. A request for an operation waits a few seconds for its end, so that
  a thousand samples in flight don't cause a storm of polls.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrain.service import bodies
from retrain.service import weaver_wire as wire
from retrain.service.core import Service
from retrain.service.errors import invalid
from retrain.service.jobs import Job, Work
from retrain.service.state import Model, SamplingSession
from retrain.service.store import Place
from retrain.service.web import Handler, Json, decoded, json_object, read_body, want

LONGEST_LOOK = 5.0
"""Seconds that a poll of an operation may wait; clients time out after 60."""
_UNSUPPORTED = (
    "topk_prompt_logprobs",
    "return_sampling_mask",
    "return_moe_topk_indices",
    "score_centering",
)
"""Options of a sample request."""
JsonCall = Callable[[Request, Json, bytes], Awaitable[Response]]


class WeaverProtocol:
    """The routes of the protocol over a `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def routes(self) -> list[Route]:
        model, sampler = "models/{model_id}", "sampling-sessions/{sampler_id}"
        return [
            self._post("sessions", self._create_session),
            self._get("sessions/{session_id}", self._get_session),
            self._post("sessions/{session_id}/heartbeat", self._heartbeat),
            self._post("sessions/{session_id}/metrics", self._metrics),
            self._post("sessions/{session_id}/models", self._create_model),
            self._post("sessions/{session_id}/sampling-sessions", self._create_sampler),
            self._get("supported-models", self._supported_models),
            self._get("operations/{job_id}", self._get_operation),
            self._get(model, self._get_model),
            self._post(f"{model}/terminate", self._terminate),
            self._post(f"{model}/forward-backward-passes", self._forward_backward),
            self._post(f"{model}/forward-passes", self._forward),
            self._post(f"{model}/optimizer-steps", self._optimizer_step),
            self._post(f"{model}/export-sampler", self._export_sampler),
            self._post(f"{model}/checkpoints", self._save),
            self._get(f"{model}/checkpoints", self._list_checkpoints),
            self._post(f"{model}/checkpoints/ttl", self._set_ttl, "PATCH"),
            self._post(f"{model}/load", self._load),
            self._get(sampler, self._get_sampler),
            Route(f"/api/v1/{sampler}", self._delete_sampler, methods=["DELETE"]),
            self._post(f"{sampler}/samples", self._sample),
            self._post(f"{sampler}/logprobs", self._logprobs),
        ]

    def _get(self, path: str, handler: Handler) -> Route:
        return Route(f"/api/v1/{path}", handler)

    def _post(self, path: str, call: JsonCall, method: str = "POST") -> Route:
        async def endpoint(request: Request) -> Response:
            raw = await read_body(request, self._service.settings.max_body)
            return await call(request, await decoded(json_object, raw), raw)

        return Route(f"/api/v1/{path}", endpoint, methods=[method])

    # Sessions

    async def _create_session(self, _: Request, body: Json, _raw: bytes) -> Response:
        session = self._service.create_session()
        given = {key: body[key] for key in ("tags", "user_metadata", "sdk_version") if key in body}
        policy = {k: body[k] for k in ("scheduling_policy",) if body.get(k) is not None}
        return JSONResponse({"id": session.id, **given, **policy}, status_code=201)

    async def _get_session(self, request: Request) -> Response:
        return JSONResponse({"id": self._service.session(request.path_params["session_id"]).id})

    async def _heartbeat(self, request: Request, _body: Json, _raw: bytes) -> Response:
        self._service.session(request.path_params["session_id"])
        return Response(status_code=204)

    async def _metrics(self, request: Request, _body: Json, _raw: bytes) -> Response:
        self._service.session(request.path_params["session_id"])
        return JSONResponse({})  # not kept: a run keeps its own metrics

    async def _supported_models(self, _: Request) -> Response:
        tokenizer = {"tokenizer": {"path": self._service.model_folder}}
        item = {
            "name": self._service.settings.model,
            "status": "available",
            "config": {"resource": tokenizer},
        }
        return JSONResponse({"items": [item], "pagination": {"total_count": 1}})

    async def _get_operation(self, request: Request) -> Response:
        job = self._service.jobs.get(request.path_params["job_id"])
        await job.wait(min(LONGEST_LOOK, self._service.settings.long_poll))
        return JSONResponse(wire.operation(job))

    # Models

    async def _create_model(self, request: Request, body: Json, raw: bytes) -> Response:
        session = self._service.session(request.path_params["session_id"])
        self._service.check_base(want(body, "base_model", str))
        tuning, number = wire.tuning(body), want(body, "model_seq_id", int)
        model_id = str(uuid.uuid5(uuid.UUID(session.id), f"model {number}"))

        async def work() -> None:
            await self._service.build_model(self._service.models[model_id])

        metadata, job = want(body, "user_metadata", dict, {}), Job("create_model")
        if session.models.submit(number, raw, job, work, ordered=False) is job:
            self._service.add_model(session, model_id, tuning, metadata)
        return JSONResponse(self._shown(model_id, tuning.rank), status_code=201)

    async def _get_model(self, request: Request) -> Response:
        model = self._model(request)
        return JSONResponse(self._shown(model.id, model.tuning.rank))

    def _shown(self, model_id: str, rank: int) -> dict[str, Any]:
        return {
            "id": model_id,
            "base_model": self._service.settings.model,
            "tokenizer_path": self._service.model_folder,
            "training_mode": "lora" if rank else "full_ft",
        }

    async def _terminate(self, request: Request, _body: Json, _raw: bytes) -> Response:
        model = self._model(request)
        await self._service.retire(model)
        return JSONResponse({"id": model.id, "status": "stopped"})

    # Training

    async def _forward_backward(self, request: Request, body: Json, raw: bytes) -> Response:
        return await self._pass(request, body, raw, backward=True)

    async def _forward(self, request: Request, body: Json, raw: bytes) -> Response:
        return await self._pass(request, body, raw, backward=False)

    async def _pass(self, request: Request, body: Json, raw: bytes, *, backward: bool) -> Response:
        service, model = self._service, self._model(request)
        key = "forward_backward_input" if backward else "forward_input"
        call = await asyncio.to_thread(wire.training_call, body, model.id, key, service.limits)
        if backward and call.loss == "forward_logprob":
            raise invalid("forward_logprob has no gradient; use it with forward")
        plain = call.loss in ("surrogate", "forward_logprob")  # both are weights times log-probs
        loss = "cross_entropy" if plain else call.loss

        async def work() -> Json:
            found = await service.run_pass(model, call.rows, loss, {}, backward=backward)
            return wire.passed(found, call, model.id)

        kind = "forward_backward" if backward else "forward"
        job = Job(kind, size=sum(len(row.tokens) for row in call.rows))
        return self._numbered(model, call.seq_id, raw, job, work)

    async def _optimizer_step(self, request: Request, body: Json, raw: bytes) -> Response:
        model = self._model(request)
        seq_id, adam = wire.optimizer_call(body, model.id)

        async def work() -> Json:
            metrics = await self._service.optim_step(model, adam)
            return {"status": "success", "model_id": model.id, "metrics": metrics}

        return self._numbered(model, seq_id, raw, Job("optim_step"), work)

    # Checkpoints

    async def _export_sampler(self, request: Request, body: Json, raw: bytes) -> Response:
        model, seconds = self._model(request), bodies.ttl(body)
        name = want(body, "path", str, None) or f"sampler-{uuid.uuid4().hex}"
        place = self._new_place(model, "sampling", name)

        async def work() -> Json:
            await self._service.save(model, place, seconds=seconds)
            return {"model_path": wire.path_of(place)}

        seq_id = want(body, "seq_id", int)
        return self._numbered(model, seq_id, raw, Job("export_sampler"), work)

    async def _save(self, request: Request, body: Json, _raw: bytes) -> Response:
        model, seconds = self._model(request), bodies.ttl(body)
        kind = want(body, "type", str)
        if kind not in wire.SAVE_TYPES:
            raise invalid(f"type: got {kind!r}, expected one of {wire.SAVE_TYPES}")
        name = want(body, "name", str, None) or f"checkpoint-{uuid.uuid4().hex}"
        place, optimizer = self._new_place(model, kind, name), kind == "weight_and_optimizer"

        async def work() -> Json:
            saved = await self._service.save(model, place, optimizer=optimizer, seconds=seconds)
            return wire.checkpoint(saved)

        return _accepted(self._service.jobs.start(Job("checkpoint"), work))

    async def _load(self, request: Request, body: Json, _raw: bytes) -> Response:
        model = self._model(request)
        place = wire.place_of(want(body, "path", str))
        optimizer = want(body, "include_optimizer", bool)
        await self._service.checkpoint(place, optimizer=optimizer)

        async def work() -> Json:
            await self._service.load(model, place, optimizer=optimizer)
            return {"status": "success", "path": wire.path_of(place)}

        return _accepted(self._service.jobs.start(Job("load"), work))

    async def _list_checkpoints(self, request: Request) -> Response:
        model_id = request.path_params["model_id"]
        found = await asyncio.to_thread(self._service.store.list, model_id)
        return JSONResponse({"items": [wire.checkpoint(saved) for saved in found]})

    async def _set_ttl(self, request: Request, body: Json, _raw: bytes) -> Response:
        place = wire.place_of(want(body, "path", str))
        if place.model_id != request.path_params["model_id"]:
            raise invalid(f"path: got {body['path']!r}, which belongs to another model")
        store = self._service.store
        saved = await asyncio.to_thread(store.expire_at, place, bodies.ttl(body))
        return JSONResponse(wire.checkpoint(saved))

    def _new_place(self, model: Model, kind: str, name: str) -> Place:
        place = Place(model.id, "sampler_weights" if kind == "sampling" else "weights", name)
        self._service.store.check(place)
        return place

    # Sampling

    async def _create_sampler(self, request: Request, body: Json, _raw: bytes) -> Response:
        session = self._service.session(request.path_params["session_id"])
        path, base = bodies.weights_to_sample(body)
        if base is not None:
            self._service.check_base(base)
        place = None if path is None else wire.place_of(path)
        number = want(body, "sampling_session_seq_id", int)
        sampler_id = str(uuid.uuid5(uuid.UUID(session.id), f"sampler {number}"))
        made = self._service.open_sampler(session, sampler_id, place, path)
        return JSONResponse(self._described(made), status_code=201)

    async def _get_sampler(self, request: Request) -> Response:
        return JSONResponse(self._described(self._sampler(request)))

    def _described(self, sampler: SamplingSession) -> Json:
        return {
            "id": sampler.id,
            "base_model": self._service.settings.model,
            "model_path": sampler.path,
            "tokenizer_path": self._service.model_folder,
        }

    async def _delete_sampler(self, request: Request) -> Response:
        self._service.drop_sampler(self._sampler(request))
        return Response(status_code=204)

    async def _sample(self, request: Request, body: Json, _raw: bytes) -> Response:
        sampler = self._sampler(request)
        bodies.check_unsupported(body, _UNSUPPORTED)
        limits = self._service.limits
        prompt = bodies.prompt_of(body, limits)
        params = wire.sampling_params(body, prompt, limits)
        count = want(body, "num_samples", int, 1)
        with_prompt = want(body, "prompt_logprobs", bool, False)

        async def work() -> Json:
            completions = await self._service.sample(sampler, prompt, params, count)
            result = wire.sampled(completions, self._service.tokenizer)
            if with_prompt:
                result["prompt_logprobs"] = await self._service.logprobs(sampler, prompt)
            return {"result": result}

        return _accepted(self._service.jobs.start(Job("sample", size=len(prompt) + count), work))

    async def _logprobs(self, request: Request, body: Json, _raw: bytes) -> Response:
        sampler, prompt = self._sampler(request), bodies.prompt_of(body, self._service.limits)
        if want(want(body, "loss_fn_config", dict, {}), "temperature", float, 1.0) != 1:
            raise invalid("loss_fn_config.temperature: only 1 is supported for log-probs")

        async def work() -> Json:
            return {"result": {"prompt_logprobs": await self._service.logprobs(sampler, prompt)}}

        return _accepted(self._service.jobs.start(Job("logprobs", size=len(prompt)), work))

    # Addressing

    def _model(self, request: Request) -> Model:
        return self._service.model(request.path_params["model_id"])

    def _sampler(self, request: Request) -> SamplingSession:
        return self._service.sampler(request.path_params["sampler_id"])

    def _numbered(self, model: Model, seq_id: int, raw: bytes, job: Job, work: Work) -> Response:
        if seq_id < 1:
            raise invalid(f"seq_id: got {seq_id}, expected 1 or more")
        return _accepted(model.lane.submit(seq_id, raw, job, work, ordered=False))


def _accepted(job: Job) -> Response:
    return JSONResponse(wire.operation(job), status_code=202)
