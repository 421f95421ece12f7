"""From an entry of `rewards:` to its calculator, in the run and in a worker process."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast, get_args

from retrain.config import DeadlinesConfig, RewardConfig, RunConfig
from retrain.config.binding import bind
from retrain.config.plugins import Kind, construct, find_plugin
from retrain.config.problems import keys_of
from retrain.errors import ConfigError, PluginError
from retrain.scoring.base import NAMES, FunctionReward, RewardCalculator, is_async
from retrain.scoring.columns import ColumnReward, called_by_column
from retrain.scoring.composition import ENVIRONMENT, Combination, Combined, Term, WeightedReward
from retrain.scoring.processes import ProcessReward

REWARD = Kind("reward", RewardCalculator, accepts=callable)


def term_of(section: RewardConfig, where: str, base_dir: Path, deadlines: DeadlinesConfig) -> Term:
    """The entry of a section at the path `where`, with those in its `of`.

    Raises PluginError with every wrong key.
    """
    weight = section.weight
    rules: dict[str, Any] = {"clip": section.clip, "gate": section.only_if}
    combines = section.type in get_args(Combination)
    if not combines and section.type != ENVIRONMENT:
        return weighted_reward(section, where, base_dir, deadlines)
    beside = {"type", "weight", "clip", "only_if"} | ({"name", "of"} if combines else set())
    wrong = [
        f"{where}.{key}: not a key of {section.type}, which only combines other rewards; remove it"
        for key in sorted((section.model_fields_set | section.arguments.keys()) - beside)
    ]
    if combines and not section.of:
        wrong.append(f"{where}.of: missing; expected the list of rewards to combine")
    parts: list[Term] = []
    for index, inner in enumerate(section.of):
        try:
            parts.append(term_of(inner, f"{where}.of.{index}", base_dir, deadlines))
        except ConfigError as error:
            wrong += error.problems
    if wrong:
        raise PluginError(*wrong)
    if not combines:
        return Term(ENVIRONMENT, weight, **rules)
    how = cast(Combination, section.type)
    return Combined(section.name or how, weight, how, tuple(parts), **rules)


def weighted_reward(
    section: RewardConfig, where: str, base_dir: Path, deadlines: DeadlinesConfig
) -> WeightedReward:
    """The reward of a section at the path `where`. Raises PluginError with every wrong key."""
    if section.of:
        raise PluginError(
            f"{where}.of: {section.type} combines no rewards; remove it, or set {where}.type to "
            "sum, product or min"
        )
    calculator = calculator_of(section, where, base_dir)
    own_name = section.type.replace("/", ":").rpartition(":")[2].removesuffix(".py")
    own_name = own_name.rpartition(">.")[2]  # of a function in a function
    name = section.name or calculator.name or own_name
    if processes := section.processes or calculator.processes:
        section = section.model_copy(update={"processes": processes})
        calculator = ProcessReward(name, calculator, section, where, base_dir, deadlines)
    return WeightedReward(name, section.weight, calculator, clip=section.clip, gate=section.only_if)


def calculator_of(section: RewardConfig, where: str, base_dir: Path) -> RewardCalculator:
    """The section's class with its keys, its function, or its instance."""
    found = find_plugin(REWARD, section.type, f"{where}.type", base_dir)
    if isinstance(found, type):
        keys = bind(
            found,
            section.arguments,
            where,
            given={"base_dir": base_dir},
            beside=RewardConfig.model_fields,
            known=keys_of(RunConfig),
        )
        made: RewardCalculator = construct(where, partial(found, **keys))
        return made
    if isinstance(found, RewardCalculator) and not isinstance(found, FunctionReward):
        bind(lambda: None, section.arguments, where)  # an instance takes no keys
        return found
    if isinstance(found, FunctionReward):
        return _function(found, section, where)
    return _undecorated(found, section, where)


def _undecorated(
    function: Callable[..., Any], section: RewardConfig, where: str
) -> RewardCalculator:
    """A reward function of retrain or of TRL, or a function that makes one of its keys."""
    if called_by_column(function):
        return ColumnReward.bound_to(section.arguments, function, where)
    names = inspect.signature(function).parameters
    scores = any(name in NAMES or p.kind is p.VAR_KEYWORD for name, p in names.items())
    if not scores and not is_async(function):
        keys = bind(
            function, section.arguments, where, provided=NAMES, beside=RewardConfig.model_fields
        )
        made = construct(where, partial(function, **keys))
        if isinstance(made, RewardCalculator):
            return made
        if callable(made):
            return _undecorated(made, RewardConfig(type=section.type), where)
    return _function(function, section, where)


def _function(found: Any, section: RewardConfig, where: str) -> FunctionReward:
    """A reward function with the other keys bound to its arguments."""
    made = found if isinstance(found, FunctionReward) else None
    function = made.function if made else found
    keys = bind(
        function,
        section.arguments,
        where,
        bound=made.bound if made else {},
        provided=NAMES,
        beside=RewardConfig.model_fields,
    )
    try:
        scores = FunctionReward(function, made.name if made else "", **keys)
        _ = scores.wants
    except PluginError as error:
        raise PluginError(f"{where}: {error}") from None
    return scores
