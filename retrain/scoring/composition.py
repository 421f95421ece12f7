"""How several rewards make one: pure functions of the values that the rewards returned.

A value is multiplied by its weight and added to the others. Before that, `clip` limits it, and
`only_if` leaves it out of rollouts for which another reward is too low. `Combined` is an entry that
makes a value of several entries.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from graphlib import CycleError, TopologicalSorter
from operator import add
from typing import Literal

from retrain.config import GateConfig, ScheduleConfig
from retrain.errors import PluginError
from retrain.scoring.base import RewardCalculator

Combination = Literal["sum", "product", "min"]
Values = Mapping[str, float]
"""What the rewards returned for one rollout, by name; without those that were not called."""
ENVIRONMENT = "environment"


@dataclass(frozen=True, slots=True)
class Term:
    """An entry of `rewards`; one of this very class is the environment's own reward."""

    name: str
    weight: float | ScheduleConfig
    clip: tuple[float, float] | None = field(default=None, kw_only=True)
    gate: GateConfig | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class WeightedReward(Term):
    """An entry that calls a calculator."""

    calculator: RewardCalculator


@dataclass(frozen=True, slots=True)
class Combined(Term):
    """An entry that combines others: each counts with its weight."""

    how: Combination
    of: tuple[Term, ...]


class Composition:
    """The entries of `rewards`, as a tree whose root is a sum.

    Raises PluginError for names that are not unique, and for gates that name no other reward or
    wait for each other.
    """

    def __init__(self, terms: Sequence[Term]) -> None:
        _check_names(terms)
        if all(term.name != ENVIRONMENT for _, term, _ in _walk(terms)):
            terms = [Term(ENVIRONMENT, 1.0), *terms]
        named = [term for _, term, _ in _walk(terms)]
        self.terms = tuple(terms)
        self.rewards = tuple(term for term in named if isinstance(term, WeightedReward))
        self.combined = tuple(term for term in named if isinstance(term, Combined))
        self._by_name = {term.name: term for term in named}
        self.gates = {term.name: gates for _, term, gates in _walk(terms)}
        """Those of each entry, with the gates of the entries that contain it."""
        self._check_order()
        self.ordered = any(self.gates[r.name] or r.calculator.after for r in self.rewards)
        """Whether some reward waits for others, or is not called for every rollout."""
        self.scheduled = any(isinstance(term.weight, ScheduleConfig) for term in named)
        self.weights = _plain_weights(self.terms)
        """The name and weight of each entry after the environment's reward, if that has the weight
        1 and the whole is a plain sum; else None."""

    @property
    def names(self) -> tuple[str, ...]:
        """Those of all entries."""
        return tuple(self._by_name)

    def needs(self, name: str) -> set[str]:
        """The rewards that are calculated before this one: those of its gates, and `after`."""
        term = self._by_name[name]
        after = term.calculator.after if isinstance(term, WeightedReward) else ()
        gates = [gate.name for gate in self.gates[name]]
        needed = [self._by_name[one] for one in (*gates, *after)]
        return {term.name for _, term, _ in _walk(needed) if isinstance(term, WeightedReward)}

    def admits(self, name: str, values: Values, step: int) -> bool:
        """Whether the gates of an entry, and of those that contain it, are open."""
        for gate in self.gates[name]:
            value = self.value(self._by_name[gate.name], values, step)
            if value is None or not (
                value > 0 if gate.at_least is None else value >= gate.at_least
            ):
                return False
        return True

    def value(self, term: Term, values: Values, step: int) -> float | None:
        """An entry's value before clip and weight; None if it is left out."""
        if isinstance(term, Combined):
            if not self.admits(term.name, values, step):
                return None
            parts = [self.contribution(inner, values, step) for inner in term.of]
            return combined(term.how, [part for part in parts if part is not None])
        return values.get(term.name, 0.0 if term.name == ENVIRONMENT else None)

    def contribution(self, term: Term, values: Values, step: int) -> float | None:
        """What an entry adds to the one that contains it; None if it is left out."""
        value = self.value(term, values, step) if self.admits(term.name, values, step) else None
        if value is None:
            return None
        if term.clip is not None:
            value = min(max(value, term.clip[0]), term.clip[1])
        return weight_at(term.weight, step) * value

    def total(self, values: Values, step: int) -> float:
        """The reward of a rollout."""
        parts = [self.contribution(term, values, step) for term in self.terms]
        return combined("sum", [part for part in parts if part is not None])

    def values_of_combined(self, values: Values, step: int) -> dict[str, float]:
        """The values of the entries that combine others, less those that are left out."""
        found = {term.name: self.value(term, values, step) for term in self.combined}
        return {name: value for name, value in found.items() if value is not None}

    def factors(self, values: Values, step: int) -> dict[str, float]:
        """By how much the total grows with each reward, for those that it is a plain sum of.

        Rewards that are clipped, or combined by `product` or `min`, have no such factor.
        """
        return dict(self._factors(self.terms, 1.0, values, step))

    def _factors(
        self, terms: Sequence[Term], outer: float, values: Values, step: int
    ) -> Iterator[tuple[str, float]]:
        for term in terms:
            if term.clip is not None or not self.admits(term.name, values, step):
                continue
            factor = outer * weight_at(term.weight, step)
            if not isinstance(term, Combined):
                yield term.name, factor
            elif term.how == "sum":
                yield from self._factors(term.of, factor, values, step)

    def _check_order(self) -> None:
        names = [reward.name for reward in self.rewards]
        for reward in self.rewards:
            if unknown := [name for name in reward.calculator.after if name not in names]:
                others = ", ".join(name for name in names if name != reward.name) or "none"
                raise PluginError(
                    f"rewards: '{reward.name}' reads the reward '{unknown[0]}', expected one of "
                    f"{others}"
                )
        for name, gates in self.gates.items():
            for gate in gates:
                if gate.name not in self._by_name:
                    others = ", ".join(other for other in self._by_name if other != name)
                    raise PluginError(
                        f"rewards: the only_if of '{name}' names '{gate.name}', expected one of "
                        f"{others}"
                    )
        graph = {reward.name: self.needs(reward.name) for reward in self.rewards}
        try:
            TopologicalSorter(graph).prepare()
        except CycleError as error:
            circle = " -> ".join(reversed(error.args[1]))
            raise PluginError(f"rewards: circular only_if: {circle}; remove one of them") from None


