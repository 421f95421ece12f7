"""From a YAML text, or `key=value`, to plain values.

YAML as its users read it: safe, `1e-5` is a number, and a key that stands twice is an error
instead of a silent last word. No message quotes the text, which might hold a secret.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from retrain.config.paths import broken_link
from retrain.errors import ConfigError, first_of, shown

Marks = dict[str, int]
"""The line of each dotted path."""


class _Loader(yaml.SafeLoader):
    """SafeLoader, with the floats of YAML 1.2 (PyYAML takes `1e-5` for a text)."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?(\d+\.\d*|\.\d+|\d+)[eE][-+]?\d+$"),
    list("-+.0123456789"),
)


def read_config_file(path: Path) -> tuple[dict[str, Any], Marks]:
    """The mapping in the file, and its keys' lines.

    Raises ConfigError when there is no such file, or it holds no YAML mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        told = broken_link(path) or f"there is no file {path}{_neighbours(path)}"
        raise ConfigError(told) from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: expected a YAML file{_neighbours(path)}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not a UTF-8 text: byte {error.start} can't be read") from None
    except OSError as error:
        raise ConfigError(f"{path} can't be read: {error.strerror}") from None
    value, marks = parse_yaml(text, source=str(path))
    if value is None:
        raise ConfigError("the file is empty: a run needs at least `prompts`", source=str(path))
    if not isinstance(value, dict):
        raise ConfigError(
            f"holds a {_kind(value)}: expected a mapping (`model: ...`, `prompts: ...`)",
            source=str(path),
        )
    return value, marks


def parse_yaml(text: str, source: str = "") -> tuple[Any, Marks]:
    """The one YAML document in `text`. Raises ConfigError with the line and column."""
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        marks = dict(_lines(node, ""))
        twice = list(_repeated(node, ""))
        if twice:
            raise ConfigError(*twice, source=source)
        return loader.construct_document(node), marks
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"line {mark.line + 1}, column {mark.column + 1}: " if mark else ""
        context = f" {error.context}" if error.context else ""
        raise ConfigError(f"{where}not YAML: {error.problem}{context}", source=source) from None
    except (yaml.YAMLError, ValueError, RecursionError) as error:  # odd characters, dates, aliases
        line = str(error).splitlines()[0]
        raise ConfigError(f"not YAML: {line}", source=source) from None
    finally:
        loader.dispose()


def parse_override(text: str) -> tuple[list[str], Any]:
    """The path and the value of `key=value`; the value is read as YAML."""
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
    """Set the value at `path`, making the sections that are missing.

    A number in the path is an index into a list, at most one past its end.
    Raises ConfigError when the path runs through something that isn't a section.
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
                f"argument {'.'.join(path)}=...: {here} is a {_kind(holder)}, not a section"
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
            f"argument {here}.{key}=...: {here} is a list of {len(items)}; "
            f"expected an index from 0 to {len(items)}"
        )
    return int(key)


def _lines(node: Any, path: str) -> Iterator[tuple[str, int]]:
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            inner = f"{path}.{key.value}".lstrip(".")
            yield inner, key.start_mark.line + 1
            yield from _lines(value, inner)
    elif isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            inner = f"{path}.{index}".lstrip(".")
            yield inner, value.start_mark.line + 1
            yield from _lines(value, inner)


def _repeated(node: Any, path: str) -> Iterator[str]:
    """The keys that stand twice in one mapping."""
    if isinstance(node, yaml.SequenceNode):
        for index, value in enumerate(node.value):
            yield from _repeated(value, f"{path}.{index}")
    if not isinstance(node, yaml.MappingNode):
        return
    seen: dict[str, int] = {}
    for key, value in node.value:
        inner = f"{path}.{key.value}".lstrip(".")
        line = key.start_mark.line + 1
        if isinstance(key, yaml.ScalarNode) and key.value != "<<":
            if key.value in seen:
                yield f"line {line}: {inner} stands here and in line {seen[key.value]}: keep one"
            seen[key.value] = line
        yield from _repeated(value, inner)


def _neighbours(path: Path) -> str:
    folder = path if path.is_dir() else path.parent
    if not folder.is_dir():
        return f" (nor a folder {folder})"
    near = sorted(file.name for pattern in ("*.yaml", "*.yml") for file in folder.glob(pattern))
    return f"; the folder has {first_of(near)}" if near else ""


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return "mapping"
    return "list" if isinstance(value, list) else "text" if isinstance(value, str) else "value"
