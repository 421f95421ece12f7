"""The Tinker protocol: remote calls by name, polled futures, protobuf or JSON.

- A model's training requests run in the order of their `seq_id`, 1, 2, 3, ...; a request that is
  sent again gets the job that it started first.
- Losses are sums over tokens, with the protocol's names and settings; its clip thresholds are
  bounds of the ratio, ours are distances from 1.
- `lora_config.rank: 0` trains the full weights: an extension, since the protocol has only LoRA.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrain.protocols.tinker import messages
from retrain.protocols.tinker.messages import PROTOBUF
from retrain.protocols.tinker.values import ForwardBackward, ForwardBackwardOutput, SampleResult
from retrain.service import bodies
from retrain.service import tinker_wire as wire
from retrain.service.core import Service
from retrain.service.errors import invalid
from retrain.service.jobs import Job, Work
from retrain.service.state import Model, Session
from retrain.service.store import Place
from retrain.service.trainer import Tuning
from retrain.service.validation import TINKER_LOSSES, known_loss, training_rows
from retrain.service.web import Handler, Json, decoded, json_object, read_body, want

_UNSUPPORTED = (
    "topk_prompt_logprobs",
    "topk_sample_logprobs",
    "prompt_alt_tokens_k",
    "target_prompt_logprobs",
    "record_stability_info",
    "prompt_logprobs_last_n",
)
"""Options of a sample request."""
JsonCall = Callable[[Json, bytes], Awaitable[Json]]
"""From the body, as a JSON object and as bytes, to the reply."""


class TinkerProtocol:
    """The routes of the protocol over a `Service`."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._calls = {
            "client/config": self._config,
            "client/dynamic_config": self._config,
            "create_session": self._create_session,
            "session_heartbeat": self._heartbeat,
            "create_model": self._create_model,
            "load_weights": self._load_weights,
            "get_info": self._get_info,
            "optim_step": self._optim_step,
            "save_weights": self._save_weights,
            "save_weights_for_sampler": self._save_for_sampler,
            "create_sampling_session": self._create_sampling_session,
            "asample": self._sample,
            "cancel_future": self._cancel_future,
            "unload_model": self._unload_model,
            "weights_info": self._weights_info,
            "telemetry": self._telemetry,
        }

    def routes(self) -> list[Route]:
        runs = "/api/v1/training_runs"
        one = f"{runs}/{{model_id}}/checkpoints/{{kind}}/{{name}}"
        return [
            Route("/api/v1/healthz", self._health),
            Route("/api/v1/get_server_capabilities", self._capabilities),
            *(
                Route(f"/api/v1/{name}", self._json_call(call), methods=["POST"])
                for name, call in self._calls.items()
            ),
            Route("/api/v1/forward_backward", self._forward_backward, methods=["POST"]),
            Route("/api/v1/forward", self._forward, methods=["POST"]),
            Route("/api/v1/retrieve_future", self._retrieve, methods=["POST"]),
            Route("/api/v1/sessions/{session_id}/finish", self._finish, methods=["POST"]),
            Route("/api/v1/samplers/{sampler_id}", self._sampler_info),
            Route(runs, self._training_runs),
            Route(f"{runs}/{{model_id}}", self._training_run),
            Route(f"{runs}/{{model_id}}/checkpoints", self._checkpoints),
            Route("/api/v1/checkpoints", self._checkpoints),
            Route(one, self._delete_checkpoint, methods=["DELETE"]),
            Route(f"{one}/ttl", self._set_ttl, methods=["PUT"]),
        ]

    def _json_call(self, call: JsonCall) -> Handler:
        async def endpoint(request: Request) -> Response:
            raw = await read_body(request, self._service.settings.max_body)
            return JSONResponse(await call(await decoded(json_object, raw), raw))

        return endpoint

    # The service and its sessions

    async def _health(self, _: Request) -> Response:
        return JSONResponse({"status": "ok"})

    async def _capabilities(self, _: Request) -> Response:
        service = self._service
        model = {
            "model_name": service.settings.model,
            "max_context_length": service.limits.context,
            "trainable": True,
            "sampleable": True,
        }
        return JSONResponse({"supported_models": [model]})

    async def _config(self, _body: Json, _raw: bytes) -> Json:
        return {}  # every flag has the client's default

    async def _telemetry(self, _body: Json, _raw: bytes) -> Json:
        return {"status": "accepted"}  # not kept

    async def _create_session(self, _body: Json, _raw: bytes) -> Json:
        return {"session_id": self._service.create_session().id, "type": "create_session"}

    async def _heartbeat(self, body: Json, _raw: bytes) -> Json:
        self._service.session(want(body, "session_id", str))
        return {"type": "session_heartbeat"}

    async def _finish(self, request: Request) -> Response:
        self._service.finish(self._service.session(request.path_params["session_id"]))
        return JSONResponse({})

    # Models

    async def _create_model(self, body: Json, raw: bytes) -> Json:
        session = self._service.session(want(body, "session_id", str))
        self._service.check_base(want(body, "base_model", str))
        wire.check_optimizer(body)
        tuning = bodies.tuning(want(body, "lora_config", dict, {}), min_rank=0)
        return self._make_model(session, body, raw, tuning, None)

    async def _load_weights(self, body: Json, raw: bytes) -> Json:
        place = wire.place_of(want(body, "path", str), "weights")
        optimizer = want(body, "optimizer", bool)
        saved = await self._service.checkpoint(place, optimizer=optimizer)
        if body.get("session_id") is not None:
            session = self._service.session(want(body, "session_id", str))
            return self._make_model(session, body, raw, saved.tuning, (place, optimizer))
        model, seq_id = self._addressed(body)
        if seq_id != 1:
            raise invalid(
                f"LoadWeights is not permitted with seq_id {seq_id}, only as a model's first "
                "request; make a new model from the checkpoint"
            )

        async def work() -> Json:
            await self._service.load(model, place, optimizer=optimizer)
            return {"path": body["path"], "model_id": model.id, "type": "load_weights"}

        return self._numbered(model, seq_id, raw, Job("LoadWeights"), work)

    def _make_model(
        self,
        session: Session,
        body: Json,
        raw: bytes,
        tuning: Tuning,
        source: tuple[Place, bool] | None,
    ) -> Json:
        seq_id = want(body, "model_seq_id", int)
        metadata = want(body, "user_metadata", dict, {})
        model_id = f"{session.id}:train:{seq_id}"

        async def work() -> Json:
            await self._service.build_model(self._service.models[model_id], source)
            return {"model_id": model_id, "path": body.get("path")}

        job = Job("CreateModel" if source is None else "LoadWeights")
        submitted = session.models.submit(seq_id, raw, job, work, ordered=False)
        if submitted is job:
            self._service.add_model(session, model_id, tuning, metadata)
        return {"request_id": submitted.id, "model_id": model_id}

    async def _get_info(self, body: Json, _raw: bytes) -> Json:
        model = self._service.model(want(body, "model_id", str))
        name = self._service.settings.model
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {"model_name": name, "tokenizer_id": self._service.model_folder},
            "model_name": name,
            "is_lora": model.tuning.rank > 0,
            "lora_rank": model.tuning.rank,
        }

    async def _unload_model(self, body: Json, _raw: bytes) -> Json:
        model = self._service.model(want(body, "model_id", str))

        async def work() -> Json:
            await self._service.retire(model)
            return {"model_id": model.id, "type": "unload_model"}

        return wire.future(self._service.jobs.start(Job("UnloadModel"), work))

    # Training

    async def _forward_backward(self, request: Request) -> Response:
        raw = await read_body(request, self._service.settings.max_body)
        if request.headers.get("content-type", "").startswith(PROTOBUF):
            call = await decoded(messages.decode_request, raw)
        else:
            call = await decoded(wire.forward_backward_request, raw)
        return JSONResponse(await self._pass(call, raw))

    async def _forward(self, request: Request) -> Response:
        raw = await read_body(request, self._service.settings.max_body)
        return JSONResponse(await self._pass(await decoded(wire.forward_request, raw), raw))

    async def _pass(self, call: ForwardBackward, raw: bytes) -> Json:
        service = self._service
        model = service.model(call.model_id)
        config = wire.loss_config(call.loss, call.config)
        expected = known_loss(call.loss, TINKER_LOSSES)
        rows = await asyncio.to_thread(training_rows, call.data, expected, service.limits)

        async def work() -> ForwardBackwardOutput:
            backward = not call.forward_only
            found = await service.run_pass(model, rows, call.loss, config, backward=backward)
            return wire.output(found)

        kind = "Forward" if call.forward_only else "ForwardBackward"
        job = Job(kind, size=sum(len(row.tokens) for row in rows))
        return self._numbered(model, call.seq_id, raw, job, work)

    async def _optim_step(self, body: Json, raw: bytes) -> Json:
        model, seq_id = self._addressed(body)
        if "adam_params" not in body:
            raise invalid("adam_params is missing: AdamW is the only optimizer")
        adam = bodies.adam_params(want(body, "adam_params", dict))

        async def work() -> Json:
            return {"metrics": await self._service.optim_step(model, adam), "type": "optim_step"}

        return self._numbered(model, seq_id, raw, Job("OptimStep"), work)

    # Checkpoints

    async def _save_weights(self, body: Json, raw: bytes) -> Json:
        model, seq_id = self._addressed(body)
        place = Place(model.id, "weights", want(body, "path", str))
        self._service.store.check(place)
        keep = wire.save_options(body)
        overwrite = want(body, "overwrite", bool, False)

        async def work() -> Json:
            await self._service.save(model, place, optimizer=True, overwrite=overwrite, **keep)
            return {"path": wire.path_of(place), "type": "save_weights"}

        return self._numbered(model, seq_id, raw, Job("SaveWeights"), work)

    async def _save_for_sampler(self, body: Json, raw: bytes) -> Json:
        model, seq_id = self._addressed(body)
        if want(body, "kind", str, "snapshot") != "snapshot":
            raise invalid("kind: only 'snapshot' is supported")
        name = want(body, "path", str, None)
        keep = wire.save_options(body)
        if name is None:
            return self._save_for_session(model, seq_id, body, raw)
        place = Place(model.id, "sampler_weights", name)
        self._service.store.check(place)

        async def work() -> Json:
            await self._service.save(model, place, **keep)
            return {"path": wire.path_of(place), "type": "save_weights_for_sampler"}

        return self._numbered(model, seq_id, raw, Job("SaveWeightsForSampler"), work)

    def _save_for_session(self, model: Model, seq_id: int, body: Json, raw: bytes) -> Json:
        """An unnamed snapshot of one sampling session."""
        number = want(body, "sampling_session_seq_id", int)
        sampler_id = f"{model.session.id}:sample:{number}"
        place = Place(model.id, "sampler_weights", f"session-{uuid.uuid4().hex}")

        async def work() -> Json:
            await self._service.save(model, place, listed=False)
            self._service.add_sampler(model.session, sampler_id, place)
            return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

        return self._numbered(model, seq_id, raw, Job("SaveWeightsForSampler"), work)

    async def _weights_info(self, body: Json, _raw: bytes) -> Json:
        place = wire.place_of(want(body, "tinker_path", str))
        saved = await asyncio.to_thread(self._service.store.find, place)
        return {
            "base_model": saved.base_model,
            "is_lora": saved.tuning.rank > 0,
            "lora_rank": saved.tuning.rank,
            "train_unembed": saved.tuning.unembed,
            "train_mlp": saved.tuning.mlp,
            "train_attn": saved.tuning.attention,
        }

    async def _checkpoints(self, request: Request) -> Response:
        model_id = request.path_params.get("model_id")
        found = await asyncio.to_thread(self._service.store.list, model_id)
        return wire.page(request, "checkpoints", found, wire.checkpoint)

    async def _delete_checkpoint(self, request: Request) -> Response:
        await asyncio.to_thread(self._service.store.delete, wire.place_in_url(request))
        return Response(status_code=204)

    async def _set_ttl(self, request: Request) -> Response:
        raw = await read_body(request, self._service.settings.max_body)
        seconds = bodies.ttl(await decoded(json_object, raw))
        await asyncio.to_thread(self._service.store.expire_at, wire.place_in_url(request), seconds)
        return JSONResponse({})

    async def _training_runs(self, request: Request) -> Response:
        models = list(self._service.models.values())
        return wire.page(request, "training_runs", models, self._run)

    async def _training_run(self, request: Request) -> Response:
        return JSONResponse(self._run(self._service.model(request.path_params["model_id"])))

    def _run(self, model: Model) -> Json:
        return {
            "training_run_id": model.id,
            "base_model": self._service.settings.model,
            "model_owner": "local",
            "is_lora": model.tuning.rank > 0,
            "lora_rank": model.tuning.rank,
            "corrupted": False,
            "last_request_time": bodies.iso(model.created_at),
            "user_metadata": dict(model.metadata) or None,
        }

    # Sampling

    async def _create_sampling_session(self, body: Json, _raw: bytes) -> Json:
        session = self._service.session(want(body, "session_id", str))
        number = want(body, "sampling_session_seq_id", int)
        path, base = bodies.weights_to_sample(body)
        if base is not None:
            self._service.check_base(base)
        place = None if path is None else wire.place_of(path, "sampler_weights")
        sampler_id = f"{session.id}:sample:{number}"
        made = self._service.open_sampler(session, sampler_id, place, path)
        return {"sampling_session_id": made.id, "type": "create_sampling_session"}

    async def _sampler_info(self, request: Request) -> Response:
        sampler = self._service.sampler(request.path_params["sampler_id"])
        return JSONResponse(
            {
                "sampler_id": sampler.id,
                "base_model": self._service.settings.model,
                "model_path": sampler.path,
            }
        )

    async def _sample(self, body: Json, raw: bytes) -> Json:
        sampler = self._service.sampler(want(body, "sampling_session_id", str))
        bodies.check_unsupported(body, _UNSUPPORTED)
        prompt = bodies.prompt_of(body, self._service.limits)
        params = wire.sampling_params(body, prompt, self._service.limits)
        count = want(body, "num_samples", int, 1)
        with_prompt = want(body, "prompt_logprobs", bool, False)

        async def work() -> SampleResult:
            completions = await self._service.sample(sampler, prompt, params, count)
            scored = await self._service.logprobs(sampler, prompt) if with_prompt else None
            return wire.sampled(completions, scored)

        job = Job("Sample", size=len(prompt) + count)
        job.facts["sample_sequence_ids"] = [f"{job.id}:{i}" for i in range(count)]
        seq_id = want(body, "seq_id", int)
        return wire.future(sampler.lane.submit(seq_id, raw, job, work, ordered=False))

    # Futures

    async def _retrieve(self, request: Request) -> Response:
        raw = await read_body(request, self._service.settings.max_body)
        job = self._service.jobs.get(want(await decoded(json_object, raw), "request_id", str))
        if not await job.wait(self._service.settings.long_poll):
            return JSONResponse(wire.try_again(job))
        if job.error is not None:
            category = "user" if job.error.status < 500 else "server"
            return JSONResponse({"error": str(job.error), "category": category})
        if isinstance(job.result, (ForwardBackwardOutput, SampleResult)):
            return wire.result(job.result, PROTOBUF in request.headers.get("accept", ""))
        return JSONResponse(job.result)

    async def _cancel_future(self, body: Json, _raw: bytes) -> Json:
        job = self._service.jobs.get(want(body, "request_id", str))
        if job.kind != "Sample":
            raise invalid("only sampling requests can be cancelled")
        self._service.jobs.cancel(job)
        return {}

    # Addressing

    def _addressed(self, body: Json) -> tuple[Model, int]:
        return self._service.model(want(body, "model_id", str)), want(body, "seq_id", int)

    def _numbered(self, model: Model, seq_id: int, raw: bytes, job: Job, work: Work) -> Json:
        if seq_id < 1:
            raise invalid(f"seq_id: got {seq_id}, expected 1 or more")
        submitted = model.lane.submit(seq_id, raw, job, work, ordered=True)
        return {**wire.future(submitted), "model_id": model.id}
