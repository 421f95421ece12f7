"""What to advise about an unknown key: the nearest key, or where that setting is in `retrain`."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from retrain.config.foreign import ADVICE, FOREIGN, HOMES, PATHS, WRAPPERS
from retrain.supervision.jsonable import Filled

_NAMES = (
    r"(api[_-]?key|secret([_-]?key)?|password|passwd|(private|access)[_-]?key|credentials?"
    r"|(access|api|auth|bearer|hf|hub|wandb)[_-]?token)"
)
_SECRET = re.compile(rf"(^|[_-]){_NAMES}$", re.IGNORECASE)
_HIDDEN = re.compile(rf"{_NAMES}|authorization|^token$", re.IGNORECASE)
_NAMES_VARIABLE = re.compile(r"[_-]env$", re.IGNORECASE)
_PERHAPS = re.compile(r"key|token|secret|passw|credential|authorization", re.IGNORECASE)
_LOGIN = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def is_secret(name: str, *, perhaps: bool = False) -> bool:
    """Whether a key or variable of this name holds a secret; `perhaps` is true of too many names
    rather than too few."""
    return bool((_PERHAPS if perhaps else _SECRET).search(name))


def is_hidden(name: str) -> bool:
    """Whether files show `(hidden)` for a value that a user wrote under this key, such as
    `Proxy-Authorization` or `clientSecret`; not if it names a variable, as `api_key_env` does."""
    return bool(_HIDDEN.search(name)) and not _NAMES_VARIABLE.search(name)


def unknown_key(path: str, value: Any, valid: Iterable[str], known: Mapping[str, str]) -> list[str]:
    """The problem with an unknown key: one line, or one per key inside an unknown section.

    `valid` are the keys at this place; `known` maps the last part of each key of the whole config
    to its dotted path.
    """
    section, _, name = path.rpartition(".")
    here = {choice: f"{section}.{choice}".lstrip(".") for choice in valid}
    beside = HOMES.get(name) in here.values()  # `backend.lr` is not a misspelt lr_scheduler
    if home := PATHS.get(path) or (HOMES[name] if beside else None):
        return [f"{path}: unknown key{_advice(path, here, known, home)}"]
    is_section = isinstance(value, Mapping)
    if near := None if is_section and name in FOREIGN else _nearest(name, list(here)):
        return [f"{path}: unknown key; did you mean {here[near]}?"]
    if is_section and value:
        inner = (unknown_key(f"{path}.{key}", value[key], (), known) for key in value)
        return [line for lines in inner for line in lines]
    return [f"{path}: unknown key{_advice(path, here, known, None)}"]


def _advice(path: str, here: Mapping[str, str], known: Mapping[str, str], home: str | None) -> str:
    """What to do about a key that resembles none of those at its place, `here`."""
    name = path.rpartition(".")[2]
    if name in ADVICE:
        return f"; {ADVICE[name]}"
    if home := home or _home(path, known):
        return f"; use {home}"
    others = [other for other in known if known[other] != path]  # of another type of this section
    if end := _ends_in(name, list(here)):
        return f"; did you mean {here[end]}?"
    for close in difflib.get_close_matches(name, [*here, *others], n=1, cutoff=0.7):
        return f"; did you mean {here.get(close) or known[close]}?"
    return f"; expected one of {', '.join(sorted(here))}" if here else ""


def _nearest(name: str, choices: Sequence[str]) -> str | None:
    """The key that resembles `name`, or contains a word that does: `steps` is total_train_steps."""
    words = {word: key for key in reversed(choices) for word in key.split("_")}
    for near in difflib.get_close_matches(name, choices, n=1, cutoff=0.8):
        return near
    for near in difflib.get_close_matches(name, words, n=1, cutoff=0.8):
        return words[near]
    return None


def _ends_in(name: str, choices: Sequence[str]) -> str | None:
    """The key that is the last word of `name`: `base_url` is url."""
    return next((choice for choice in choices if name.endswith(f"_{choice}")), None)


def secrets(value: Any, path: str = "") -> Iterator[str]:
    """The paths of secrets: keys with such a name, and URLs that contain a password.

    What an environment variable holds is not in the config.
    """
    if isinstance(value, str) and not _is_variable(value) and _LOGIN.search(value):
        yield path
    items = enumerate(value) if isinstance(value, list | tuple) else ()
    for key, inner in value.items() if isinstance(value, Mapping) else items:
        here = f"{path}.{key}".lstrip(".")
        if is_secret(str(key)) and inner is not None and not _is_variable(inner):
            yield here
        else:
            yield from secrets(inner, here)


def _is_variable(value: Any) -> bool:
    return isinstance(value, Filled) or (isinstance(value, str) and "${" in value)


def _home(path: str, known: Mapping[str, str]) -> str | None:
    name = path.rpartition(".")[2]
    home = HOMES.get(name) or known.get(name)
    if home and home != path:
        return home
    for wrapper, section in WRAPPERS:
        if path.startswith(wrapper + "."):
            return section + path[len(wrapper) :]
    return None
