"""What single sections of a config describe; `build` puts the parts together."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from pydantic import ValidationError

from retrain.adapters.base import AdapterOptions
from retrain.assembly.parts import target_of
from retrain.chat import Chat
from retrain.chat.formats.base import Format
from retrain.chat.probing import KIND
from retrain.chat.template import NOT_SHOWN
from retrain.config import Plugin, RunConfig, ToolsConfig
from retrain.config.foreign import HOMES
from retrain.config.paths import find_file
from retrain.config.plugins import built_in_names, construct, find_plugin
from retrain.config.problems import keys_of, problems_of
from retrain.environment import Environment
from retrain.environment.tools import ToolEnvironment
from retrain.errors import (
    ConfigError,
    PluginError,
    RunError,
    UserCodeError,
    install_command,
)
from retrain.rollout.group import seats_of
from retrain.rollout.opponents import Opponent, opponent_of
from retrain.scoring import (
    Combined,
    RewardCalculator,
    Scorer,
    Term,
    WeightedReward,
    term_of,
)


class Problems:
    """What is wrong with several parts, so that all of it is reported together."""

    def __init__(self) -> None:
        self._found: list[str] = []

    @contextmanager
    def collected(self) -> Iterator[None]:
        """Collect the problems of one part."""
        try:
            yield
        except ConfigError as error:
            named = f"{error.source}: " if error.source else ""
            self._found += [named + problem for problem in error.problems]

    def report(self) -> None:
        """Raises ConfigError with all problems, if there are any."""
        if self._found:
            raise ConfigError(*self._found)


def opponents_of(
    config: RunConfig, environment: Environment, scorer: Scorer
) -> tuple[Mapping[str, Opponent], Mapping[str, Opponent]]:
    """The opponents of training and of evaluations; raises ConfigError if the seats don't fit."""
    held_out = config.eval.opponents if config.eval else None
    try:
        names = seats_of("environment", environment)
    except UserCodeError as error:
        raise PluginError(str(error)) from error
    if both := sorted(set(scorer.composition.names).intersection(names)):
        raise PluginError(f"environment: a seat and a reward are both named {both[0]}: rename one")
    found = _opponents("opponents", config.opponents, names, config.base_dir)
    if held_out is None:
        return found, found
    return found, _opponents("eval.opponents", held_out, names, config.base_dir)


def _opponents(
    where: str, section: Mapping[str, Plugin], names: Sequence[str], base_dir: Path
) -> Mapping[str, Opponent]:
    for name in section:
        if name not in names:
            seats = f"expected one of {', '.join(names)}" if names else "it has no seats"
            raise PluginError(
                f"{where}: got {name!r}, which is not a seat of the environment; {seats}"
            )
    if names and len(section) == len(names):
        raise PluginError(f"{where}: got all seats, expected at least one that is trained")
    return {name: opponent_of(p, f"{where}.{name}", base_dir) for name, p in section.items()}


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
    tools = config.chat.tools
    if isinstance(tools, str):
        tools = ToolsConfig(format=tools)
    in_system = tools.show == "system"
    name = "hermes" if in_system and tools.format == "auto" else tools.format
    if name == "auto":
        return None
    found = find_plugin(KIND, name, "chat.tools", config.base_dir)
    form = cast(Format, construct("chat.tools", found) if inspect.isclass(found) else found)
    if not in_system:
        return form
    if type(form).explain is Format.explain:
        raise PluginError(
            f"chat.tools.show: got system, which the format {name} does not support; set "
            "chat.tools.format to hermes"
        )
    if config.chat.template == "none":
        raise PluginError(
            "chat.tools.show: system needs a chat template, but chat.template is none"
        )
    form = copy(form)
    form.in_system = True
    return form


def tools_warning(
    config: RunConfig,
    options: AdapterOptions,
    template: str,
    form: Format | None,
    environment: Environment,
) -> str:
    """What is wrong with the tools of a run and the model's chat template, if that is known here.

    Raises PluginError if no rollout could begin.
    """
    runs_agent = type(environment).run is not Environment.run
    offers = isinstance(environment, ToolEnvironment) or bool(environment.tools)
    if not (offers or runs_agent) or (form is not None and form.in_system):
        return ""
    tokenizer = options.local_tokenizer(config)
    if tokenizer is None:
        return ""
    chat = Chat(tokenizer, template=template, arguments=config.chat.arguments, tools=form)
    problem = chat.problem_with_tools()
    if not problem:
        return ""
    if chat.reads_calls:
        return NOT_SHOWN
    if runs_agent:
        return f"{problem}, so calls with tools are rejected{chat.advice}"
    raise PluginError(problem + chat.advice)


def scorer_of(config: RunConfig) -> Scorer:
    problems, terms = Problems(), list[Term]()
    for index in range(len(config.rewards)):
        with problems.collected():
            terms.append(_term(config, index))
    problems.report()
    concurrency = config.rollout.reward_concurrency
    return Scorer(terms, deadlines=config.deadlines, concurrency=concurrency)


def _term(config: RunConfig, index: int) -> Term:
    where = f"rewards.{index}"
    term = term_of(config.rewards[index], where, config.base_dir, config.deadlines)
    sizes = {"algorithm.group_size": config.algorithm.group_size}
    if config.eval:
        sizes["eval.samples"] = config.eval.samples
    for path, reward in _called(term, where):
        for key, size in sizes.items():
            check = partial(_check_group, reward.calculator, size, key)
            construct(path, check, type(reward.calculator))
    return term


def _called(term: Term, where: str) -> Iterator[tuple[str, WeightedReward]]:
    """The rewards of a term that call a calculator, with their paths."""
    if isinstance(term, WeightedReward):
        yield where, term
    if isinstance(term, Combined):
        for index, part in enumerate(term.of):
            yield from _called(part, f"{where}.of.{index}")


def _check_group(calculator: RewardCalculator, size: int, key: str) -> None:
    try:
        calculator.check_group(size)
    except ValueError as error:
        raise ValueError(f"{error} ({key} is {size})") from error


def check_installed(options: AdapterOptions, config: RunConfig) -> None:
    """One problem per optional dependency set of which a module is missing."""
    problems = [
        f"{options.needed_by(extra) or f'backend.type: {config.backend.type}'} needs packages "
        f"that are not installed ({missing}): {install_command(extra)}"
        for extra, modules in options.needs().items()
        if (missing := _missing(modules))
    ]
    if problems:
        raise PluginError(*problems)


def _missing(modules: Sequence[str]) -> str:
    """Those that can't be found; none is imported."""

    def found(module: str) -> bool:
        try:
            return find_spec(module) is not None
        except ModuleNotFoundError:  # the package that it is in
            return False

    return ", ".join(name for name in modules if not found(name))


def check_endpoint(config: RunConfig) -> None:
    """What an environment that runs an agent needs."""
    if missing := _missing(("starlette", "uvicorn")):
        raise PluginError(
            f"environment.type: {config.environment.type} runs an agent, which needs packages "
            f"that are not installed ({missing}): {install_command('agents')}"
        )
    if config.endpoint.port:
        from retrain.agents.connections import bound

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
