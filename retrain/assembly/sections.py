"""What single sections of a config describe; `build` puts the parts together."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import cast

from pydantic import ValidationError

from retrain.adapters.base import AdapterOptions
from retrain.assembly.kinds import maker, target_of
from retrain.assembly.packages import installed, missing_packages
from retrain.chat.formats.base import Format
from retrain.chat.probing import KIND
from retrain.config import Plugin, RunConfig
from retrain.config.foreign import HOMES
from retrain.config.paths import find_file
from retrain.config.plugins import built_in_names, construct, find_plugin
from retrain.config.problems import keys_of, problems_of
from retrain.environment import Environment
from retrain.errors import (
    ConfigError,
    PluginError,
    RunError,
    UserCodeError,
    install_command,
)
from retrain.rewarding import Scorer, Term, term_of
from retrain.rollout.opponents import Opponent, opponent_of
from retrain.rollout.seats import seats_of


def environment_of(config: RunConfig) -> partial[Environment]:
    made: partial[Environment] = maker("environment", config.environment, "environment", config)
    construct("environment", made)  # reports before the run what the constructor rejects
    return made


def opponents_of(
    config: RunConfig, make: Callable[[], Environment], scorer: Scorer
) -> tuple[Mapping[str, Opponent], Mapping[str, Opponent]]:
    """The opponents of training and of evaluations; raises ConfigError if the seats don't fit."""
    held_out = config.eval.opponents if config.eval else None
    try:
        names = seats_of("environment", construct("environment", make))
    except UserCodeError as error:
        raise PluginError(str(error)) from error
    if both := sorted(set(scorer.composition.names).intersection(names)):
        raise PluginError(f"environment: the seat {both[0]} has the name of a reward: rename one")
    found: list[dict[str, Opponent]] = []
    for where, section in (("opponents", config.opponents), ("eval.opponents", held_out)):
        if section is None:
            found.append(found[0])
            continue
        for name in section:
            if name not in names:
                seats = f"expected one of {', '.join(names)}" if names else "but it has no seats"
                raise PluginError(f"{where}: got {name!r}, no seat of the environment, {seats}")
        if names and len(section) == len(names):
            raise PluginError(f"{where}: got all seats, expected at least one that is trained")
        found.append(
            {n: opponent_of(p, f"{where}.{n}", config.base_dir) for n, p in section.items()}
        )
    return found[0], found[1]


def chat_template(config: RunConfig) -> str:
    """`auto`, `none`, or the content of the file `chat.template`; raises ConfigError."""
    template, where = config.chat.template, "chat.template: "
    if template in ("auto", "none"):
        return template
    path = find_file(template, config.base_dir, where)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}can't read {path}: {error}") from error


def tool_format(config: RunConfig) -> Format | None:
    """The format `chat.tools`; None if it is to be inferred. Raises PluginError."""
    name = config.chat.tools
    if name == "auto":
        return None
    found = find_plugin(KIND, name, "chat.tools", config.base_dir)
    return cast(Format, construct("chat.tools", found) if inspect.isclass(found) else found)


def scorer_of(config: RunConfig) -> Scorer:
    terms: list[Term] = []
    problems: list[str] = []
    for index, reward in enumerate(config.rewards):
        try:
            terms.append(term_of(reward, f"rewards.{index}", config.base_dir, config.deadlines))
        except ConfigError as error:
            problems += problem_lines(error)
    if problems:
        raise PluginError(*problems)
    concurrency = config.rollout.reward_concurrency
    return Scorer(terms, deadlines=config.deadlines, concurrency=concurrency)


def check_installed(options: AdapterOptions, config: RunConfig) -> None:
    if missing := list(missing_packages(options, config.backend.type)):
        raise PluginError(*missing)


def check_endpoint(config: RunConfig, needed: bool) -> None:
    missing = [name for name in ("starlette", "uvicorn") if not installed(name)]
    if needed and missing:
        raise PluginError(
            f"environment.type: {config.environment.type} runs an agent, which needs what is not "
            f"installed ({', '.join(missing)}): {install_command('agents')}"
        )
    if needed and config.endpoint.port:
        from retrain.endpoint.connections import bound

        try:
            bound(config.endpoint).close()  # the model has not loaded yet
        except RunError as error:
            raise PluginError(str(error)) from error


def options_of(config: RunConfig) -> AdapterOptions:
    found: type[AdapterOptions] = target_of("backend", config.backend, "backend", config)
    keys = config.backend.arguments
    try:
        return found.model_validate(keys)
    except ValidationError as error:
        others = [name for name in built_in_names("backend") if name != config.backend.type]
        theirs: dict[str, list[str]] = {}  # the keys that only other backends have
        for other in others:
            kind = target_of("backend", Plugin(type=other), "backend", config)
            for key in keys.keys() & kind.model_fields.keys() - found.model_fields.keys():
                if HOMES.get(key, "backend.").startswith("backend."):  # else of another section
                    theirs.setdefault(f"backend.{key}", []).append(other)
        problems = [
            f"{path}: not a key of {config.backend.type}, only of {' and '.join(owners)}: remove "
            "it, or choose another backend.type"
            for path, owners in sorted(theirs.items())
        ]
        problems += problems_of(error, found, theirs, "backend", keys_of(RunConfig))
        raise PluginError(*problems) from None


def problem_lines(error: ConfigError) -> list[str]:
    return [f"{error.source}: {p}" if error.source else p for p in error.problems]
