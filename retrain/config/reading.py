"""Reading a config: `load_config` takes a YAML file, `parse_config` any mapping.

Both raise one ConfigError that lists every problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from retrain.config.hints import secrets
from retrain.config.plugins import named
from retrain.config.problems import problems_of
from retrain.config.sections import RunConfig
from retrain.config.variables import Problems, filled_in
from retrain.config.yaml_text import Marks, apply_override, parse_override, read_config_file
from retrain.errors import ConfigError
from retrain.supervision.jsonable import Named

BASE_DIR_NOTE = "# The resolved configuration; paths are relative to "
"""How the config.yaml of a run begins, before its `base_dir`."""


def load_config(path: str | Path, overrides: Sequence[str] = (), *, fill: bool = True) -> RunConfig:
    """The config in a YAML file, with `dotted.key=value` overrides applied.

    `fill=False` keeps `${NAME}` as it is. Raises ConfigError with every problem of the file and of
    the overrides.
    """
    file = Path(path)
    mapping, marks = read_config_file(file)
    unset: Problems = {}
    mapping = _spelt_out(filled_in(mapping, unset) if fill else mapping)
    problems: list[str] = []
    for text in overrides:
        try:
            keys, value = parse_override(text)
            here = ".".join(keys)
            unset = {path: unset[path] for path in unset if not f"{path}.".startswith(f"{here}.")}
            apply_override(mapping, keys, filled_in(value, unset, here) if fill else value)
            mapping = _spelt_out(mapping)  # `backend=tinker backend.url=...`
            marks.pop(here, None)
        except ConfigError as error:
            problems += error.problems
    config = _checked(mapping, _base_dir(file), problems, marks, str(file), unset)
    return config if config.name else config.model_copy(update={"name": file.stem})


def parse_config(mapping: Mapping[str, Any], base_dir: str | Path | None = None) -> RunConfig:
    """The config in a mapping, which may be omegaconf's; relative paths start in `base_dir`.

    Its values may be classes and functions: `{"environment": MyEnvironment, "rewards": [mine]}`.
    Raises ConfigError with every problem.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"got {type(mapping).__name__}, expected a mapping of the config's keys")
    folder = Path(base_dir).resolve() if base_dir is not None else Path.cwd()
    unset: Problems = {}
    return _checked(filled_in(named(plain(mapping), {}), unset), folder, [], {}, "", unset)


def _base_dir(file: Path) -> Path:
    """Where the paths of a config begin: the file's folder, or that of the run that wrote it."""
    with file.open(encoding="utf-8") as lines:
        first = lines.readline().rstrip("\n")
    noted = Path(first.removeprefix(BASE_DIR_NOTE))
    known = first.startswith(BASE_DIR_NOTE) and noted.is_dir()
    return noted if known else file.resolve().parent


def _checked(
    mapping: dict[str, Any],
    base_dir: Path,
    problems: list[str],
    marks: Marks,
    source: str,
    unset: Problems,
) -> RunConfig:
    mapping = _spelt_out(mapping)
    hidden = [path for path in secrets(mapping) if path not in unset]
    problems += [f"{_line(path, marks)}{path}: {_no_secret(path)}" for path in hidden]
    problems += [f"{_line(path, marks)}{path}: {unset[path]}" for path in unset]
    if mapping.pop("base_dir", None) is not None:
        problems.append("base_dir: unknown key; remove it: it is always the config file's folder")
    try:
        config = RunConfig.model_validate(mapping)
    except ValidationError as error:
        found = problems_of(error, RunConfig, [*hidden, *unset])
        problems += [f"{_line(text.partition(':')[0], marks)}{text}" for text in found]
    if problems:
        raise ConfigError(*problems, source=source)
    return config.model_copy(update={"base_dir": base_dir})


def _no_secret(path: str) -> str:
    variable = "the environment variable of the service, such as TINKER_API_KEY or WEAVER_API_KEY"
    section, _, key = path.rpartition(".")
    if path.startswith(("rewards.", "opponents.", "eval.opponents.")) and key == "api_key":
        variable = f"{section}.api_key_env to the name of an environment variable that holds it"
    return f"a config can't contain secrets: remove it, and set {variable}"


def _spelt_out(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Expand short forms: `environment: echo`, `rewards: exact`, `prompts: file.jsonl`."""
    return {key: _SHORT[key](value) if key in _SHORT else value for key, value in mapping.items()}


def _all_typed(items: Any) -> Any:
    """A list of plug-ins, or one."""
    items = [items] if isinstance(items, str | Mapping) else items
    return [_typed(item) for item in items] if isinstance(items, list) else items


def _backend(value: Any) -> Any:
    value = _typed(value)
    return {"type": "trl", **value} if isinstance(value, Mapping) else value


def _sampling(value: Any) -> Any:
    single = isinstance(value, Mapping) and isinstance(value.get("stop"), str)
    return {**value, "stop": [value["stop"]]} if single else value


def _opponents(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    return {seat: _typed(opponent) for seat, opponent in value.items()}


def _typed(value: Any) -> Any:
    """A plug-in's section, with those of the rewards that it combines."""
    if isinstance(value, Mapping) and isinstance(value.get("of"), list):
        return {**value, "of": [_typed(inner) for inner in value["of"]]}
    return {"type": value} if isinstance(value, str) else value


def prompts_section(value: Any) -> Any:
    """Expand the short forms of `prompts`."""
    if isinstance(value, str) and not isinstance(value, Named) and _is_file(value):
        return {"type": "file", "path": value}
    return {"type": "list", "rows": value} if isinstance(value, list) else _typed(value)


_SHORT: Mapping[str, Callable[[Any], Any]] = {
    "algorithm": _typed,
    "backend": _backend,
    "chat": lambda value: {"template": value} if isinstance(value, str) else value,
    "environment": _typed,
    "eval": lambda value: _spelt_out(value) if isinstance(value, Mapping) else value,
    "loggers": _all_typed,
    "opponents": _opponents,
    "prompts": prompts_section,
    "rewards": _all_typed,
    "sampling": _sampling,
}
"""The sections that have short forms."""


def _is_file(text: str) -> bool:
    """Whether `prompts: text` is the path of a data file, and not the name of a plug-in."""
    extension = text.rpartition(".")[2] if "." in text else ""
    return ":" not in text and extension != "py" and ("/" in text or extension.islower())


def plain(value: Any) -> Any:
    """A deep copy as YAML would give it: mappings as dicts with string keys, sequences as lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in value]
    return value


def _line(path: str, marks: Marks) -> str:
    """ "line 7: " if the file contains that path."""
    return f"line {marks[path]}: " if path in marks else ""
