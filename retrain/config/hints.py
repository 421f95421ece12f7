"""What to say about a key that isn't one: the nearest key, or where that setting lives here."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from retrain.config.foreign import FOREIGN, HOMES, NOWHERE, OTHERWISE, PATHS, WRAPPERS

_SECRET = re.compile(
    r"(^|[_-])(api[_-]?key|secret([_-]?key)?|password|passwd|private[_-]?key|credentials?"
    r"|(access|api|auth|bearer|hf|hub|wandb)[_-]?token)$",
    re.IGNORECASE,
)
_LOGIN = re.compile(r"://[^/@\s]*:[^/@\s]+@")


def unknown_key(path: str, value: Any, valid: Iterable[str], known: Mapping[str, str]) -> list[str]:
    """The problems with a key that isn't one: a line, or one for each key inside a foreign section.

    `valid` are the keys at its place; `known` maps the last part of each key of the whole config
    to its dotted path.
    """
    choices = list(valid)
    name = path.rpartition(".")[2]
    foreign = name in FOREIGN and isinstance(value, Mapping)
    near = [] if foreign else _nearest(name, choices)
    home, alias = PATHS.get(path), HOMES.get(name)
    if home is None and alias in [_beside(path, choice) for choice in choices]:
        home = alias  # `backend.lr` is no misspelt lr_scheduler
    if near and home is None:
        return [f"{path}: unknown key; did you mean {_beside(path, near[0])}?"]
    if isinstance(value, Mapping) and value and home is None:
        return [
            line
            for key, inner in value.items()
            for line in unknown_key(f"{path}.{key}", inner, (), known)
        ]
    if name in NOWHERE:
        return [f"{path}: unknown key; leave it out: {NOWHERE[name]}"]
    if name in OTHERWISE:
        return [f"{path}: unknown key; {OTHERWISE[name]}"]
    home = home or _home(path, known)
    if home:
        return [f"{path}: unknown key; that is {home} here"]
    near = difflib.get_close_matches(name, [*choices, *known], n=1, cutoff=0.6)
    if near:
        meant = _beside(path, near[0]) if near[0] in choices else known[near[0]]
        return [f"{path}: unknown key; did you mean {meant}?"]
    keys = f"; expected one of {', '.join(sorted(choices))}" if choices else ""
    return [f"{path}: unknown key{keys}"]


def _nearest(name: str, choices: Sequence[str]) -> list[str]:
    """The key that is nearly `name`, or of which a word is: `steps` for total_train_steps."""
    words = {word: key for key in reversed(choices) for word in key.split("_")}
    near = difflib.get_close_matches(name, choices, n=1, cutoff=0.8)
    return near or [words[w] for w in difflib.get_close_matches(name, words, n=1, cutoff=0.8)]


def secrets(value: Any, path: str = "") -> Iterator[str]:
    """The paths that hold a secret: a key named like one, or a login within an address."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            here = f"{path}.{key}".lstrip(".")
            if _SECRET.search(str(key)) and inner is not None:
                yield here
            else:
                yield from secrets(inner, here)
    elif isinstance(value, list | tuple):
        for index, inner in enumerate(value):
            yield from secrets(inner, f"{path}.{index}")
    elif isinstance(value, str) and _LOGIN.search(value):
        yield path


def _home(path: str, known: Mapping[str, str]) -> str | None:
    name = path.rpartition(".")[2]
    home = HOMES.get(name) or known.get(name)
    if home and home != path:
        return home
    for wrapper, section in WRAPPERS:
        if path.startswith(wrapper + "."):
            return section + path[len(wrapper) :]
    return None


def _beside(path: str, name: str) -> str:
    return f"{path.rpartition('.')[0]}.{name}".lstrip(".")
