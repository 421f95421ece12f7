"""What the APIs share: a request, messages as templates expect them, and the parts of an answer."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Annotated, Any, Protocol, TypeVar, cast

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from retrain.agents.calls import CallError, Reply
from retrain.chat.tools import as_template, tools_of
from retrain.environment import ToolCall, ToolSpec
from retrain.errors import shown
from retrain.types import Completion, Message

Event = tuple[str, dict[str, Any] | str]
"""One event of a stream: its name, empty in APIs that don't name them, and its data."""
Decode = Callable[[Sequence[int]], str]
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
NEUTRAL: tuple[Any, ...] = (None, 0, "", {}, [], {"type": "disabled"})
"""Values that ask for nothing, whatever the argument."""
DEFAULTS: Mapping[str, Any] = {
    "add_generation_prompt": True,
    "best_of": 1,
    "modalities": ["text"],
    "repetition_penalty": 1,
    "truncation": "disabled",
    "verbosity": "medium",
}
"""Values of other arguments that ask for nothing."""
IGNORED = frozenset(
    {"metadata", "prompt_cache_key", "safety_identifier", "service_tier", "store", "user"}
)
"""Arguments that have no effect on an answer with the vendors either."""
TOP = 20
"""Maximum of `top_logprobs`."""
Likely = Sequence[tuple[int, float]]
"""Tokens with their log-probs, the likeliest first."""


class Wire(BaseModel):
    """A part of a request. Unknown fields are allowed: SDKs send new ones all the time.

    A declared field has an effect; every other one is in `model_extra`, and `unused_of` names it.
    """

    model_config = ConfigDict(extra="allow", frozen=True)


@dataclass(frozen=True, slots=True)
class Extra:
    """What a call asks of the sampler beside SamplingParams; only `serve --openai` has it."""

    top: int = 0
    """How many of the likeliest tokens to report per position."""
    echo: bool = False
    """Also report the log-probs of the prompt."""
    schema: Mapping[str, Any] | None = None
    """The JSON schema that the reply must fit."""
    forced: tuple[ToolSpec, ...] = ()
    """The tools one of which the reply must call."""

    @property
    def masks(self) -> bool:
        """Whether the reply may not be any text."""
        return self.schema is not None or bool(self.forced)


@dataclass(frozen=True, slots=True)
class Detailed(Completion):
    """A completion with what `Extra` asks for."""

    top: Sequence[Likely] = ()
    """Per token of the completion, if any are wanted."""
    prompt_ids: Sequence[int] = ()
    """Empty unless the prompt is echoed; so are the next two."""
    prompt_logprobs: Sequence[float] = ()
    """Of each token of the prompt but the first."""
    prompt_top: Sequence[Likely] = ()
    """The same."""


@dataclass(frozen=True, slots=True)
class Request:
    """A call as an API read it."""

    model: str
    messages: Sequence[Message] = ()
    tools: tuple[ToolSpec, ...] = ()
    prompts: Sequence[str | Sequence[int]] = ()
    """Of a text completion, instead of messages."""
    continues: bool = False
    """The reply continues the last message, which is the assistant's."""
    system: str = ""
    """Begins the history, before that of `previous`."""
    previous: str = ""
    """The id of the answer that `messages` follow, if the API keeps the history."""
    n: int = 1
    stream: bool = False
    options: Mapping[str, Any] = field(default_factory=dict)
    """The sampling arguments of the agent, by the names of SamplingParams."""
    extra: Extra = Extra()
    """What else to ask of the sampler."""
    unused: tuple[str, ...] = ()
    """Arguments that have no effect."""
    masking: tuple[str, ...] = ()
    """Arguments that restrict which tokens may be sampled; a run never does."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Arguments that a run rejects, with the reason."""
    body: Any = None
    """The request, for the API's own use."""


class Api(Protocol):
    """How an API reads requests and writes answers."""

    prefix: str
    """What the ids of its answers begin with."""

    def read(self, body: Mapping[str, Any]) -> Request: ...
    def answer(
        self, request: Request, answer_id: str, replies: Sequence[Reply], decode: Decode
    ) -> dict[str, Any]: ...
    def events(self, request: Request, answer: dict[str, Any]) -> Iterable[Event]: ...


