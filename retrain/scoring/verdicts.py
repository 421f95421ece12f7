"""What a reward returned, checked: finite numbers and known outcomes, or the rollout has failed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from retrain.errors import BudgetError, LateError, UserCodeError, shown
from retrain.scoring.base import Reward
from retrain.supervision.boundary import boundary
from retrain.supervision.outages import is_outage
from retrain.types import Outcome, Trajectory

OUTCOMES: tuple[Outcome, ...] = get_args(Outcome)


def fail(trajectory: Trajectory, error: UserCodeError) -> None:
    """Mark a rollout as failed by user code."""
    trajectory.outcome = "timeout" if isinstance(error, LateError) else "infra_error"
    trajectory.info["error"] = str(error)
    trajectory.outage = is_outage(error)


def as_number(value: Any) -> float | None:
    """A reward as a float, also one of numpy or torch; None if it is no finite number."""
    try:
        number = math.nan if isinstance(value, str | bytes) else float(value)
    except Exception:  # noqa: BLE001 - a user's object may raise anything
        return None
    return number if math.isfinite(number) else None


def checked(name: str, verdict: Any) -> Reward:
    """The verdict as a Reward of floats; raises UserCodeError, or BudgetError, for an error."""
    if type(verdict) is float and math.isfinite(verdict):  # the common case, fast
        return Reward(verdict)
    if isinstance(verdict, UserCodeError):
        raise verdict.__cause__ if isinstance(verdict.__cause__, BudgetError) else verdict
    owner = f"reward '{name}'"
    judged = verdict if isinstance(verdict, Reward) else Reward(verdict)
    if judged.outcome not in OUTCOMES:
        raise UserCodeError(
            f"{owner} returned the outcome {shown(judged.outcome)}, expected one of "
            f"{', '.join(OUTCOMES)}"
        )
    if judged.outcome != "ok":
        return Reward(0.0, outcome=judged.outcome)
    components = {
        component: _number(f"{owner}, component '{component}'", given)
        for component, given in _components(owner, judged).items()
    }
    turns, tokens = (
        [_number(f"{owner}, {kind}", given) for given in _listed(owner, kind, parts)]
        for kind, parts in (("turns", judged.turns), ("tokens", judged.tokens))
    )
    return Reward(_number(owner, judged.value), components, "ok", turns, tokens, judged.applies)


def check_parts(name: str, judged: Reward, trajectory: Trajectory) -> None:
    """Raises UserCodeError unless `turns` and `tokens` fit the trajectory."""
    for kind, parts, count in (
        ("turns", judged.turns, len(trajectory.turns)),
        ("tokens", judged.tokens, trajectory.sampled_tokens),
    ):
        if parts and len(parts) != count:
            what = "turn" if kind == "turns" else "sampled token"
            raise UserCodeError(
                f"reward '{name}' returned {len(parts)} {kind}, expected one number for each "
                f"{what} of the rollout: {count}"
            )


def _number(owner: str, given: Any) -> float:
    number = as_number(given)
    if number is None:
        raise UserCodeError(
            f"{owner} returned {shown(given)}, expected a finite number. To exclude a rollout, "
            "return Reward(0.0, outcome='invalid')."
        )
    return number


def _listed(owner: str, kind: str, parts: Any) -> list[Any]:
    try:
        return list(parts)
    except Exception as error:
        raise UserCodeError(
            f"{owner} returned the {kind} {shown(parts)}, expected a list of numbers"
        ) from error


def _components(owner: str, judged: Reward) -> dict[str, Any]:
    given = judged.components
    with boundary(owner):
        found = dict(given) if isinstance(given, Mapping) else None
    if found is None or not all(isinstance(key, str) and key for key in found):
        raise UserCodeError(
            f"{owner} returned the components {shown(given)}, expected a mapping of names to "
            "numbers"
        )
    return found
