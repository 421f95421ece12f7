"""The Weaver protocol: REST resources, and operations that are polled.

- A model's training requests run in the order of arrival: its clients send one after the other and
  may skip a `seq_id`. A number that is sent again gets the operation that it started first.
- Losses are sums over tokens. A request for an operation waits a few seconds for its end, so that
  a thousand samples in flight don't cause a storm of polls.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from functools import partial

from starlette.responses import JSONResponse, Response

from retrain.errors import shown
from retrain.service import training_fields
from retrain.service import weaver_wire as wire
from retrain.service.errors import invalid
from retrain.service.fields import Json, check_storable, ttl, want
from retrain.service.jobs import RequestJob
from retrain.service.protocol import Handler, ServiceCall, ServiceProtocol
from retrain.service.rows import prompt_of
from retrain.service.state import Model, SamplerSession, ServiceSession
from retrain.service.store import CheckpointPlace

LONGEST_LOOK = 5.0
"""Seconds that a poll of an operation may wait; clients time out after 60."""


class WeaverProtocol(ServiceProtocol):
    """The routes of the protocol over a `Service`."""

    ordered = False

    def table(self) -> Mapping[str, Handler | Json]:
        session, model = "sessions/{session_id}", "models/{model_id}"
        sampler = "sampling-sessions/{sampler_id}"
        return {
            "POST sessions": self._create_session,
            f"GET {session}": self._get_session,
            f"POST {session}/heartbeat": self._heartbeat,
            f"POST {session}/metrics": self._metrics,
            f"POST {session}/models": self._create_model,
            f"POST {session}/sampling-sessions": self._create_sampler,
            "GET supported-models": self._supported_models,
            "GET operations/{job_id}": self._get_operation,
            f"GET {model}": self._get_model,
            f"POST {model}/terminate": self._terminate,
            f"POST {model}/forward-backward-passes": partial(self._pass, backward=True),
            f"POST {model}/forward-passes": partial(self._pass, backward=False),
            f"POST {model}/optimizer-steps": self._optimizer_step,
            f"POST {model}/export-sampler": self._export_sampler,
            f"POST {model}/checkpoints": self._save,
            f"GET {model}/checkpoints": self._list_checkpoints,
            f"PATCH {model}/checkpoints/ttl": self._set_ttl,
            f"POST {model}/load": self._load,
            f"GET {sampler}": self._get_sampler,
            f"DELETE {sampler}": self._delete_sampler,
            f"POST {sampler}/samples": self._sample,
            f"POST {sampler}/logprobs": self._logprobs,
        }

    def started(self, job: RequestJob) -> Response:
        return JSONResponse(wire.operation(job), status_code=202)

    def id_of(self, session: ServiceSession, kind: str, number: int) -> str:
        return str(uuid.uuid5(uuid.UUID(session.id), f"{kind} {number}"))

    place_of = staticmethod(wire.place_of)

    # Sessions

    async def _create_session(self, call: ServiceCall) -> Response:
        known = ("tags", "user_metadata", "sdk_version", "scheduling_policy")
        echo = {name: call.body[name] for name in known if call.body.get(name) is not None}
        check_storable("the session", echo)
        session = self._service.create_session()
        return JSONResponse({"id": session.id, **echo}, status_code=201)

    async def _get_session(self, call: ServiceCall) -> Json:
        return {"id": self._session(call).id}

    async def _heartbeat(self, call: ServiceCall) -> None:
        self._session(call)

    async def _metrics(self, call: ServiceCall) -> Json:
        self._session(call)
        return {}  # not kept: a run keeps its own metrics

    async def _supported_models(self, _: ServiceCall) -> Json:
        tokenizer = {"tokenizer": {"path": self._service.model_folder}}
        item = {
            "name": self._service.settings.model,
            "status": "available",
            "config": {"resource": tokenizer},
        }
        return {"items": [item], "pagination": {"total_count": 1}}

    async def _get_operation(self, call: ServiceCall) -> Json:
        job = self.job(call["job_id"])
        await job.wait(min(LONGEST_LOOK, self._service.settings.long_poll))
        return wire.operation(job)

    # Models

    async def _create_model(self, call: ServiceCall) -> Response:
        session = self._session(call)
        self._service.check_base(want(call.body, "base_model", str))
        tuning = wire.tuning(call.body)
        job = self.create_model(call, session, tuning, "create_model")
        return JSONResponse(self._shown(job.facts["model_id"], tuning.rank), status_code=201)

    async def _get_model(self, call: ServiceCall) -> Json:
        model = self._model(call)
        return self._shown(model.id, model.tuning.rank)

    def _shown(self, model_id: str, rank: int) -> Json:
        return {
            "id": model_id,
            "base_model": self._service.settings.model,
            "tokenizer_path": self._service.model_folder,
            "training_mode": "lora" if rank else "full_ft",
        }

    async def _terminate(self, call: ServiceCall) -> Json:
        model = self._model(call)
        await self._service.retire(model)
        return {"id": model.id, "status": "stopped"}

    # Training

    async def _pass(self, call: ServiceCall, *, backward: bool) -> RequestJob:
        model = self._model(call)
        payload = wire.payload_of(call.body, model.id)
        key = "forward_backward_input" if backward else "forward_input"
        given = await asyncio.to_thread(wire.training_call, payload, key, self._service.limits)
        loss, config, rows, datum_ids = given
        job = RequestJob(
            "forward_backward" if backward else "forward",
            size=sum(len(row.targets) for row in rows),
            show=lambda found: wire.passed(found, datum_ids, model.id),
        )
        work = partial(self._service.run_pass, model, rows, loss, config, backward=backward)
        return self.numbered(call, model, want(payload, "seq_id", int), job, work)

    async def _optimizer_step(self, call: ServiceCall) -> RequestJob:
        model = self._model(call)
        payload = wire.payload_of(call.body, model.id)
        result = {"status": "success", "model_id": model.id}
        job = RequestJob("optim_step", show=lambda metrics: {**result, "metrics": metrics})
        work = partial(self._service.optim_step, model, training_fields.adam_params(payload))
        return self.numbered(call, model, want(payload, "seq_id", int), job, work)

    # Checkpoints

    async def _export_sampler(self, call: ServiceCall) -> RequestJob:
        model, seconds = self._model(call), ttl(call.body)
        name = want(call.body, "path", str, None) or f"sampler-{uuid.uuid4().hex}"
        place = self._new_place(model, "sampling", name)
        job = RequestJob("export_sampler", show=lambda _: {"model_path": wire.path_of(place)})
        work = partial(self._service.save, model, place, seconds=seconds)
        return self.numbered(call, model, want(call.body, "seq_id", int), job, work)

    async def _save(self, call: ServiceCall) -> RequestJob:
        model, seconds = self._model(call), ttl(call.body)
        kind = want(call.body, "type", str)
        if kind not in wire.SAVE_TYPES:
            raise invalid(f"type: got {shown(kind)}, expected one of {wire.SAVE_TYPES}")
        name = want(call.body, "name", str, None) or f"checkpoint-{uuid.uuid4().hex}"
        place, optimizer = self._new_place(model, kind, name), kind == "weight_and_optimizer"
        work = partial(self._service.save, model, place, optimizer=optimizer, seconds=seconds)
        return self._service.jobs.start(RequestJob("checkpoint", show=wire.checkpoint), work)

    async def _load(self, call: ServiceCall) -> RequestJob:
        model = self._model(call)
        place = self.place_of(want(call.body, "path", str))
        optimizer = want(call.body, "include_optimizer", bool)
        await self._service.checkpoint(place, optimizer=optimizer)
        job = RequestJob("load", show=lambda _: {"status": "success", "path": wire.path_of(place)})
        work = partial(self._service.load, model, place, optimizer=optimizer)
        return self._service.jobs.start(job, work)

    async def _list_checkpoints(self, call: ServiceCall) -> Json:
        found = await asyncio.to_thread(self._service.store.list, call["model_id"])
        return {"items": list(map(wire.checkpoint, found))}

    async def _set_ttl(self, call: ServiceCall) -> Json:
        place = self.place_of(want(call.body, "path", str))
        if place.model_id != call["model_id"]:
            raise invalid(f"path: got {shown(call.body['path'])}, which belongs to another model")
        store, seconds = self._service.store, ttl(call.body)
        return wire.checkpoint(await asyncio.to_thread(store.expire_at, place, seconds))

    def _new_place(self, model: Model, kind: str, name: str) -> CheckpointPlace:
        place = CheckpointPlace(
            model.id, "sampler_weights" if kind == "sampling" else "weights", name
        )
        self._service.store.check(place)
        return place

    # Sampling

    async def _create_sampler(self, call: ServiceCall) -> Response:
        made = self.open_sampler(call, self._session(call))
        return JSONResponse(self._described(made), status_code=201)

    async def _get_sampler(self, call: ServiceCall) -> Json:
        return self._described(self._sampler(call))

    def _described(self, sampler: SamplerSession) -> Json:
        return {
            "id": sampler.id,
            "base_model": self._service.settings.model,
            "model_path": sampler.path,
            "tokenizer_path": self._service.model_folder,
        }

    async def _delete_sampler(self, call: ServiceCall) -> None:
        await self._service.drop_samplers([self._sampler(call)])

    async def _sample(self, call: ServiceCall) -> RequestJob:
        job = RequestJob("sample")
        work, request = self.sampling(call, self._sampler(call), job)
        job.show = lambda found: wire.sampled(found, request, self._service.tokenizer)
        return self._service.jobs.start(job, work)

    async def _logprobs(self, call: ServiceCall) -> RequestJob:
        sampler, prompt = self._sampler(call), prompt_of(call.body, self._service.limits)
        if want(want(call.body, "loss_fn_config", dict, {}), "temperature", float, 1.0) != 1:
            raise invalid("loss_fn_config.temperature: only 1 is supported for log-probs")
        job = RequestJob(
            "logprobs",
            size=len(prompt),
            show=lambda scores: {"result": {"prompt_logprobs": scores}},
        )
        return self._service.jobs.start(job, partial(self._service.logprobs, sampler, prompt))

    # Addressing

    def _session(self, call: ServiceCall) -> ServiceSession:
        return self._service.session(call["session_id"])

    def _model(self, call: ServiceCall) -> Model:
        return self._service.model(call["model_id"])

    def _sampler(self, call: ServiceCall) -> SamplerSession:
        return self._service.sampler(call["sampler_id"])
