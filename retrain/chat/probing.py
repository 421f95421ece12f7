"""Which tool-call format a chat template writes, found by rendering a message with a call."""

from __future__ import annotations

import sys
from functools import cache
from typing import cast

from retrain.chat.formats.base import Format, Found
from retrain.chat.template import PROBE_CALL, Template
from retrain.config.plugins import PACKAGE, Kind, built_in_names, find_plugin

KIND = Kind("tool format", Format)
_VARIANTS = ((False, ""), (True, ""), (True, None), (False, None))
"""How templates take a call: arguments as text or not, with empty content or without any."""


@cache
def formats() -> dict[str, Format]:
    """The built-in formats by their names."""
    return {name: format_named(name) for name in built_in_names(KIND.name)}


@cache
def format_named(name: str) -> Format:
    """The built-in format of this name; raises PluginError."""
    return cast(Format, find_plugin(KIND, name, "chat.tools", PACKAGE)())


def inferred(template: Template) -> Format | None:
    """The format of the template's own calls; None if it is unknown.

    A template that shows no calls, or not those of the probe, may still name the markup of one.
    """
    for text, content in _VARIANTS:
        said = template.with_calls(1, text=text, content=content)
        for form in formats().values() if said else ():
            if _same(form, said, 1):
                return form
    named = [form for form in formats().values() if form.tokens[0] in template.source]
    return named[0] if len(named) == 1 else None


def most_calls(template: Template, form: Format) -> int:
    """How many calls of one message the template writes in the format."""
    for count in (2, 1):
        if _same(form, template.with_calls(count, text=template.calls_as_text), count):
            return sys.maxsize if count > 1 else count
    return 0


def _same(form: Format, said: str, count: int) -> bool:
    """Whether `form` reads the calls that a template wrote."""
    found = form.find(said, form.answer_start(said, ""))
    return len(found) == count and all(map(_is_probe, found))


def _is_probe(found: Found) -> bool:
    own = (PROBE_CALL["name"], PROBE_CALL["arguments"], None)
    return (found.name, {**found.arguments}, found.error) == own