def combined(how: Combination, parts: Sequence[float]) -> float:
    """The sum, product or minimum of the parts; 0 without any."""
    if not parts:
        return 0.0
    if how == "product":
        return math.prod(parts)
    return min(parts) if how == "min" else reduce(add, parts)


def added(parts: Sequence[tuple[float, Sequence[float]]]) -> list[float]:
    """The sums, place by place, of lists of equal length, each times its factor."""
    rows = [[factor * number for number in numbers] for factor, numbers in parts]
    return [sum(column) for column in zip(*rows, strict=True)]


def weight_at(weight: float | ScheduleConfig, step: int) -> float:
    """A weight at a step: `start` + (`end` - `start`) x the part of the way that is done."""
    if not isinstance(weight, ScheduleConfig):
        return weight
    done = min(1.0, max(0.0, (step - weight.begin) / weight.steps))
    if weight.shape == "cosine":
        done = (1.0 - math.cos(math.pi * done)) / 2.0
    elif weight.shape == "step":
        done = float(done == 1.0)
    return weight.start + (weight.end - weight.start) * done


def _plain_weights(terms: Sequence[Term]) -> tuple[tuple[str, float], ...] | None:
    first, *others = terms
    weights: list[tuple[str, float]] = []
    if (first.name, first.weight, first.clip, first.gate) != (ENVIRONMENT, 1.0, None, None):
        return None
    for term in others:
        plain = isinstance(term, WeightedReward) and term.clip is None and term.gate is None
        if not plain or isinstance(term.weight, ScheduleConfig):
            return None
        weights.append((term.name, term.weight))
    return tuple(weights)


def _walk(
    terms: Sequence[Term], where: str = "rewards", outer: tuple[GateConfig, ...] = ()
) -> Iterator[tuple[str, Term, tuple[GateConfig, ...]]]:
    """Each entry with its path in the config, its gate and those of the entries that contain it."""
    for index, term in enumerate(terms):
        path, gates = f"{where}.{index}", outer if term.gate is None else (*outer, term.gate)
        yield path, term, gates
        if isinstance(term, Combined):
            yield from _walk(term.of, f"{path}.of", gates)


def _check_names(terms: Sequence[Term]) -> None:
    places: dict[str, list[str]] = {}
    for path, term, _ in _walk(terms):
        places.setdefault(term.name, []).append(path)
    for name, paths in places.items():
        if len(paths) > 1:
            raise PluginError(
                f"{' and '.join(paths)} have the same name '{name}': give each its own `name`"
            )
    if any(term.name == ENVIRONMENT and type(term) is not Term for _, term, _ in _walk(terms)):
        raise PluginError(
            f"rewards: the name '{ENVIRONMENT}' is reserved for the reward of the environment's "
            "steps: set another `name`"
        )
