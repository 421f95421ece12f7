"""How a config is read: `load_config` reads a file, `parse_config` any mapping.

Both raise one ConfigError that lists every problem.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from retrain.config.hints import secrets
from retrain.config.problems import problems_of
from retrain.config.sections import RunConfig
from retrain.config.yaml_text import Marks, apply_override, parse_override, read_config_file
from retrain.errors import ConfigError


def load_config(path: str | Path, overrides: Sequence[str] = ()) -> RunConfig:
    """The run that a YAML file describes, changed by `dotted.key=value` arguments.

    Raises ConfigError with every problem of the file and of the arguments.
    """
    file = Path(path)
    mapping, marks = read_config_file(file)
    mapping = _spelt_out(mapping)
    problems: list[str] = []
    for text in overrides:
        try:
            keys, value = parse_override(text)
            apply_override(mapping, keys, value)
            mapping = _spelt_out(mapping)  # `backend=tinker backend.url=...`
            marks.pop(".".join(keys), None)
        except ConfigError as error:
            problems += error.problems
    config = _checked(mapping, file.resolve().parent, problems, marks, source=str(file))
    return config if config.name else config.model_copy(update={"name": file.stem})


def parse_config(mapping: Mapping[str, Any], base_dir: str | Path | None = None) -> RunConfig:
    """The run that a mapping describes; relative paths are looked up in `base_dir`.

    Takes any Mapping, such as omegaconf's. Raises ConfigError with every problem.
    """
    if not isinstance(mapping, Mapping):
        raise ConfigError(f"expected a mapping of the config's keys, got {type(mapping).__name__}")
    folder = Path(base_dir).resolve() if base_dir is not None else Path.cwd()
    return _checked(plain(mapping), folder, [], {}, source="")


def _checked(
    mapping: dict[str, Any], base_dir: Path, problems: list[str], marks: Marks, source: str
) -> RunConfig:
    mapping = _spelt_out(mapping)
    hidden = list(secrets(mapping))
    problems += [f"{_line(path, marks)}{path}: {_NO_SECRETS}" for path in hidden]
    if mapping.pop("base_dir", None) is not None:
        problems.append("base_dir: unknown key; it is always the config file's folder")
    try:
        config = RunConfig.model_validate(mapping)
    except ValidationError as error:
        found = problems_of(error, RunConfig, hidden)
        problems += [f"{_line(text.partition(':')[0], marks)}{text}" for text in found]
    if problems:
        raise ConfigError(*problems, source=source)
    return config.model_copy(update={"base_dir": base_dir})


_NO_SECRETS = (
    "a secret doesn't belong in a config: remove it, and set the environment variable that the "
    "service documents, such as TINKER_API_KEY or WEAVER_API_KEY"
)
_SHORT = {"environment": "type", "algorithm": "type", "backend": "type", "chat": "template"}


def _spelt_out(mapping: Mapping[str, Any]) -> dict[str, Any]:
    """Short forms in full: `environment: echo`, `rewards: exact`, `prompts: file.jsonl`."""
    full = dict(mapping)
    for key, inner in _SHORT.items():
        if isinstance(full.get(key), str):
            full[key] = {inner: full[key]}
    if isinstance(full.get("backend"), Mapping):  # its keys alone: the default backend's
        full["backend"] = {"type": "trl", **full["backend"]}
    for key in ("rewards", "loggers"):
        listed = full.get(key)
        if isinstance(listed, str | Mapping):
            listed = [listed]
        if isinstance(listed, list):
            full[key] = [{"type": item} if isinstance(item, str) else item for item in listed]
    if "prompts" in full:
        full["prompts"] = _prompts(full["prompts"])
    if isinstance(full.get("eval"), dict) and "prompts" in full["eval"]:
        full["eval"] = {**full["eval"], "prompts": _prompts(full["eval"]["prompts"])}
    sampling = full.get("sampling")
    if isinstance(sampling, dict) and isinstance(sampling.get("stop"), str):
        full["sampling"] = {**sampling, "stop": [sampling["stop"]]}
    return full


def _prompts(value: Any) -> Any:
    if isinstance(value, str) and _is_file(value):
        return {"type": "file", "path": value}
    if isinstance(value, list):
        return {"type": "list", "rows": value}
    return {"type": value} if isinstance(value, str) else value


def _is_file(text: str) -> bool:
    """Whether `prompts: text` means a file of rows, and not a plug-in or a dotted class."""
    ending = text.rpartition(".")[2] if "." in text else ""
    return ":" not in text and ending != "py" and ("/" in text or ending.islower())


def plain(value: Any) -> Any:
    """A deep copy as YAML would give it: mappings as dicts with text keys, sequences as lists."""
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in value]
    return value


def _line(path: str, marks: Marks) -> str:
    """ "line 7: " where the file has that path."""
    return f"line {marks[path]}: " if path in marks else ""
