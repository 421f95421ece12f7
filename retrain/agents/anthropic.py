"""Anthropic's API of messages."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal

from pydantic import Field

from retrain.agents import api
from retrain.agents.calls import CallError, Reply
from retrain.errors import shown
from retrain.types import Message

Block = dict[str, Any]
KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
}
"""Names of errors; others are `invalid_request_error` below status 500, else `api_error`."""
_NAMES = {
    "max_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop_sequences": "stop",
}


class _Turn(api.Wire):
    role: Literal["user", "assistant", "system"]
    content: str | list[Block]


class _ToolChoice(api.Wire):
    type: Literal["auto", "any", "tool", "none"]
    disable_parallel_tool_use: bool = False
    name: str | None = None


class _OutputConfig(api.Wire):
    format: Block | None = None


class _CountBody(api.Wire):
    """What `count_tokens` gets, too."""

    model: str = ""
    messages: Annotated[list[_Turn], Field(min_length=1)]
    system: str | list[Block] | None = None
    tools: list[Block] | None = None
    tool_choice: _ToolChoice | None = None
    output_config: _OutputConfig | None = None
    output_format: Block | None = None
    """What `output_config.format` was called before."""
    stream: bool | None = False


class _MessagesBody(_CountBody):
    max_tokens: api.Tokens
    temperature: api.Temperature | None = None
    top_p: api.TopP | None = None
    top_k: api.TopK | None = None
    stop_sequences: api.Stop | None = None
    thinking: Block | None = None


class Messages:
    """`POST /messages`."""

    prefix = "msg"

    def read(self, body: Mapping[str, Any]) -> api.Request:
        return _request(api.parse(_MessagesBody, body))

    def answer(
        self, request: api.Request, answer_id: str, replies: Sequence[Reply], decode: api.Decode
    ) -> dict[str, Any]:
        [reply] = replies
        reason, sequence = _ending(reply)
        thinking = request.body.thinking or {}
        return {
            "id": answer_id,
            "type": "message",
            "role": "assistant",
            "model": request.model,
            "content": _content(reply, thinking.get("type", "disabled") != "disabled"),
            "stop_reason": reason,
            "stop_sequence": sequence,
            "usage": {
                "input_tokens": reply.prompt_tokens,
                "cache_creation_input_tokens": 0,
                "cache_read_input_tokens": 0,
                "output_tokens": len(reply.completion.token_ids),
            },
        }

    def events(self, request: api.Request, answer: dict[str, Any]) -> Iterator[api.Event]:
        """Each block in one delta, as SDKs accumulate them."""
        usage = answer["usage"]
        ending = {key: answer[key] for key in ("stop_reason", "stop_sequence")}
        begun = {**answer, "content": [], **dict.fromkeys(ending)}
        begun["usage"] = {**usage, "output_tokens": 0}
        yield _event({"type": "message_start", "message": begun})
        for index, block in enumerate(answer["content"]):
            empty, delta = _in_parts(block)
            at = {"index": index}
            yield _event({"type": "content_block_start", **at, "content_block": empty})
            yield _event({"type": "content_block_delta", **at, "delta": delta})
            yield _event({"type": "content_block_stop", **at})
        yield _event({"type": "message_delta", "delta": ending, "usage": usage})
        yield _event({"type": "message_stop"})


def read_count(body: Mapping[str, Any]) -> api.Request:
    """`POST /messages/count_tokens`."""
    return _request(api.parse(_CountBody, body))


def error_body(error: CallError) -> dict[str, Any]:
    """An error as Anthropic's SDKs read it."""
    other = "invalid_request_error" if error.status < 500 else "api_error"
    kind = KINDS.get(error.status, other)
    return {"type": "error", "error": {"type": kind, "message": str(error)}}


def _request(asked: _CountBody) -> api.Request:
    messages = [m for i, given in enumerate(asked.messages) for m in _messages(given, i)]
    if messages[-1]["role"] == "assistant":
        raise api.invalid(
            "messages: the last message is the assistant's, which the endpoint can't continue; "
            "end with a message of the user"
        )
    if system := api.text_of(asked.system, "system"):
        messages.insert(0, api.message_of("system", system))
    choice = asked.tool_choice or _ToolChoice(type="auto")
    form: tuple[str, Block | None] = "output_format", asked.output_format
    if asked.output_config is not None and asked.output_config.format is not None:
        form = "output_config", asked.output_config.format
    return api.request_of(
        asked,
        messages,
        options=api.options_of(asked, _NAMES),
        tools=api.offered(asked.tools or (), _function),
        choice={"name": choice.name} if choice.type == "tool" else choice.type,
        parallel=not choice.disable_parallel_tool_use,
        form=form,
    )


def _function(tool: Block) -> dict[str, Any]:
    if tool.get("type") not in (None, "custom"):
        raise ValueError(f"got a tool of type {shown(tool['type'])}, expected type 'custom'")
    return {
        "name": tool.get("name"),
        "description": tool.get("description"),
        "parameters": tool.get("input_schema"),
    }


def _messages(message: _Turn, number: int) -> list[Message]:
    """A message in the form of templates: each result of a tool is a separate message."""
    where = f"messages.{number}.content"
    if isinstance(message.content, str):
        return [api.message_of(message.role, message.content)]
    if message.role == "assistant":
        return [_said(message.content, where)]
    found, texts = [], []
    for index, block in enumerate(message.content):
        if block.get("type") == "tool_result":
            text = api.text_of(block.get("content"), f"{where}.{index}.content")
            found.append(api.message_of("tool", text, tool_call_id=block.get("tool_use_id")))
        else:
            texts.append(block)
    if texts or not found:
        found.append(api.message_of(message.role, api.text_of(texts, where)))
    return found


def _said(blocks: Sequence[Block], where: str) -> Message:
    """A turn of the model."""
    texts, thoughts, calls = [], [], []
    for index, block in enumerate(blocks):
        kind = block.get("type")
        if kind == "tool_use":
            name, call_id = str(block.get("name")), str(block.get("id"))
            calls.append(api.call_of(name, block.get("input"), call_id, f"{where}.{index}"))
        elif kind == "thinking":
            thoughts.append(str(block.get("thinking", "")))
        elif kind != "redacted_thinking":
            texts.append(block)
    thought = "\n".join(thoughts)
    text = api.text_of(texts, where)
    return api.message_of("assistant", text, reasoning_content=thought, tool_calls=calls)


def _content(reply: Reply, with_thinking: bool) -> list[Block]:
    blocks: list[Block] = []
    if reply.reasoning and with_thinking:
        blocks.append({"type": "thinking", "thinking": reply.reasoning, "signature": ""})
    if reply.text.strip() or not reply.tool_calls:
        blocks.append({"type": "text", "text": reply.text})
    blocks += [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": dict(call.arguments)}
        for call in reply.tool_calls
    ]
    return blocks


def _in_parts(block: Block) -> tuple[Block, Block]:
    """How a block begins in a stream, and its only delta."""
    kind = block["type"]
    if kind == "tool_use":
        text = api.arguments_of(block["input"])
        return {**block, "input": {}}, {"type": "input_json_delta", "partial_json": text}
    return {**block, kind: ""}, {"type": f"{kind}_delta", kind: block[kind]}


def _ending(reply: Reply) -> tuple[str, str | None]:
    """The stop reason, and the stop sequence that ended the reply."""
    if reply.tool_calls:
        return "tool_use", None
    if reply.completion.stop_reason != "stop":
        return "max_tokens", None
    return ("stop_sequence", reply.stop) if reply.stop else ("end_turn", None)


def _event(data: dict[str, Any]) -> api.Event:
    return data["type"], data
