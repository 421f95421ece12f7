"""YAML files and `key=value` arguments as plain values.

The loader is safe, reads `1e-5` as a number, and rejects a key that appears twice in one mapping.
No message quotes the YAML, which may contain a secret.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from retrain.config.paths import broken_link, neighbours
from retrain.errors import ConfigError, shown

_log = logging.getLogger(__name__)
_TEXTS = frozenset({"after", "marker", "pattern", "system", "template"})
"""Keys whose values may well contain a #."""
_COMMENT = re.compile(r"[ \t]+#(#?)")
Marks = dict[str, int]
"""The line number of each dotted path."""


class _Loader(yaml.SafeLoader):
    """SafeLoader with the floats of YAML 1.2: PyYAML reads `1e-5` as a string."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_config_file(path: Path) -> tuple[dict[str, Any], Marks]:
    """The mapping in the file, and the line of each key.

    Raises ConfigError if there is no such file, or it contains no YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        missing = broken_link(path) or f"file not found: {path}{neighbours(path)}"
        raise ConfigError(missing) from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8: byte {error.start} can't be decoded") from None
    except OSError as error:
        raise ConfigError(f"can't read {path}: {error.strerror}{neighbours(path)}") from None
    value, marks = parse_yaml(text, source=str(path))
    if not isinstance(value, dict):
        got = "the file is empty" if value is None else f"contains a {_kind(value)}"
        wanted = "expected a mapping (`model: ...`, `prompts: ...`)"
        raise ConfigError(f"{got}, {wanted}", source=str(path))
    return value, marks


def parse_yaml(text: str, source: str = "") -> tuple[Any, Marks]:
    """The single YAML document in `text`, and its keys' lines. Raises ConfigError."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        marks: Marks = {}
        twice: list[str] = []
        for path, scalar in _scalars(node, "", marks, twice):
            _warn_of_comment(path, scalar, text, f"{source}: " if source else "")
        value = loader.construct_document(node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        context = f" {error.context}" if error.context else ""
        raise ConfigError(f"{where}invalid YAML: {error.problem}{context}", source=source) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # odd characters, dates, aliases
        line = str(error).splitlines()[0]
        raise ConfigError(f"invalid YAML: {line}", source=source) from None
    finally:
        loader.dispose()
    if twice:
        raise ConfigError(*twice, source=source)
    return value, marks


def _warn_of_comment(path: str, node: Any, text: str, head: str) -> None:
    """Warn of a string without quotes that a comment may end by mistake: before ##, and one of
    `_TEXTS` before any #."""
    comment = _COMMENT.match(text, node.end_mark.index) if node.style is None else None
    is_text = path.rpartition(".")[2] in _TEXTS
    if comment and (is_text or (comment[1] and node.tag.endswith(":str"))):
        _log.warning(
            "%sline %d: %s ends before the #, which starts a comment in YAML. If the # belongs to "
            "the value, put the value in quotes",
            head, node.end_mark.line + 1, path or "the value",
        )  # fmt: skip


def parse_override(text: str) -> tuple[list[str], Any]:
    """The path and the value of `key=value`; the value is parsed as YAML."""
    key, equals, value = text.partition("=")
    path = key.strip().split(".")
    if not equals or not all(path):
        raise ConfigError(
            f"argument {shown(text)}: expected dotted.key=value, such as train.seed=1"
        )
    try:
        return path, parse_yaml(value)[0]
    except ConfigError as error:
        raise ConfigError(f"argument {key}=...: {'; '.join(error.problems)}") from None


def apply_override(config: dict[str, Any], path: Sequence[str], value: Any) -> None:
    """Set the value at `path`, and create missing sections.

    A number in the path is an index into a list; the index after the last one appends.
    Raises ConfigError if the path leads through a value that is not a section.
    """
    holder: Any = config
    for depth, key in enumerate(path):
        here = ".".join(path[:depth])
        slot: Any = key
        if isinstance(holder, list):
            slot = _index(holder, key, here)
            if slot == len(holder):
                holder.append(None)
        elif not isinstance(holder, dict):
            raise ConfigError(
                f"argument {'.'.join(path)}=...: {here} is a {_kind(holder)}, expected a section"
            )
        if depth == len(path) - 1:
            holder[slot] = value
            return
        if isinstance(holder, dict) and key not in holder:
            holder[key] = [] if path[depth + 1].isdigit() else {}
        elif holder[slot] is None:
            holder[slot] = {}
        holder = holder[slot]


def _index(items: list[Any], key: str, here: str) -> int:
    if not key.isdigit() or int(key) > len(items):
        raise ConfigError(
            f"argument {here}.{key}=...: {here} is a list of {len(items)}; expected an index from "
            f"0 to {len(items)}, such as {here}.0"
        )
    return int(key)


def _scalars(
    node: Any, path: str, marks: Marks, twice: list[str]
) -> Iterator[tuple[str, yaml.ScalarNode]]:
    """The scalars below `node`, with their paths. Notes the line of every path in `marks`, and the
    keys that appear twice in one mapping in `twice`."""
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = f"{path}.{index}".lstrip(".")
            marks[inner] = value.start_mark.line + 1
            yield from _scalars(value, inner, marks, twice)
    elif isinstance(node, yaml.MappingNode):
        seen: Marks = {}
        for key, value in node.value:
            inner, line = f"{path}.{key.value}".lstrip("."), key.start_mark.line + 1
            if isinstance(key, yaml.ScalarNode) and key.value != "<<":
                if key.value in seen:
                    first = seen[key.value]
                    twice.append(f"line {line}: duplicate key {inner}, first in line {first}")
                seen[key.value] = line
            marks[inner] = line
            yield from _scalars(value, inner, marks, twice)
    else:
        yield path, node


def _kind(value: Any) -> str:
    kinds = ((dict, "mapping"), (list, "list"), (str, "string"))
    return next((word for kind, word in kinds if isinstance(value, kind)), "value")
