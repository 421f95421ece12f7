"""`${NAME}` and `${NAME:-default}` in a config: values from the environment.

- Every string is filled in, except the prompts that a config lists itself. `$${` is a literal `${`.
- A key whose whole value is one variable may be a number, a boolean or null; in lists, `env` and
  `headers` it is a string.
- What was filled in into a plug-in's keys may be a secret: it is a `Filled`, and files have the
  text of the config in its place.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any

from retrain.config.hints import is_secret
from retrain.supervision.jsonable import Filled

_VARIABLE = re.compile(r"\$\$\{|\$\{([^{}]*)\}?")
_NAMED = re.compile(r"(\w+)(?::-(.*))?", re.DOTALL)
_TYPED = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_WORDS = {"true": True, "false": False, "null": None}
_STRINGS = ("env", "headers")
"""Sections in which all values are strings."""
Problems = dict[str, str]
"""What is wrong, by dotted path."""


def filled_in(value: Any, problems: Problems, path: str = "") -> Any:
    """`value` with its variables filled in; adds those that are not set to `problems`."""

    def fill(text: str, here: str) -> Any:
        if "${" not in text:
            return text
        wrong: list[str] = []
        found = _VARIABLE.sub(lambda match: _value(match, wrong), text)
        if wrong:
            problems[here] = "; ".join(dict.fromkeys(wrong))
            return text
        literal = text.replace("$${", "")
        if "${" not in literal:
            return found
        return _typed(found, text, here) if _VARIABLE.fullmatch(text) else Filled(found, text)

    return _changed(value, fill, path)


def escaped(value: Any) -> Any:
    """`value` in the form that `filled_in` reads back: with `$${` for a literal `${`."""
    return _changed(
        value, lambda text, _: text if isinstance(text, Filled) else text.replace("${", "$${"), ""
    )


def _typed(found: str, text: str, path: str) -> Any:
    """The value of a key that is one variable."""
    section, _, key = path.rpartition(".")
    if key.isdigit() or is_secret(key) or section.rpartition(".")[2] in _STRINGS:
        return Filled(found, text)
    if number := _TYPED.fullmatch(found):
        return float(found) if number[2] or number[3] else int(found)
    return _WORDS[found] if found in _WORDS else Filled(found, text)


def _value(match: re.Match[str], wrong: list[str]) -> str:
    if match[1] is None:
        return "${"
    named = _NAMED.fullmatch(match[1]) if match[0].endswith("}") else None
    if named is None:
        wrong.append(
            f"got {match[0]!r}, expected ${{NAME}} or ${{NAME:-default}}. For a literal ${{ write "
            "$${"
        )
        return ""
    name, default = named.groups()
    found = os.environ.get(name)
    if found is None and default is None:
        wrong.append(
            f"the environment variable {name} is not set. Set it, give a default by "
            f"${{{name}:-default}}, or write $${{{name}}} for a literal ${{{name}}}"
        )
    return found or default or ""


def _changed(value: Any, change: Callable[[str, str], Any], path: str) -> Any:
    """`value` with its strings changed by (string, dotted path), but for rows of prompts."""
    if isinstance(value, str):
        return change(value, path)
    if isinstance(value, Mapping):
        return {
            key: inner
            if isinstance(inner, list) and key in ("rows", "prompts")
            else _changed(inner, change, f"{path}.{key}".lstrip("."))
            for key, inner in value.items()
        }
    if isinstance(value, list | tuple):
        return [_changed(inner, change, f"{path}.{i}") for i, inner in enumerate(value)]
    return value
