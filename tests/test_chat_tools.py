"""Tool calls as models write them, well and badly."""

from __future__ import annotations

import json
from typing import Any

import pytest

from retrain.chat.formats.hermes import Hermes
from retrain.chat.tools import check_tools, parse_reply
from retrain.environment import ToolSpec

SEARCH = ToolSpec(
    "search",
    "Search.",
    {
        "type": "object",
        "properties": {
            "query": {"type": "string"},
            "limit": {"type": "integer"},
            "score": {"type": "number"},
            "exact": {"type": "boolean"},
            "order": {"enum": ["new", "old"]},
            "tags": {"type": "array", "items": {"type": "string"}},
            "page": {"type": ["integer", "null"]},
            "range": {"type": "object", "required": ["low"], "properties": {"low": {}}},
        },
        "required": ["query"],
    },
)
PING = ToolSpec("ping", "No arguments.")
TOOLS = (SEARCH, PING)
HERMES = Hermes()


def call(arguments: object, name: str = "search") -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


@pytest.mark.parametrize(
    "arguments",
    [
        {"query": "a"},
        {"query": "a", "limit": 3, "score": 3, "exact": True, "order": "new"},
        {"query": "a", "limit": 3.0, "score": 0.5, "tags": ["x", "y"], "page": None},
        {"query": "a", "page": 2, "range": {"low": 1, "high": 2}},
    ],
)
def test_arguments_that_fit_the_schema_are_passed_on(arguments: dict[str, Any]) -> None:
    [read] = parse_reply(call(arguments), TOOLS, HERMES).calls
    assert (read.name, read.arguments, read.error) == ("search", arguments, None)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ({}, "arguments: 'query' is a required property"),
        ({"query": 3}, "arguments.query: 3 is not of type 'string'"),
        ({"query": "a", "limit": True}, "arguments.limit: True is not of type 'integer'"),
        ({"query": "a", "limit": 2.5}, "arguments.limit: 2.5 is not of type 'integer'"),
        ({"query": "a", "exact": 1}, "arguments.exact: 1 is not of type 'boolean'"),
        ({"query": "a", "order": "up"}, "arguments.order: 'up' is not one of ['new', 'old']"),
        ({"query": "a", "tags": ["x", 1]}, "arguments.tags[1]: 1 is not of type 'string'"),
        ({"query": "a", "page": "2"}, "arguments.page: '2' is not of type 'integer', 'null'"),
        ({"query": "a", "range": {}}, "arguments.range: 'low' is a required property"),
        (
            {"query": "a", "colour": 1},
            "arguments: Additional properties are not allowed ('colour' was unexpected)",
        ),
    ],
)
def test_arguments_that_do_not_fit_are_an_error_that_says_where(
    arguments: dict[str, Any], error: str
) -> None:
    reply = parse_reply(call(arguments), TOOLS, HERMES)
    [read] = reply.calls
    assert reply.readable
    assert read.arguments == arguments
    assert read.error is not None
    assert read.error.startswith(error)


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        ("{oops}", "JSON"),
        ("", "JSON"),
        ('{"name": "ping", "arguments": {"x": NaN}}', "JSON"),
        ('{"name": "ping", "arguments": {"x": "\\ud800"}}', "JSON"),
        ("[" * 100_000, "JSON"),
        ("1" * 5_000, "JSON"),
        ("[]", "must be an object"),
        ('{"arguments": {}}', "must be an object"),
        ('{"name": 3}', "must be an object"),
        ('{"name": "ping", "arguments": "x"}', "arguments: got str"),
    ],
)
def test_a_call_that_cannot_be_read_is_an_error_and_no_exception(payload: str, error: str) -> None:
    reply = parse_reply(f"<tool_call>{payload}</tool_call>", TOOLS, HERMES)
    [read] = reply.calls
    assert not reply.readable
    assert read.error is not None
    assert error in read.error


def test_a_tool_that_is_not_offered_is_named_with_those_that_are() -> None:
    [read] = parse_reply(call({}, "pong"), TOOLS, HERMES).calls
    assert read.error == "there is no tool 'pong': the tools are search, ping"


def test_a_tool_without_arguments_may_be_called_without_any() -> None:
    [read] = parse_reply('<tool_call>{"name": "ping"}</tool_call>', TOOLS, HERMES).calls
    assert (read.arguments, read.error) == ({}, None)


