"""OpenAI's API of chat completions, and what its other APIs share with it."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, cast

from pydantic import Field

from retrain.agents import api
from retrain.agents.calls import NOTHING, CallError, Reply
from retrain.chat.adapting import with_text_arguments
from retrain.types import Message

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
"""The roles of the API, as templates name them."""
TEXTS = frozenset({"role", "content", "tool_call_id", "name", "reasoning_content"})
"""The fields of a message that are strings."""
DONE: api.Event = ("", "[DONE]")
NO_PREFILL = "got true, but a run's replies begin a turn; end with a message of the user"
Count = Annotated[int, Field(ge=1, le=128)]
Top = Annotated[int, Field(ge=0, le=api.TOP)]


class _Function(api.Wire):
    name: str
    arguments: str | dict[str, Any] = "{}"


class _Call(api.Wire):
    id: str = ""
    function: _Function


class _ChatMessage(api.Wire):
    role: str
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[_Call] | None = None
    function_call: _Function | None = None
    tool_call_id: str | None = None
    name: str | None = None
    reasoning_content: str | None = None


class _StreamOptions(api.Wire):
    include_usage: bool = False


class Sampling(api.Wire):
    model: str = ""
    stream: bool | None = False
    stream_options: _StreamOptions | None = None
    n: Count | None = 1
    max_tokens: api.Tokens | None = None
    max_completion_tokens: api.Tokens | None = None
    temperature: api.Temperature | None = None
    top_p: api.TopP | None = None
    top_k: api.TopK | None = None
    stop: api.Stop | None = None
    seed: api.Seed | None = None


class _ChatBody(Sampling):
    messages: Annotated[list[dict[str, Any]], Field(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    functions: list[dict[str, Any]] | None = None
    """What `tools` was called before."""
    function_call: str | dict[str, Any] | None = None
    logprobs: bool | None = False
    top_logprobs: Top | None = None
    response_format: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    """Of vLLM, and so is the next."""
    add_generation_prompt: bool | None = None


NAMES = {
    "max_tokens": "max_tokens",
    "max_completion_tokens": "max_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "stop": "stop",
    "seed": "seed",
}


class ChatCompletions:
    """`POST /chat/completions`."""

    prefix = "chatcmpl"

    def read(self, body: Mapping[str, Any]) -> api.Request:
        asked = api.parse(_ChatBody, body)
        messages = [_message(raw, f"messages.{i}") for i, raw in enumerate(asked.messages)]
        top, continues = asked.top_logprobs or 0, _continues(asked, messages)
        if top and not asked.logprobs:
            raise api.invalid("top_logprobs: expected it with logprobs: true")
        prefill = {"continue_final_message": NO_PREFILL} if continues else {}
        return api.request_of(
            asked,
            messages,
            options=api.options_of(asked, NAMES),
            tools=api.offered(asked.tools or asked.functions or (), function_of),
            choice=asked.tool_choice or asked.function_call,
            parallel=asked.parallel_tool_calls,
            form=("response_format", asked.response_format),
            top=top,
            continues=continues,
            n=asked.n or 1,
            refused={**only_sampled("top_logprobs", top), **prefill},
        )

    def answer(
        self, request: api.Request, answer_id: str, replies: Sequence[Reply], decode: api.Decode
    ) -> dict[str, Any]:
        asked, choices = request.body, []
        for index, reply in enumerate(replies):
            message, reason = _said(reply), api.finish(reply)
            if asked.functions and not asked.tools and "tool_calls" in message:
                message["function_call"] = message.pop("tool_calls")[0]["function"]
                reason = "function_call"
            found = {"content": api.logprobs_of(reply, decode), "refusal": None}
            choice = {"index": index, "message": message, "finish_reason": reason}
            choices.append({**choice, "logprobs": found if asked.logprobs else None})
        return envelope("chat.completion", answer_id, request, choices, replies)

    def head(self, request: api.Request, answer_id: str) -> dict[str, Any]:
        return head_of("chat.completion.chunk", answer_id, request)

    def delta(self, head: Mapping[str, Any], index: int, text: str, first: bool) -> api.Event:
        said = {"role": "assistant"} if first else {}
        choice = {"index": index, "delta": {**said, "content": text}, "finish_reason": None}
        return "", {**head, "choices": [choice]}

    def events(
        self, request: api.Request, answer: dict[str, Any], sent: Mapping[int, str] = NOTHING
    ) -> Iterator[api.Event]:
        """The rest of the message in one event per choice, then its end, as SDKs accumulate
        them."""
        head = {**answer, "object": "chat.completion.chunk"}
        usage = head.pop("usage")
        for choice in answer["choices"]:
            delta = dict(choice["message"])
            if (before := sent.get(choice["index"])) is not None:
                del delta["role"]
                delta["content"] = api.rest_of(delta["content"] or "", before)
            if calls := delta.get("tool_calls"):
                delta["tool_calls"] = [{"index": i, **call} for i, call in enumerate(calls)]
            first = {"index": choice["index"], "delta": delta, "finish_reason": None}
            last = {"index": choice["index"], "delta": {}, "finish_reason": choice["finish_reason"]}
            yield "", {**head, "choices": [first | {"logprobs": choice["logprobs"]}]}
            yield "", {**head, "choices": [last]}
        yield from ending(request, head, usage)


def error_body(error: CallError) -> dict[str, Any]:
    """An error as OpenAI's SDKs read it."""
    kind = "invalid_request_error" if error.status < 500 else "server_error"
    return {"error": {"message": str(error), "type": kind, "param": None, "code": error.code}}


