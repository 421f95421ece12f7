"""The Tinker protocol: remote calls by name, polled futures, protobuf or JSON.

- A model's training requests run in the order of their `seq_id`, 1, 2, 3, ...; a request that is
  sent again gets the job that it started first. After a rejected request the next number runs at
  once.
- Losses are sums over tokens, with the protocol's names and settings; its clip thresholds are
  bounds of the ratio, ours are distances from 1.
- `lora_config.rank: 0` trains the full weights: an extension, since the protocol has only LoRA.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Mapping
from functools import partial

from starlette.responses import JSONResponse, Response

from retrain.errors import shown
from retrain.service import tinker_wire as wire
from retrain.service import training_fields
from retrain.service.errors import ServiceError, invalid
from retrain.service.fields import INT64, Json, integer, iso, metadata, ttl, want
from retrain.service.jobs import RequestJob
from retrain.service.json_bodies import check_counts
from retrain.service.passes import TargetRow
from retrain.service.protocol import Handler, ServiceCall, ServiceProtocol, decoded
from retrain.service.rows import training_rows
from retrain.service.state import Model, ServiceSession
from retrain.service.store import CheckpointPlace, Kind
from retrain.wire.tinker import messages, scanning
from retrain.wire.tinker.messages import PROTOBUF
from retrain.wire.tinker.values import ForwardBackward, ForwardBackwardOutput, SampleResult

FIELDS = 2**18
"""Fields of a protobuf request, in all its messages: a datum has about 40."""


class TinkerProtocol(ServiceProtocol):
    """The routes of the protocol over a `Service`."""

    ordered = True

    def table(self) -> Mapping[str, Handler | Json]:
        run = "training_runs/{model_id}"
        one = f"{run}/checkpoints/{{kind}}/{{name}}"
        return {
            "GET healthz": {"status": "ok"},
            "GET get_server_capabilities": self._capabilities,
            "POST client/config": {},  # every flag has the client's default
            "POST client/dynamic_config": {},
            "POST telemetry": {"status": "accepted"},  # not kept
            "POST create_session": self._create_session,
            "POST session_heartbeat": self._heartbeat,
            "POST sessions/{session_id}/finish": self._finish,
            "POST create_model": self._create_model,
            "POST load_weights": self._load_weights,
            "POST get_info": self._get_info,
            "POST unload_model": self._unload_model,
            "POST forward_backward": partial(self._pass, forward_only=False),
            "POST forward": partial(self._pass, forward_only=True),
            "POST optim_step": self._optim_step,
            "POST save_weights": self._save_weights,
            "POST save_weights_for_sampler": self._save_for_sampler,
            "POST weights_info": self._weights_info,
            "POST create_sampling_session": self._create_sampling_session,
            "GET samplers/{sampler_id}": self._sampler_info,
            "POST asample": self._sample,
            "POST retrieve_future": self._retrieve,
            "POST cancel_future": self._cancel_future,
            "GET training_runs": self._training_runs,
            f"GET {run}": self._training_run,
            f"GET {run}/checkpoints": self._checkpoints,
            "GET checkpoints": self._checkpoints,
            f"DELETE {one}": self._delete_checkpoint,
            f"PUT {one}/ttl": self._set_ttl,
        }

    def started(self, job: RequestJob) -> Response:
        return JSONResponse({"request_id": job.id, **job.facts})

    def id_of(self, session: ServiceSession, kind: str, number: int) -> str:
        return f"{session.id}:{kind}:{number}"

    place_of = staticmethod(wire.place_of)

    # The service and its sessions

    async def _capabilities(self, _: ServiceCall) -> Json:
        model = {
            "model_name": self._service.settings.model,
            "max_context_length": self._service.limits.context,
            "trainable": True,
            "sampleable": True,
        }
        return {"supported_models": [model]}

    async def _create_session(self, call: ServiceCall) -> Json:
        metadata(call.body)  # not kept, but checked as in all requests
        return {"session_id": self._service.create_session().id, "type": "create_session"}

    async def _heartbeat(self, call: ServiceCall) -> Json:
        self._session(call)
        return {"type": "session_heartbeat"}

    async def _finish(self, call: ServiceCall) -> Json:
        await self._service.finish(self._service.session(call["session_id"]))
        return {}

    # Models

    async def _create_model(self, call: ServiceCall) -> RequestJob:
        session = self._session(call)
        self._service.check_base(want(call.body, "base_model", str))
        if (kind := want(call.body, "optimizer_config", dict, {}).get("type", "adamw")) != "adamw":
            raise invalid(f"optimizer {shown(kind)} is not supported, expected 'adamw'")
        tuning = training_fields.tuning(call.body, min_rank=0)
        return self.create_model(call, session, tuning, "CreateModel")

    async def _load_weights(self, call: ServiceCall) -> RequestJob:
        path = want(call.body, "path", str)
        place, optimizer = wire.place_of(path, "weights"), want(call.body, "optimizer", bool)
        saved = await self._service.checkpoint(place, optimizer=optimizer)
        if call.body.get("session_id") is not None:
            session, source = self._session(call), (place, optimizer)
            return self.create_model(call, session, saved.tuning, "LoadWeights", source)
        model, seq_id = self._addressed(call)
        if seq_id != 1:
            raise invalid(
                f"LoadWeights is not permitted with seq_id {seq_id}, only as a model's first "
                "request; make a new model from the checkpoint"
            )
        result = {"path": path, "model_id": model.id, "type": "load_weights"}
        job = RequestJob("LoadWeights", show=lambda _: result)
        work = partial(self._service.load, model, place, optimizer=optimizer)
        return self.numbered(call, model, seq_id, job, work)

    async def _get_info(self, call: ServiceCall) -> Json:
        model = self._model(call)
        name = self._service.settings.model
        return {
            "type": "get_info",
            "model_id": model.id,
            "model_data": {"model_name": name, "tokenizer_id": self._service.model_folder},
            "model_name": name,
            "is_lora": model.tuning.rank > 0,
            "lora_rank": model.tuning.rank,
        }

    async def _unload_model(self, call: ServiceCall) -> RequestJob:
        model = self._model(call)
        result = {"model_id": model.id, "type": "unload_model"}
        job = RequestJob("UnloadModel", show=lambda _: result)
        return self._service.jobs.start(job, partial(self._service.retire, model))

    # Training

    async def _pass(self, call: ServiceCall, *, forward_only: bool) -> RequestJob:
        def read(raw: bytes) -> tuple[ForwardBackward, Mapping[str, float], list[TargetRow]]:
            if call.protobuf:
                given = self._decode(raw)
            else:
                given = wire.request_of(call.body, forward_only=forward_only)
            expected = training_fields.known_loss(given.loss, training_fields.TINKER_LOSSES)
            rows = training_rows(given.data, expected, self._service.limits)
            return given, wire.loss_config(given.loss, given.config), rows

        given, config, rows = await decoded(read, call.raw)
        model, backward = self._service.model(given.model_id), not given.forward_only
        kind = "ForwardBackward" if backward else "Forward"
        size = sum(len(row.targets) for row in rows)
        job = RequestJob(kind, size=size, show=lambda passed: wire.output(passed, rows))
        work = partial(self._service.run_pass, model, rows, given.loss, config, backward=backward)
        return self.numbered(call, model, given.seq_id, job, work)

    def _decode(self, raw: bytes) -> ForwardBackward:
        check_counts(len(raw) // 4, self._service.settings.max_values)
        if scanning.count_fields(raw, FIELDS) > FIELDS:
            raise ServiceError(
                413, f"the body has more than {FIELDS} fields; send less data per request"
            )
        return messages.decode_request(raw)

    async def _optim_step(self, call: ServiceCall) -> RequestJob:
        model, seq_id = self._addressed(call)
        adam = training_fields.adam_params(call.body)
        job = RequestJob(
            "OptimStep", show=lambda metrics: {"metrics": metrics, "type": "optim_step"}
        )
        work = partial(self._service.optim_step, model, adam)
        return self.numbered(call, model, seq_id, job, work)

    # Checkpoints

    async def _save_weights(self, call: ServiceCall) -> RequestJob:
        overwrite = want(call.body, "overwrite", bool, False)
        name = want(call.body, "path", str)
        return self._save(call, "weights", name, optimizer=True, overwrite=overwrite)

    async def _save_for_sampler(self, call: ServiceCall) -> RequestJob:
        if want(call.body, "kind", str, "snapshot") != "snapshot":
            raise invalid("kind: only 'snapshot' is supported")
        name = want(call.body, "path", str, None)
        if name is not None:
            return self._save(call, "sampler_weights", name)
        # An unnamed snapshot of one sampling session.
        model, seq_id = self._addressed(call)
        number = want(call.body, "sampling_session_seq_id", int)
        sampler_id = self.id_of(model.session, "sample", number)
        place = CheckpointPlace(model.id, "sampler_weights", f"session-{uuid.uuid4().hex}")

        async def work() -> Json:
            await self._service.save(model, place, listed=False)
            self._service.open_sampler(model.session, sampler_id, place)
            return {"sampling_session_id": sampler_id, "type": "save_weights_for_sampler"}

        return self.numbered(call, model, seq_id, RequestJob("SaveWeightsForSampler"), work)

    def _save(self, call: ServiceCall, kind: Kind, name: str, **options: bool) -> RequestJob:
        """Save under a name."""
        model, seq_id = self._addressed(call)
        place = CheckpointPlace(model.id, kind, name)
        self._service.store.check(place)
        job_kind = "SaveWeights" if kind == "weights" else "SaveWeightsForSampler"
        result_type = "save_weights" if kind == "weights" else "save_weights_for_sampler"
        result = {"path": wire.path_of(place), "type": result_type}
        theirs, seconds = metadata(call.body), ttl(call.body)
        work = partial(
            self._service.save, model, place, seconds=seconds, metadata=theirs, **options
        )
        return self.numbered(call, model, seq_id, RequestJob(job_kind, show=lambda _: result), work)

    async def _weights_info(self, call: ServiceCall) -> Json:
        place = wire.place_of(want(call.body, "tinker_path", str))
        saved = await asyncio.to_thread(self._service.store.find, place)
        return {
            "base_model": saved.base_model,
            "is_lora": saved.tuning.rank > 0,
            "lora_rank": saved.tuning.rank,
            "train_unembed": saved.tuning.unembed,
            "train_mlp": saved.tuning.mlp,
            "train_attn": saved.tuning.attention,
        }

    async def _checkpoints(self, call: ServiceCall) -> Json:
        model_id = call.request.path_params.get("model_id")
        found = await asyncio.to_thread(self._service.store.list, model_id)
        return wire.page(call.request, "checkpoints", found, wire.checkpoint)

    async def _delete_checkpoint(self, call: ServiceCall) -> None:
        place = CheckpointPlace(**call.request.path_params)
        await asyncio.to_thread(self._service.store.delete, place)

    async def _set_ttl(self, call: ServiceCall) -> Json:
        place, seconds = CheckpointPlace(**call.request.path_params), ttl(call.body)
        await asyncio.to_thread(self._service.store.expire_at, place, seconds)
        return {}

    async def _training_runs(self, call: ServiceCall) -> Json:
        models = list(self._service.models.values())
        return wire.page(call.request, "training_runs", models, self._run)

    async def _training_run(self, call: ServiceCall) -> Json:
        return self._run(self._service.model(call["model_id"]))

    def _run(self, model: Model) -> Json:
        return {
            "training_run_id": model.id,
            "base_model": self._service.settings.model,
            "model_owner": "local",
            "is_lora": model.tuning.rank > 0,
            "lora_rank": model.tuning.rank,
            "corrupted": False,
            "last_request_time": iso(model.created_at),
            "user_metadata": dict(model.metadata) or None,
        }

    # Sampling

    async def _create_sampling_session(self, call: ServiceCall) -> Json:
        made = self.open_sampler(call, self._session(call))
        return {"sampling_session_id": made.id, "type": "create_sampling_session"}

    async def _sampler_info(self, call: ServiceCall) -> Json:
        sampler, base = self._service.sampler(call["sampler_id"]), self._service.settings.model
        return {"sampler_id": sampler.id, "base_model": base, "model_path": sampler.path}

    async def _sample(self, call: ServiceCall) -> RequestJob:
        sampler = self._service.sampler(want(call.body, "sampling_session_id", str))
        never_ends = want(call.body, "sampling_params", dict, {}).get("stop") == []
        seq_id, job = integer(call.body, "seq_id", 0, INT64[1]), RequestJob("Sample")
        work, request = self.sampling(call, sampler, job, eos=not never_ends)
        job.show = lambda found: wire.sampled(found, request)
        return sampler.lane.submit(seq_id, call.raw, job, work, ordered=False)

    # Futures

    async def _retrieve(self, call: ServiceCall) -> Response | Json:
        job = self.job(want(call.body, "request_id", str))
        if not await job.wait(self._service.settings.long_poll):
            return wire.try_again(job)
        if job.error is not None:
            category = "user" if job.error.status < 500 else "server"
            return {"error": str(job.error), "category": category}
        if isinstance(job.result, (ForwardBackwardOutput, SampleResult)):
            return wire.result(job.result, PROTOBUF in call.request.headers.get("accept", ""))
        found: Json = job.result
        return found

    async def _cancel_future(self, call: ServiceCall) -> Json:
        job = self.job(want(call.body, "request_id", str))
        if job.kind != "Sample":
            raise invalid("only sampling requests can be cancelled")
        if job.task is not None:
            job.task.cancel()
        return {}

    # Addressing

    def rejected(self, call: ServiceCall) -> None:
        """Let the numbers after that of a rejected training request run."""
        if call.protobuf:
            model_id, seq_id = scanning.address(call.raw) or (None, None)
        else:
            model_id, seq_id = call.body.get("model_id"), call.body.get("seq_id")
        if not isinstance(model_id, str) or type(seq_id) is not int or not 1 <= seq_id <= INT64[1]:
            return
        if (model := self._service.models.get(model_id)) is not None:
            model.lane.reject(seq_id)

    def _session(self, call: ServiceCall) -> ServiceSession:
        return self._service.session(want(call.body, "session_id", str))

    def _model(self, call: ServiceCall) -> Model:
        return self._service.model(want(call.body, "model_id", str))

    def _addressed(self, call: ServiceCall) -> tuple[Model, int]:
        return self._model(call), want(call.body, "seq_id", int)