def test_a_schema_may_allow_further_arguments() -> None:
    loose = ToolSpec("f", "", {"properties": {"a": {}}, "additionalProperties": True})
    strict = ToolSpec("f", "", {"properties": {}, "additionalProperties": False})
    assert parse_reply(call({"b": 1}, "f"), [loose], HERMES).calls[0].error is None
    assert parse_reply(call({"b": 1}, "f"), [strict], HERMES).calls[0].error is not None


@pytest.mark.parametrize(
    ("schema", "value", "error"),
    [
        ({"type": "integer", "maximum": 3}, 5, "arguments.a: 5 is greater than the maximum of 3"),
        ({"pattern": "^x"}, "y", "arguments.a: 'y' does not match '^x'"),
        ({"$ref": "#/$defs/word"}, 5, "arguments.a: 5 is not of type 'string'"),
        ({"$ref": "#/$defs/none"}, 5, "arguments can't be checked against the tool's schema"),
        ({"$ref": "https://example.invalid/x"}, 5, "arguments can't be checked"),
        (
            {"anyOf": [{"type": "string"}, {"type": "null"}]},
            5,
            "arguments.a: 5 is not of type 'string'; or 5 is not of type 'null'",
        ),
    ],
)
def test_every_keyword_of_json_schema_is_checked_and_nothing_is_fetched(
    schema: dict[str, Any], value: object, error: str
) -> None:
    parameters = {"properties": {"a": schema}, "$defs": {"word": {"type": "string"}}}
    [read] = parse_reply(call({"a": value}, "f"), [ToolSpec("f", "", parameters)], HERMES).calls
    assert read.error is not None
    assert read.error.startswith(error)


def test_several_calls_are_taken_out_of_the_text_in_order() -> None:
    text = f"First {call({}, 'ping')} then {call({'query': 'a'})} done.\n"
    reply = parse_reply(text, TOOLS, HERMES, first=7)
    assert reply.text == "First  then  done."
    assert [(c.name, c.id) for c in reply.calls] == [("ping", "call00007"), ("search", "call00008")]


@pytest.mark.parametrize(
    ("text", "reasoning", "calls"),
    [
        (f"<think>{call({}, 'ping')}</think>{call({'query': 'a'})}", False, ["search"]),
        (f"<think>{call({}, 'ping')}", False, []),
        (f"{call({}, 'ping')}</think>{call({'query': 'a'})}", True, ["search"]),
        (call({}, "ping"), True, []),
        (f"No </think> here {call({}, 'ping')}", False, ["ping"]),
    ],
)
def test_calls_in_the_reasoning_are_drafts(text: str, reasoning: bool, calls: list[str]) -> None:
    reply = parse_reply(text, TOOLS, HERMES, opener="<think>\n" if reasoning else "")
    assert [c.name for c in reply.calls] == calls


@pytest.mark.parametrize(
    ("tools", "error", "message"),
    [
        ([PING.as_template()], TypeError, "ToolSpec(name"),
        ([len], TypeError, "ToolSpec(name"),
        ([PING, PING], ValueError, "'ping'"),
        ([ToolSpec("f", "", {"properties": {"a": {"type": "int"}}})], ValueError,
         "'f': parameters.properties.a.type: 'int'"),
        ([ToolSpec("f", "", {"properties": {"a": {"items": {"type": "str"}}}})], ValueError,
         "parameters.properties.a.items.type: 'str'"),
        ([ToolSpec("f", "", {"properties": ["a"]})], ValueError,
         "parameters.properties: ['a']"),
        ([ToolSpec("f", "", {"properties": {"a": "string"}})], ValueError,
         "parameters.properties.a: 'string'"),
        ([ToolSpec("f", "", {"required": True})], ValueError,
         "parameters.required"),
        ([ToolSpec("f", "", {"default": len})], TypeError, "JSON"),
        ([ToolSpec("f", "", "string")], TypeError, "got 'string'"),  # type: ignore[arg-type]  # the mistake
    ],
)  # fmt: skip
def test_tools_that_cannot_be_offered_are_an_error(
    tools: list[Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error) as raised:
        check_tools(tools)
    assert message in str(raised.value)