def request_of(
    asked: Any,  # a request of an API of messages
    messages: Sequence[Message],
    *,
    tools: tuple[ToolSpec, ...],
    choice: Any,
    parallel: bool | None,
    form: tuple[str, Any],
    top: int = 0,
    unused: tuple[str, ...] = (),
    **more: Any,
) -> Request:
    """A request of messages; raises CallError 400.

    `choice` is the choice of a tool, `form` what the answer must look like, after the argument that
    it is in, and `more` are fields of the Request.
    """
    where, given = form
    schema, must = schema_of(given, where), forced(tools, choice)
    return Request(
        asked.model,
        messages,
        () if choice == "none" else tools,
        stream=bool(asked.stream),
        extra=Extra(top, schema=schema, forced=must),
        unused=unused_of(asked) + unused + unforced(tools, asked.tools or (), choice, parallel),
        masking=(where,) * (schema is not None) + ("tool_choice",) * bool(must),
        body=asked,
        **more,
    )


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
    text = part if isinstance(part, str) else _get(part, "text", _get(part, "refusal"))
    if isinstance(text, str):
        return text
    kind = _get(part, "type")
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
    return as_template(ToolCall(name, arguments, call_id))


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


def logprobs_of(reply: Reply, decode: Decode) -> list[dict[str, Any]]:
    """The log-prob of each sampled token, as OpenAI writes it."""
    completion, tops = reply.completion, tops_of(reply.completion)
    return [
        {
            **_logprob(decode, token, logprob),
            "top_logprobs": [_logprob(decode, *one) for one in top],
        }
        for token, logprob, top in zip(completion.token_ids, completion.logprobs, tops, strict=True)
    ]


def _logprob(decode: Decode, token: int, logprob: float) -> dict[str, Any]:
    text = decode([token])
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8", "replace"))}


def tops_of(completion: Completion) -> Sequence[Likely]:
    """The likeliest tokens at each token of a completion."""
    found = completion.top if isinstance(completion, Detailed) else ()
    return found or [()] * len(completion.token_ids)


def rest_of(text: str, sent: str) -> str:
    """What follows `sent` in `text`, or the part that differs from it."""
    pairs = zip(text, sent, strict=False)
    return text[sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs)) :]


def options_of(body: Any, names: Mapping[str, str]) -> dict[str, Any]:
    """The sampling arguments that a request has a value for; `names` maps fields to ours."""
    found = [(ours, getattr(body, field, None)) for field, ours in names.items()]
    return {name: value for name, value in found if value is not None}


def unused_of(asked: Wire) -> tuple[str, ...]:
    """The fields without effect that are set to a value which would change a vendor's answer."""
    given = asked.model_extra or {}
    return tuple(
        name
        for name, value in given.items()
        if name not in IGNORED and value not in (*NEUTRAL, DEFAULTS.get(name))
    )


def schema_of(form: Any, where: str) -> Mapping[str, Any] | None:
    """The JSON schema that an answer must fit; None if it may be any text."""
    kind = _get(form, "type")
    if kind in (None, "text"):
        return None
    if kind == "json_object":
        return {"type": "object"}
    schema = _get(_get(form, "json_schema", form), "schema")
    if kind != "json_schema" or not isinstance(schema, Mapping):
        raise invalid(
            f"{where}: got {shown(form)}, expected the type text, json_object, or json_schema with "
            "a schema"
        )
    return schema


def forced(tools: Sequence[ToolSpec], choice: Any) -> tuple[ToolSpec, ...]:
    """The tools one of which a reply must call: `choice` is a word, or names a tool."""
    if not tools or choice in (None, "none", "auto") or _is_list(choice):
        return ()
    if choice in ("required", "any"):
        return tuple(tools)
    name = _get(_get(choice, "function", choice), "name")
    if found := tuple(tool for tool in tools if tool.name == name):
        return found
    names = ", ".join(tool.name for tool in tools)
    raise invalid(
        f"tool_choice: got {shown(choice)}, expected none, auto, required or one of the tools: "
        f"{names}"
    )


def unforced(
    tools: Sequence[ToolSpec], given: Any, choice: Any, parallel: bool | None
) -> tuple[str, ...]:
    """The arguments about tools that no sampler can enforce; `given` are the tools as sent."""
    if not tools:
        return ()
    strict = any(tool.get("strict") or (tool.get("function") or {}).get("strict") for tool in given)
    return (
        ("tool_choice",) * _is_list(choice)
        + ("parallel_tool_calls",) * (parallel is False)
        + ("tools.strict",) * strict
    )


def _is_list(choice: Any) -> bool:
    """Whether a tool choice is a subset of the tools, which has no effect."""
    return bool(_get(choice, "type") == "allowed_tools")


def _get(value: Any, key: str, other: Any = None) -> Any:
    """What an object of a request has under a key; None if it is no object."""
    return value.get(key, other) if isinstance(value, Mapping) else None