def function_of(tool: Mapping[str, Any]) -> Mapping[str, Any]:
    """A tool; raises ValueError unless it is a function that the agent runs."""
    if tool.get("type", "function") != "function":
        raise ValueError(f"got a tool of type {tool['type']!r}, expected type 'function'")
    return tool


def _plain(raw: Mapping[str, Any]) -> Message | None:
    """A message of strings only, which most are: each call repeats its whole history."""
    given = {key: value for key, value in raw.items() if value is not None and value != ""}
    if not TEXTS.issuperset(given) or {*map(type, given.values())} != {str}:
        return None
    role = ROLES.get(given.get("role", ""))
    return None if role is None else cast(Message, {"content": "", **given, "role": role})


def _message(raw: Mapping[str, Any], where: str) -> Message:
    if plain := _plain(raw):
        return plain
    message = api.parse(_ChatMessage, raw, where)
    if message.role not in ROLES:
        raise api.invalid(f"{where}.role: got {message.role!r}, expected one of {', '.join(ROLES)}")
    calls = [
        api.call_of(c.function.name, c.function.arguments, c.id, f"{where}.tool_calls.{i}")
        for i, c in enumerate(message.tool_calls or ())
    ]
    if (call := message.function_call) is not None:
        calls.append(api.call_of(call.name, call.arguments, "", f"{where}.function_call"))
    return api.message_of(
        ROLES[message.role],
        api.text_of(message.content, f"{where}.content"),
        reasoning_content=message.reasoning_content,
        tool_calls=calls,
        tool_call_id=message.tool_call_id,
        name=message.name,
    )


def _continues(asked: _ChatBody, messages: Sequence[Message]) -> bool:
    """Whether the reply continues the last message; raises CallError 400 if it can't."""
    continues, last = bool(asked.continue_final_message), messages[-1]
    if asked.add_generation_prompt is continues:
        raise api.invalid(
            f"add_generation_prompt: got {str(continues).lower()}, expected the opposite of "
            "continue_final_message"
        )
    if not continues:
        return False
    if last["role"] != "assistant" or not last["content"].strip() or last.get("tool_calls"):
        raise api.invalid(
            "continue_final_message: got true, expected a last message of the assistant with text "
            "and without tool calls"
        )
    return True


def only_sampled(name: str, got: int, most: int = 0) -> dict[str, str]:
    """Why a run rejects `top_logprobs`, by its name."""
    if got <= most:
        return {}
    return {
        name: f"got {got}, expected at most {most}: the endpoint of a run returns the log-probs of "
        "sampled tokens only"
    }


def _said(reply: Reply) -> dict[str, Any]:
    said: dict[str, Any] = {**reply.message, "refusal": None}
    if reply.reasoning:
        said["reasoning_content"] = reply.reasoning
    if reply.tool_calls:
        said |= {**with_text_arguments(reply.message), "content": reply.text or None}
    return said


def head_of(kind: str, answer_id: str, request: api.Request) -> dict[str, Any]:
    created = int(time.time())
    return {"id": answer_id, "object": kind, "created": created, "model": request.model}


def envelope(
    kind: str,
    answer_id: str,
    request: api.Request,
    choices: Sequence[Mapping[str, Any]],
    replies: Sequence[Reply],
) -> dict[str, Any]:
    sampled = sum(len(reply.completion.token_ids) for reply in replies)
    prompt = sum(reply.prompt_tokens for reply in replies[:: request.n])
    return {
        **head_of(kind, answer_id, request),
        "choices": list(choices),
        "usage": {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
        },
    }


def ending(
    request: api.Request, head: dict[str, Any], usage: dict[str, Any]
) -> Iterable[api.Event]:
    options = request.body.stream_options
    if options is not None and options.include_usage:
        yield "", {**head, "choices": [], "usage": usage}
    yield DONE
