"""What both protocols do alike: HTTP, routes, models, numbered requests, sampling."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrain.errors import shown
from retrain.service.core import Service
from retrain.service.errors import ServiceError, invalid, missing
from retrain.service.fields import INT64, Json, integer, metadata, want
from retrain.service.jobs import RequestJob, Work
from retrain.service.json_bodies import check_size, json_object, unzstd
from retrain.service.sampling import SampleFindings, SampleRequest, sample_request
from retrain.service.state import Model, SamplerSession, ServiceSession
from retrain.service.store import CheckpointPlace
from retrain.service.tuning import Tuning
from retrain.wire.tinker.messages import PROTOBUF

T = TypeVar("T")
_LARGEST_NUMBER = 999_999_999
"""Of a model or sampling session: it becomes a part of an id."""
IN_THREAD = 64 * 1024
"""Larger bodies, in bytes, are decoded in a thread to keep the event loop free."""


@dataclass(frozen=True, slots=True)
class ServiceCall:
    """A request that has been read."""

    request: Request
    raw: bytes
    body: Json
    """Empty if the request is protobuf."""
    protobuf: bool

    def __getitem__(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])


Handler = Callable[[ServiceCall], Awaitable[Response | RequestJob | Json | None]]


class ServiceProtocol(ABC):
    """A protocol over a `Service`."""

    ordered: bool
    """Whether a model's requests run in the order of their numbers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @abstractmethod
    def table(self) -> Mapping[str, Handler | Json]:
        """By "METHOD path", what answers: a handler, or the reply if it is always the same."""

    @abstractmethod
    def started(self, job: RequestJob) -> Response:
        """The reply to a request that started `job`."""

    @abstractmethod
    def id_of(self, session: ServiceSession, kind: str, number: int) -> str:
        """The id of the session's model or sampling session of this number."""

    @abstractmethod
    def place_of(self, path: str) -> CheckpointPlace:
        """The checkpoint at a path of this protocol."""

    def rejected(self, call: ServiceCall) -> None:
        """Called for each request that is answered with an error."""
        return

    def routes(self) -> list[Route]:
        return [self._route(where, answer) for where, answer in self.table().items()]

    def _route(self, where: str, answer: Handler | Json) -> Route:
        method, path = where.split()

        async def endpoint(request: Request) -> Response:
            raw = await read_body(request, self._service.settings.max_body)
            protobuf = request.headers.get("content-type", "").startswith(PROTOBUF)
            parse = partial(json_object, values=self._service.settings.max_values)
            body = {} if protobuf else await decoded(parse, raw)
            call = ServiceCall(request, raw, body, protobuf)
            try:
                reply = await answer(call) if callable(answer) else answer
            except ServiceError:
                self.rejected(call)
                raise
            if isinstance(reply, RequestJob):
                reply.protocol = self
                return self.started(reply)
            if reply is None:
                return Response(status_code=204)
            return reply if isinstance(reply, Response) else JSONResponse(reply)

        return Route(f"/api/v1/{path}", endpoint, methods=[method])

    def job(self, job_id: str) -> RequestJob:
        """Find a job of this protocol; raises ServiceError: 404, or 410 if it may be forgotten."""
        job = self._service.jobs.get(job_id)
        if job.protocol is not self:
            raise missing(f"request {job_id}")
        return job

    def numbered(
        self, call: ServiceCall, model: Model, seq_id: int, job: RequestJob, work: Work
    ) -> RequestJob:
        if not 1 <= seq_id <= INT64[1]:
            raise invalid(f"seq_id: got {shown(seq_id)}, expected 1 or more")
        job.facts["model_id"] = model.id
        job.session = model.session
        return model.lane.submit(seq_id, call.raw, job, work, ordered=self.ordered)

    def create_model(
        self,
        call: ServiceCall,
        session: ServiceSession,
        tuning: Tuning,
        kind: str,
        source: tuple[CheckpointPlace, bool] | None = None,
    ) -> RequestJob:
        """Build a model, of `source` (checkpoint, with optimizer) if given."""
        number = integer(call.body, "model_seq_id", 0, _LARGEST_NUMBER)
        theirs, path = metadata(call.body), want(call.body, "path", str, None)
        model_id = self.id_of(session, "train", number)
        model = Model(model_id, session, self._service.lane(), tuning, theirs)

        async def work() -> Json:
            await self._service.build_model(model, source)
            return {"model_id": model_id, "path": path}

        job = RequestJob(kind, facts={"model_id": model_id}, session=session)
        submitted = session.models.submit(number, call.raw, job, work, ordered=False)
        if submitted is job:
            self._service.models[model_id] = model
        return submitted

    def open_sampler(self, call: ServiceCall, session: ServiceSession) -> SamplerSession:
        """The sampling session that a request describes; new unless its number is known."""
        path = want(call.body, "model_path", str, None)
        base = want(call.body, "base_model", str, None)
        if path is None and base is None:
            raise invalid("model_path or base_model is missing: set one of them")
        if base is not None:
            self._service.check_base(base)
        place = None if path is None else self.place_of(path)
        number = integer(call.body, "sampling_session_seq_id", 0, _LARGEST_NUMBER)
        sampler_id = self.id_of(session, "sample", number)
        return self._service.open_sampler(session, sampler_id, place, path)

    def sampling(
        self, call: ServiceCall, sampler: SamplerSession, job: RequestJob, *, eos: bool = True
    ) -> tuple[Work, SampleRequest]:
        """The work of `job`, which returns `SampleFindings`; `eos` as in SampleRequest."""
        request = sample_request(call.body, self._service.limits, eos=eos)

        async def work() -> SampleFindings:
            found = await self._service.sample(sampler, request)
            job.size = found.size
            return found

        job.session = sampler.session
        job.facts["sample_sequence_ids"] = [f"{job.id}:{i}" for i in range(request.count)]
        return work, request


async def read_body(request: Request, limit: int) -> bytes:
    """The decompressed body; raises ServiceError (413) if it has more than `limit` bytes."""
    body = bytearray()
    try:
        async for chunk in request.stream():
            body += chunk
            check_size(len(body), limit)
    except ClientDisconnect:
        raise invalid("the connection closed before the end of the body") from None
    encoding = request.headers.get("content-encoding", "identity")
    if encoding == "zstd":
        return await asyncio.to_thread(unzstd, bytes(body), limit)
    if encoding != "identity":
        raise ServiceError(415, f"Content-Encoding: got {shown(encoding)}, expected zstd")
    return bytes(body)


async def decoded(parse: Callable[[bytes], T], body: bytes) -> T:
    """`parse(body)`, in a thread if it is large; raises ServiceError (400) if it fails."""
    try:
        if len(body) > IN_THREAD:
            return await asyncio.to_thread(parse, body)
        return parse(body)
    except (ValueError, RecursionError) as error:
        raise invalid(f"the body can't be read: {type(error).__name__}: {error}") from None


async def answer_error(_: Request, error: Exception) -> Response:
    """Starlette's handler for all exceptions: clients always get the same error body."""
    if isinstance(error, HTTPException):
        error = ServiceError(error.status_code, error.detail)
    elif not isinstance(error, ServiceError):
        error = ServiceError(500, f"{type(error).__name__}: {error}")
    text = str(error)  # Tinker's clients read `detail`, Weaver's the rest
    content = {"error": error.code, "message": text, "retryable": False, "detail": text}
    return JSONResponse(content, status_code=error.status)
