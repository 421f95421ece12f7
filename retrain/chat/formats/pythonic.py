"""Llama 3.2, Llama 4, LFM2: a list of Python calls, `[add(a=1, b=2), ping()]`.

Without markup the answer must begin with the list. It may be anywhere in the markup of LFM2,
`<|tool_call_start|>[...]<|tool_call_end|>`, and of Llama 4, `<|python_start|>[...]<|python_end|>`.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator, Sequence
from typing import Any, Final

from retrain.chat.formats.base import Format, Found, checked_json

_MARKED: Final = re.compile(
    r"(?:<\|tool_call_start\|>|<\|python_start\|>|<\|python_tag\|>)\s*(?=\[)"
)
_BARE: Final = re.compile(r"\s*(?=\[\s*[A-Za-z_][\w.]*\s*\()")
_END: Final = re.compile(r"\s*(?:<\|tool_call_end\|>|<\|python_end\|>)")
_PIECE: Final = re.compile(
    r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\[\](){}]|[^'"\[\](){}]+|['"]""", re.DOTALL
)
_JSON: Final = {"true": True, "false": False, "null": None}


class Pythonic(Format):
    """Python calls with keyword arguments, in a list."""

    tokens = ("<|tool_call_start|>", "<|tool_call_end|>", "<|python_start|>", "<|python_end|>",
              "<|python_tag|>")  # fmt: skip
    ends = ("<|eom_id|>", "<|eom|>")

    def find(self, text: str, start: int) -> Sequence[Found]:
        bare = _BARE.match(text, start)
        if bare is not None:
            return list(_list(text, bare.start(), bare.end()))
        found: list[Found] = []
        at = start
        while (marked := _MARKED.search(text, at)) is not None:
            found += _list(text, marked.start(), marked.end())
            at = found[-1].end if found else marked.end()
        return found


def _list(text: str, start: int, opening: int) -> Iterator[Found]:
    """The calls of the list that begins at `opening`."""
    closing = _closing(text, opening)
    if closing is None:
        yield Found(start, len(text), error="the list of calls is not closed")
        return
    behind = _END.match(text, closing)
    end = closing if behind is None else behind.end()
    try:
        calls = _calls(text[opening:closing])
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        yield Found(start, end, error=f"the calls are not valid Python: {error}")
        return
    for number, call in enumerate(calls):
        yield _read(end if number else start, end, call)
    if not calls:
        yield Found(start, end, error="got an empty list, expected calls")


def _closing(text: str, opening: int) -> int | None:
    """Where the bracket at `opening` is closed; None if it is not."""
    depth = 0
    for piece in _PIECE.finditer(text, opening):
        if piece[0] in "[({":
            depth += 1
        elif piece[0] in "])}":
            depth -= 1
            if not depth:
                return piece.end()
    return None


def _calls(source: str) -> list[ast.expr]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of escapes in strings
        body = ast.parse(source, mode="eval").body
    return body.elts if isinstance(body, ast.List) else [body]


def _read(start: int, end: int, call: ast.expr) -> Found:
    if not isinstance(call, ast.Call):
        return Found(start, end, error="the list must have calls such as add(a=1)")
    try:
        name = ast.unparse(call.func)
        if call.args or any(keyword.arg is None for keyword in call.keywords):
            return Found(start, end, name, error="arguments must be given by name, as in add(a=1)")
        arguments = {str(k.arg): checked_json(_value(k.value)) for k in call.keywords}
    except (ValueError, RecursionError) as error:
        return Found(start, end, error=f"the arguments are not values: {error}")
    return Found(start, end, name, arguments)


def _value(node: ast.expr) -> Any:
    """The JSON value of a literal; raises ValueError."""
    match node:
        case ast.Name(name) if name in _JSON:
            return _JSON[name]
        case ast.List(items) | ast.Tuple(items):
            return [_value(item) for item in items]
        case ast.Dict(keys, values):
            return {_key(key): _value(value) for key, value in zip(keys, values, strict=True)}
        case ast.UnaryOp(ast.USub(), ast.Constant(int() | float() as number)):
            return -number
        case ast.Constant(value):
            return value
    raise ValueError(f"got {type(node).__name__}, expected a literal")


def _key(node: ast.expr | None) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    raise ValueError("got a key that is not a string")
