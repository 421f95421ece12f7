"""What both protocols do alike: routes, models, numbered requests, sampling."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial

from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from retrain.protocols.tinker.messages import PROTOBUF
from retrain.service import bodies
from retrain.service.core import Service
from retrain.service.errors import invalid
from retrain.service.jobs import Job, Work
from retrain.service.state import Model, SamplingSession, Session
from retrain.service.store import Place
from retrain.service.trainer import Row, Tuning
from retrain.service.web import Json, check_key, decoded, json_object, read_body, want


@dataclass(frozen=True, slots=True)
class Call:
    """A request that has been read."""

    request: Request
    raw: bytes
    body: Json
    """Empty if the request is protobuf."""
    protobuf: bool

    def __getitem__(self, name: str) -> str:
        """A part of the path."""
        return str(self.request.path_params[name])


Handler = Callable[[Call], Awaitable[Response | Job | Json | None]]


class Protocol(ABC):
    """A protocol over a `Service`."""

    ordered: bool
    """Whether a model's requests run in the order of their numbers."""

    def __init__(self, service: Service) -> None:
        self._service = service

    @abstractmethod
    def table(self) -> Mapping[str, Handler | Json]:
        """By "METHOD path", what answers: a handler, or the reply if it is always the same."""

    @abstractmethod
    def started(self, job: Job) -> Response:
        """The reply to a request that started `job`."""

    @abstractmethod
    def id_of(self, session: Session, kind: str, number: int) -> str:
        """The id of the session's model or sampling session of this number."""

    @abstractmethod
    def place_of(self, path: str) -> Place:
        """The checkpoint at a path of this protocol."""

    def routes(self) -> list[Route]:
        return [self._route(where, answer) for where, answer in self.table().items()]

    def _route(self, where: str, answer: Handler | Json) -> Route:
        method, path = where.split()

        async def endpoint(request: Request) -> Response:
            if (key := self._service.settings.api_key) and path != "healthz":
                check_key(request, key)
            raw = await read_body(request, self._service.settings.max_body)
            protobuf = request.headers.get("content-type", "").startswith(PROTOBUF)
            body = {} if protobuf else await decoded(json_object, raw)
            reply = await answer(Call(request, raw, body, protobuf)) if callable(answer) else answer
            if isinstance(reply, Job):
                return self.started(reply)
            if reply is None:
                return Response(status_code=204)
            return reply if isinstance(reply, Response) else JSONResponse(reply)

        return Route(f"/api/v1/{path}", endpoint, methods=[method])

    def numbered(self, call: Call, model: Model, seq_id: int, job: Job, work: Work) -> Job:
        if seq_id < 1:
            raise invalid(f"seq_id: got {seq_id}, expected 1 or more")
        job.facts["model_id"] = model.id
        return model.lane.submit(seq_id, call.raw, job, work, ordered=self.ordered)

    def create_model(
        self,
        call: Call,
        session: Session,
        tuning: Tuning,
        kind: str,
        source: tuple[Place, bool] | None = None,
    ) -> Job:
        """Build a model, of `source` (checkpoint, with optimizer) if given."""
        number = want(call.body, "model_seq_id", int)
        metadata = want(call.body, "user_metadata", dict, {})
        model_id = self.id_of(session, "train", number)

        async def work() -> Json:
            await self._service.build_model(self._service.models[model_id], source)
            return {"model_id": model_id, "path": call.body.get("path")}

        job = Job(kind, facts={"model_id": model_id})
        submitted = session.models.submit(number, call.raw, job, work, ordered=False)
        if submitted is job:
            self._service.add_model(session, model_id, tuning, metadata)
        return submitted

    def open_sampler(self, call: Call, session: Session) -> SamplingSession:
        """The sampling session that a request describes; new unless its number is known."""
        path = want(call.body, "model_path", str, None)
        base = want(call.body, "base_model", str, None)
        if path is None and base is None:
            raise invalid("model_path or base_model is missing: set one of them")
        if base is not None:
            self._service.check_base(base)
        place = None if path is None else self.place_of(path)
        number = want(call.body, "sampling_session_seq_id", int)
        sampler_id = self.id_of(session, "sample", number)
        return self._service.open_sampler(session, sampler_id, place, path)

    def sampling(self, call: Call, sampler: SamplingSession, job: Job) -> Work:
        """The work of `job`: (completions, log-probs of the prompt or None)."""
        bodies.check_unsupported(call.body)
        prompt = bodies.prompt_of(call.body, self._service.limits)
        params = bodies.sampling_params(call.body, prompt, self._service.limits)
        count = want(call.body, "num_samples", int, 1)
        score = want(call.body, "prompt_logprobs", bool, False)
        job.size = len(prompt) + count
        job.facts["sample_sequence_ids"] = [f"{job.id}:{i}" for i in range(count)]
        return partial(self._service.sample, sampler, prompt, params, count, score=score)


def size_of(rows: list[Row]) -> int:
    """How many numbers the result of a pass holds."""
    return sum(len(row.tokens) for row in rows)
