"""What the APIs share: a request, messages as templates expect them, and the parts of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from retrain.chat.tools import tools_of
from retrain.environment import ToolSpec
from retrain.errors import shown
from retrain.rollout.calls import CallError, Reply
from retrain.types import Message

Event = tuple[str, dict[str, Any] | str]
"""One event of a stream: its name, empty in APIs that don't name them, and its data."""
Body = TypeVar("Body", bound="Wire")
COLDEST = 0.01
"""Lower temperatures are greedy: the logits divided by them overflow."""
# No value that these types accept may make the sampler fail, since that would end the run.
Tokens = Annotated[int, Field(ge=1)]
Temperature = Annotated[
    float,
    Field(ge=0, le=100, allow_inf_nan=False),
    AfterValidator(lambda value: value if value >= COLDEST else 0.0),
]
TopP = Annotated[float, Field(ge=1e-6, le=1)]
TopK = Annotated[int, Field(ge=-1, lt=2**31), AfterValidator(lambda value: max(value, 0))]
"""0 or -1 keeps all tokens."""
Seed = Annotated[int, AfterValidator(lambda value: value & 0x7FFFFFFF)]
Stop = Annotated[
    tuple[str, ...],
    BeforeValidator(lambda value: (value,) if isinstance(value, str) else value),
    AfterValidator(lambda value: tuple(filter(None, value))),
]
NEUTRAL: tuple[Any, ...] = (
    None,
    0,
    {},
    [],
    {"type": "text"},
    {"format": {"type": "text"}},
    {"type": "disabled"},
)
"""Values of arguments that ask for nothing."""


class Wire(BaseModel):
    """A part of a request. Unknown fields are allowed: SDKs send new ones all the time."""

    model_config = ConfigDict(extra="allow", frozen=True)


@dataclass(frozen=True, slots=True)
class Request:
    """A call as an API read it."""

    model: str
    messages: Sequence[Message] = ()
    tools: tuple[ToolSpec, ...] = ()
    prompt: str | Sequence[int] | None = None
    """Of a text completion, instead of messages."""
    system: str = ""
    """Begins the history, before that of `previous`."""
    previous: str = ""
    """The id of the answer that `messages` follow, if the API keeps the history."""
    n: int = 1
    stream: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """The sampling arguments of the agent, by the names of SamplingParams."""
    unused: tuple[str, ...] = ()
    """Arguments that have no effect here."""
    body: Any = None
    """The request, for the API's own use."""


class Decode(Protocol):
    """The text of token ids."""

    def __call__(self, token_ids: Sequence[int]) -> str: ...


class Api(Protocol):
    """How an API reads requests and writes answers."""

    prefix: str
    """What the ids of its answers begin with."""

    def read(self, body: Mapping[str, Any]) -> Request: ...
    def answer(
        self, request: Request, answer_id: str, replies: Sequence[Reply], decode: Decode
    ) -> dict[str, Any]: ...
    def events(self, request: Request, answer: dict[str, Any]) -> Iterable[Event]: ...


def parse(kind: type[Body], body: Mapping[str, Any], below: str = "") -> Body:
    """A request body, or what is `below` in it; raises CallError 400 with the first wrong field."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in (below, *first["loc"]) if part != "")
        got = shown(first["input"])
        raise invalid(f"{where}: {first['msg'].lower()}, got {got}") from None


def invalid(message: str) -> CallError:
    return CallError(400, "invalid_request_error", message)


def text_of(content: Any, where: str) -> str:
    """The text of a message's content: a string, or a list of parts with text, one per line."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise invalid(f"{where}: got {shown(content)}, expected a string or a list of parts")
    return "\n".join([_part_of(part, f"{where}.{i}") for i, part in enumerate(content)])


def _part_of(part: Any, where: str) -> str:
    text = part.get("text", part.get("refusal")) if isinstance(part, Mapping) else part
    if isinstance(text, str):
        return text
    kind = part.get("type") if isinstance(part, Mapping) else None
    got = f"a part of type {shown(kind)}" if kind else shown(part)
    raise invalid(
        f"{where}: got {got}, expected text: the endpoint does not support images or files"
    )


def call_of(name: str, arguments: Any, call_id: str, where: str) -> dict[str, Any]:
    """A tool call of the history, as chat templates expect it."""
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            raise invalid(f"{where}: got the arguments {shown(arguments)}, expected JSON") from None
    if not isinstance(arguments, dict):
        raise invalid(f"{where}: got the arguments {shown(arguments)}, expected an object")
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def message_of(role: str, content: str, **more: Any) -> Message:
    """A message with the keys of `more` that have a value."""
    given = {key: value for key, value in more.items() if value}
    return cast(Message, {"role": role, "content": content, **given})


def offered(
    tools: Sequence[Mapping[str, Any]], convert: Callable[[Any], Any]
) -> tuple[ToolSpec, ...]:
    """The tools of a request, each converted to {"name", "description", "parameters"}."""
    try:
        return tools_of([convert(tool) for tool in tools])
    except (KeyError, TypeError, ValueError) as error:
        raise invalid(f"tools: {error}") from None


def finish(reply: Reply) -> str:
    """Why a reply ended: `tool_calls`, `length` or `stop`, as OpenAI names it."""
    if reply.tool_calls:
        return "tool_calls"
    return "stop" if reply.completion.stop_reason == "stop" else "length"


def arguments_of(arguments: Mapping[str, Any]) -> str:
    """The arguments of a tool call as JSON."""
    return json.dumps(dict(arguments), ensure_ascii=False)


def history_of(reply: Reply) -> Message:
    """A reply as a message of the history."""
    calls = [call_of(c.name, dict(c.arguments), c.id, "") for c in reply.tool_calls]
    return message_of("assistant", reply.text, tool_calls=calls)


def logprobs_of(reply: Reply, decode: Decode) -> list[dict[str, Any]]:
    """The log-prob of each sampled token, as OpenAI writes it."""
    completion = reply.completion
    found = []
    for token, logprob in zip(completion.token_ids, completion.logprobs, strict=True):
        text = decode([token])
        found.append(
            {
                "token": text,
                "logprob": logprob,
                "bytes": list(text.encode("utf-8", "replace")),
                "top_logprobs": [],
            }
        )
    return found


def options_of(body: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """The sampling arguments that a request has a value for; `names` maps fields to ours."""
    found = [(ours, getattr(body, field, None)) for field, ours in names.items()]
    return {name: value for name, value in found if value is not None}


def unused_of(body: Mapping[str, Any], names: Sequence[str]) -> tuple[str, ...]:
    """Those of `names` that a request sets to a value which would change the answer."""
    return tuple([name for name in names if body.get(name) not in NEUTRAL])


def unforced(tools: Sequence[ToolSpec], choice: Any, parallel: bool | None) -> tuple[str, ...]:
    """The arguments about tools that no sampler can enforce."""
    if not tools:
        return ()
    forced = choice not in (None, "none", "auto")
    return ("tool_choice",) * forced + ("parallel_tool_calls",) * (parallel is False)
