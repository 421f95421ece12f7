"""OpenAI's API of responses.

The endpoint keeps the history of each answer as long as the rollout is under way, so that
`previous_response_id` continues it. `store` has no effect.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from retrain.agents import api
from retrain.agents.calls import Reply
from retrain.agents.openai import ROLES, Top, function_of, only_sampled
from retrain.errors import shown
from retrain.types import Message

Item = dict[str, Any]
REFUSED = ("conversation", "background", "prompt")
"""Arguments that need what a vendor keeps."""
LOGPROBS = "message.output_text.logprobs"
_NAMES = {"max_output_tokens": "max_tokens", "temperature": "temperature", "top_p": "top_p"}


class _TextConfig(api.Wire):
    format: Item | None = None


class _ResponseBody(api.Wire):
    model: str = ""
    input: str | list[Item] = ""
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[Item] | None = None
    tool_choice: str | Item | None = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: api.Tokens | None = None
    temperature: api.Temperature | None = None
    top_p: api.TopP | None = None
    top_logprobs: Top | None = None
    text: _TextConfig | None = None
    include: list[str] | None = None
    metadata: dict[str, Any] | None = None
    stream: bool | None = False

    @property
    def form(self) -> Item | None:
        """What the answer must look like."""
        return self.text.format if self.text else None


class Responses:
    """`POST /responses`."""

    prefix = "resp"

    def read(self, body: Mapping[str, Any]) -> api.Request:
        asked = api.parse(_ResponseBody, body)
        for name in filter(body.get, REFUSED):
            raise api.invalid(f"{name}: not supported by the endpoint; send the call without it")
        messages = _messages(asked.input)
        if not messages and asked.previous_response_id is None:
            raise api.invalid("input: got no items, expected at least one")
        top = asked.top_logprobs or 0
        return api.request_of(
            asked,
            messages,
            options=api.options_of(asked, _NAMES),
            tools=api.offered(asked.tools or (), function_of),
            choice=asked.tool_choice,
            parallel=asked.parallel_tool_calls,
            form=("text.format", asked.form),
            top=top,
            unused=("include",) * bool({*(asked.include or ())} - {LOGPROBS}),
            system=asked.instructions or "",
            previous=asked.previous_response_id or "",
            refused=only_sampled("top_logprobs", top),
        )

    def answer(
        self, request: api.Request, answer_id: str, replies: Sequence[Reply], decode: api.Decode
    ) -> dict[str, Any]:
        asked, [reply] = request.body, replies
        whole = api.finish(reply) != "length"
        wanted = LOGPROBS in (asked.include or ())
        logprobs = api.logprobs_of(reply, decode) if wanted else []
        return {
            "id": answer_id,
            "object": "response",
            "created_at": int(time.time()),
            "status": "completed" if whole else "incomplete",
            "error": None,
            "incomplete_details": None if whole else {"reason": "max_output_tokens"},
            "model": request.model,
            "output": _output(reply, answer_id, whole, logprobs),
            "usage": _usage(reply),
            # What an answer repeats of its request.
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": True,
            "previous_response_id": asked.previous_response_id,
            "temperature": asked.temperature,
            "text": {"format": asked.form or {"type": "text"}},
            "tool_choice": asked.tool_choice or "auto",
            "tools": asked.tools or [],
            "top_p": asked.top_p,
            "truncation": "disabled",
        }

    def events(self, request: api.Request, answer: dict[str, Any]) -> Iterator[api.Event]:
        """Each item in whole, in the order in which SDKs accumulate them."""
        begun = {**answer, "status": "in_progress", "output": [], "usage": None}
        begun["incomplete_details"] = None
        events: list[Item] = [
            {"type": "response.created", "response": begun},
            {"type": "response.in_progress", "response": begun},
        ]
        for index, item in enumerate(answer["output"]):
            place = {"output_index": index, "item": item}
            content = "arguments" if item["type"] == "function_call" else "content"
            empty = {**item, "status": "in_progress", content: item[content][:0]}
            events.append({"type": "response.output_item.added", **place, "item": empty})
            at = {"item_id": item["id"], "output_index": index}
            events += _CHANGES[item["type"]](item, at)
            events.append({"type": "response.output_item.done", **place})
        events.append({"type": f"response.{answer['status']}", "response": answer})
        for number, event in enumerate(events):
            yield event["type"], {**event, "sequence_number": number}


def _messages(items: str | Sequence[Item]) -> list[Message]:
    """The messages of an input; a turn of the model is several items, but one message."""
    if isinstance(items, str):
        return [api.message_of("user", items)] if items else []
    messages: list[dict[str, Any]] = []
    for number, item in enumerate(items):
        where = f"input.{number}"
        kind = item.get("type") or "message"
        if kind not in tuple(_ITEMS):  # it may be no string
            raise api.invalid(
                f"{where}: got an item of type {shown(kind)}, expected one of {', '.join(_ITEMS)}"
            )
        _ITEMS[kind](messages, item, where)
    return [api.message_of(**message) for message in messages]


def _turn(messages: list[dict[str, Any]], ended_by: Sequence[str]) -> dict[str, Any]:
    """The turn of the model that an item belongs to: a new one if the last has these parts."""
    last = messages[-1] if messages else {}
    if last.get("role") != "assistant" or any(last.get(part) for part in ended_by):
        messages.append({"role": "assistant", "content": ""})
    return messages[-1]


def _add_message(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    role, text = item.get("role"), api.text_of(item.get("content"), f"{where}.content")
    if not isinstance(role, str) or ROLES.get(role, "tool") == "tool":
        got = shown(role)
        raise api.invalid(f"{where}.role: got {got}, expected user, assistant, system or developer")
    if role == "assistant":
        _turn(messages, ("content", "tool_calls"))["content"] = text
    else:
        messages.append({"role": ROLES[role], "content": text})


def _add_reasoning(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    text = api.text_of(item.get("content") or item.get("summary"), f"{where}.content")
    turn = _turn(messages, ("content", "tool_calls", "reasoning_content"))
    turn["reasoning_content"] = text


def _add_call(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    name, call_id = _named(item, "name", where), _named(item, "call_id", where)
    call = api.call_of(name, item.get("arguments", "{}"), call_id, where)
    _turn(messages, ()).setdefault("tool_calls", []).append(call)


def _add_output(messages: list[dict[str, Any]], item: Item, where: str) -> None:
    text = api.text_of(item.get("output"), f"{where}.output")
    call_id = _named(item, "call_id", where)
    messages.append({"role": "tool", "content": text, "tool_call_id": call_id})


def _named(item: Item, key: str, where: str) -> str:
    value = item.get(key)
    if not isinstance(value, str):
        raise api.invalid(f"{where}.{key}: got {shown(value)}, expected a string")
    return value


_ITEMS = {
    "message": _add_message,
    "reasoning": _add_reasoning,
    "function_call": _add_call,
    "function_call_output": _add_output,
}


def _output(
    reply: Reply, answer_id: str, whole: bool, logprobs: Sequence[Mapping[str, Any]]
) -> list[Item]:
    status = "completed" if whole else "incomplete"
    items: list[Item] = []
    if reply.reasoning:
        content = [{"type": "reasoning_text", "text": reply.reasoning}]
        items.append({"type": "reasoning", "summary": [], "content": content})
    if reply.text.strip() or not reply.tool_calls:
        part = {"type": "output_text", "text": reply.text, "annotations": [], "logprobs": logprobs}
        items.append({"type": "message", "role": "assistant", "content": [part]})
    items += [
        {
            "type": "function_call",
            "call_id": call.id,
            "name": call.name,
            "arguments": api.arguments_of(call.arguments),
        }
        for call in reply.tool_calls
    ]
    name = answer_id.removeprefix("resp-")
    return [
        {"id": f"{_PREFIXES[item['type']]}-{name}-{number}", **item, "status": status}
        for number, item in enumerate(items)
    ]


_PREFIXES = {"reasoning": "rs", "message": "msg", "function_call": "fc"}


def _parts(item: Item, at: Item) -> list[Item]:
    [part] = item["content"]
    name = f"response.{part['type']}"
    at = {**at, "content_index": 0}
    more = {"logprobs": part["logprobs"]} if "logprobs" in part else {}
    return [
        {"type": "response.content_part.added", **at, "part": {**part, "text": ""}},
        {"type": f"{name}.delta", **at, "delta": part["text"], **more},
        {"type": f"{name}.done", **at, "text": part["text"], **more},
        {"type": "response.content_part.done", **at, "part": part},
    ]


def _arguments(item: Item, at: Item) -> list[Item]:
    name, text = "response.function_call_arguments", item["arguments"]
    return [
        {"type": f"{name}.delta", **at, "delta": text},
        {"type": f"{name}.done", **at, "name": item["name"], "arguments": text},
    ]


_CHANGES = {"reasoning": _parts, "message": _parts, "function_call": _arguments}


def _usage(reply: Reply) -> dict[str, Any]:
    sampled = len(reply.completion.token_ids)
    return {
        "input_tokens": reply.prompt_tokens,
        "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
        "output_tokens": sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": reply.prompt_tokens + sampled,
    }
