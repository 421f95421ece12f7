"""The HTTP server of a run's endpoint: one URL and one key per rollout.

    http://HOST:PORT/r/ID/v1/chat/completions

- A call needs the key of its own rollout, and is answered while that is under way. Every other call
  gets status 401, is counted, and samples nothing.
- A call whose client disconnects is cancelled.
- Errors have the form of the API that was called.
- The server listens on the loopback interface unless `endpoint.host` says otherwise.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from retrain.agents import anthropic, completions, openai, responses
from retrain.agents.api import Api, Decode, Request, invalid, message_of
from retrain.agents.calls import CallError, Calls, Reply
from retrain.agents.connections import (
    LOOPBACK,
    as_json,
    as_stream,
    body_of,
    bound,
    has_key,
    url_of,
    while_connected,
)
from retrain.agents.guests import Answer, Guest
from retrain.config import EndpointConfig
from retrain.environment import Endpoint
from retrain.errors import alike, shown
from retrain.wire.serving import allow_files, settings_of

logger = logging.getLogger(__name__)
Handler = Callable[[HttpRequest], Awaitable[Response]]
MOST_WARNINGS = 100
"""Names of arguments and kinds of invalid calls that are remembered: a client may make up more."""
APIS: Mapping[str, Api] = {
    "/chat/completions": openai.ChatCompletions(),
    "/completions": completions.Text(),
    "/responses": responses.Responses(),
    "/messages": anthropic.Messages(),
}
OPEN_FILES = 8192
"""What the process may open, if the system allows it: agents in it have a socket per call too."""
LARGEST_REWARD = 1e6
"""Posts add up: far below the limit of a reward, so that no number of them reaches it."""


class EndpointServer:
    """Serves the rollouts of a run; an async context manager."""

    below = "/r/{rollout}/v1"
    """What the paths of all routes begin with."""

    def __init__(self, config: EndpointConfig, decode: Decode) -> None:
        self._config, self._decode = config, decode
        self._guests: dict[str, Guest] = {}
        self._warned: set[str] = set()
        self._url, self._model = "", "policy"
        self.rejected = 0
        """Calls with a wrong key, or for a rollout that is over."""

    @asynccontextmanager
    async def serving(self) -> AsyncIterator[EndpointServer]:
        """Listen. Raises RunError if the address is not available."""
        config = self._config
        listening = bound(config, listens=True)
        allow_files(OPEN_FILES)
        self._url = (config.public_url or url_of(listening)).rstrip("/")
        if not config.host.startswith(LOOPBACK):
            logger.warning(
                "the endpoint listens on %s, so other machines can reach it; a call needs the key "
                "of its rollout, which is sent unencrypted",
                config.host,
            )
        server = uvicorn.Server(settings_of(self._app(), "auto", shutdown=1))
        server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
        task = asyncio.create_task(server.serve(sockets=[listening]), name="endpoint")
        try:
            yield self
        finally:
            server.should_exit = True
            await asyncio.wait([task])
            listening.close()

    @asynccontextmanager
    async def open(self, calls: Calls, seats: Sequence[str] = ()) -> AsyncIterator[Endpoint]:
        """A URL and a key for a rollout, until the block ends."""
        guest, name = Guest(calls, seats), secrets.token_hex(8)
        self._guests[name] = guest
        model = guest.seats[0] if guest.seats else self._model
        try:
            yield Endpoint(f"{self._url}/r/{name}/v1", guest.key, model)
        finally:
            del self._guests[name]
            await calls.close()

    def _app(self) -> Starlette:
        posts = {path: self._answering(api) for path, api in APIS.items()}
        posts["/messages/count_tokens"] = self._count
        gets = dict.fromkeys(("/models", "/models/{model:path}"), self._models)
        routes = [
            Route(f"{self.below}{path}", self._safe(handle), methods=[method])
            for method, handlers in (("POST", posts), ("GET", gets))
            for path, handle in handlers.items()
        ]
        errors: Mapping[Any, Any] = {HTTPException: _unknown, Exception: _broken}
        return Starlette(routes=[*routes, self._own_route()], exception_handlers=errors)

    def _own_route(self) -> Route:
        """What only this kind of server has."""
        return Route(f"{self.below}/reward", self._safe(self._reward), methods=["POST"])

    def _safe(self, handle: Handler) -> Handler:
        """A handler whose CallErrors become answers; the first invalid call of a kind is logged."""

        async def handled(http: HttpRequest) -> Response:
            try:
                return await handle(http)
            except CallError as error:
                if error.code == "invalid_request_error" and self._is_new(alike(str(error))):
                    logger.warning("a call got status %d: %s", error.status, error)
                return _refusal(http, error)

        return handled

    def _answering(self, api: Api) -> Handler:
        async def handle(http: HttpRequest) -> Response:
            guest = self._guest(http)
            request = guest.whole(api.read(await body_of(http)))
            request = replace(request, options=self._allowed(request))
            return await self._reply(http, guest, api, request)

        return handle

    async def _reply(self, http: HttpRequest, guest: Guest, api: Api, request: Request) -> Response:
        replies = await while_connected(http, sampled(guest, request))
        answer = self._answer(http, guest, api, request, replies)
        return as_stream(api.events(request, answer)) if request.stream else as_json(answer)

    def _answer(
        self, http: HttpRequest, guest: Guest, api: Api, request: Request, replies: Sequence[Reply]
    ) -> dict[str, Any]:
        first = replies[0]
        answer_id = f"{api.prefix}-{http.path_params['rollout']}-{first.turn}"
        guest.answers[answer_id] = Answer(len(replies), request.messages, first)
        return api.answer(request, answer_id, replies, self._decode)

    async def _count(self, http: HttpRequest) -> Response:
        guest = self._guest(http)
        request = anthropic.read_count(await body_of(http))
        seat = guest.seat(request.model)
        return as_json({"input_tokens": guest.calls.count(request.messages, request.tools, seat)})

    def _allowed(self, request: Request) -> dict[str, Any]:
        """The agent's sampling arguments that count; the first use of any other is logged.

        Raises CallError for what would be answered wrongly in a run.
        """
        for name, reason in request.refused.items():
            raise invalid(f"{name}: {reason}")
        honour = self._config.honour
        self._warn("has no effect on the endpoint", request.unused)
        self._warn(
            "a run does not enforce: it has to train on what the model says by itself",
            request.masking,
        )
        self._warn(
            "the run's `sampling` section overrides; to use the agent's value, add it to "
            "endpoint.honour",
            [name for name in request.options if name not in honour],
        )
        return {name: value for name, value in request.options.items() if name in honour}

    def _warn(self, reason: str, names: Iterable[str]) -> None:
        """Log the first use of each argument."""
        for name in filter(self._is_new, names):
            logger.warning("the agent sets %s, which %s", shown(name), reason)

    def _is_new(self, what: str) -> bool:
        """Whether to log this; remembers it."""
        new = what not in self._warned and len(self._warned) < MOST_WARNINGS
        if new:
            self._warned.add(what)
        return new

    def _guest(self, http: HttpRequest) -> Guest:
        """The rollout of a call; raises CallError 401 unless the call has its key."""
        guest = self._guests.get(http.path_params["rollout"])
        if guest is None or not has_key(http, guest.key):
            self.rejected += 1
            raise CallError(
                401, "invalid_api_key", "the API key is not valid for a rollout that is under way"
            )
        return guest

    async def _models(self, http: HttpRequest) -> Response:
        """The seats, in the forms of OpenAI and of Anthropic at once."""
        guest = self._guest(http)
        models = {
            name: {
                "id": name,
                "object": "model",
                "created": 0,
                "owned_by": "retrain",
                "type": "model",
                "display_name": name,
                "created_at": "1970-01-01T00:00:00Z",
            }
            for name in guest.seats or (self._model,)
        }
        if asked := http.path_params.get("model"):
            return as_json({**models[guest.seat(asked) or self._model], "id": asked})
        names = list(models)
        ends = {"has_more": False, "first_id": names[0], "last_id": names[-1]}
        return as_json({"object": "list", "data": list(models.values()), **ends})

    async def _reward(self, http: HttpRequest) -> Response:
        """`{"reward": 1.0}` for the rollout, with `"id"` of an answer for this call."""
        guest = self._guest(http)
        if not self._config.reward:
            raise CallError(
                403,
                "reward_not_allowed",
                "this run accepts no posted rewards; to allow them, set endpoint.reward: true",
            )
        body = await body_of(http)
        value, turn = body.get("reward"), None
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if value is None or not number or not abs(value) <= LARGEST_REWARD:
            raise invalid(
                f"reward: got {shown(value)}, expected a number from {-LARGEST_REWARD:g} to "
                f"{LARGEST_REWARD:g}"
            )
        if body.get("id") is not None:
            answer, index = guest.find(body["id"], "id", 404), body.get("index", 0)
            if index not in range(answer.choices):
                raise invalid(f"index: got {index!r}, expected 0 to {answer.choices - 1}")
            turn = answer.reply.turn + int(index)
        guest.calls.reward(float(value), turn)
        return as_json({"reward": value})


async def sampled(guest: Guest, request: Request) -> list[Reply]:
    """The replies to a call, those of each prompt together; raises CallError."""
    seat, options, messages = guest.seat(request.model), request.options, request.messages
    calls, n = guest.calls, request.n
    if request.prompts:
        tasks = [
            asyncio.ensure_future(calls.complete(prompt, n, seat, options))
            for prompt in request.prompts
        ]
        try:
            return [reply for replies in await asyncio.gather(*tasks) for reply in replies]
        finally:
            for task in tasks:
                task.cancel()
    if request.system:
        messages = [message_of("system", request.system), *messages]
    return await calls.chat(messages, request.tools, n, seat, options, request.continues)


def _refusal(http: HttpRequest, error: CallError) -> Response:
    """An error in the form of the API that was called."""
    theirs = "/messages" in http.url.path or "anthropic-version" in http.headers
    form = anthropic.error_body if theirs else openai.error_body
    return as_json(form(error), error.status)


async def _unknown(http: HttpRequest, error: HTTPException) -> Response:
    """No such path, or a method that it doesn't have."""
    paths = ", ".join((*APIS, "/models"))
    message = (
        f"got {http.method} {http.url.path}, expected one of {paths} below the base URL, which "
        "ends with /v1 for OpenAI's clients and without it for Anthropic's"
    )
    code = "not_found" if error.status_code == 404 else "method_not_allowed"
    return _refusal(http, CallError(error.status_code, code, message))


async def _broken(http: HttpRequest, error: Exception) -> Response:
    return _refusal(http, CallError(500, "server_error", f"{type(error).__name__}: {error}"))
