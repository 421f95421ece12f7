"""What a reward returned, checked: finite numbers and known outcomes, or the rollout has failed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, get_args

from retrain.concurrency.outages import is_outage
from retrain.errors import LateError, UserCodeError, blame, shown
from retrain.rewarding.base import Reward
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
    """The verdict as a Reward of floats; raises UserCodeError."""
    if type(verdict) is float and math.isfinite(verdict):  # the common case, fast
        return Reward(verdict)
    if isinstance(verdict, UserCodeError):
        raise verdict
    judged = verdict if isinstance(verdict, Reward) else Reward(verdict)
    if judged.outcome not in OUTCOMES:
        raise UserCodeError(
            f"reward '{name}' returned the outcome {shown(judged.outcome)}, expected one of "
            f"{', '.join(OUTCOMES)}"
        )
    if judged.outcome != "ok":
        return Reward(0.0, outcome=judged.outcome)
    numbers: dict[str, float] = {}
    for component, given in {"": judged.value, **_components(name, judged)}.items():
        number = as_number(given)
        if number is None:
            where = f"reward '{name}'" + (f", component '{component}'" if component else "")
            raise UserCodeError(
                f"{where} returned {shown(given)}, expected a finite number. To exclude a rollout, "
                "return Reward(0.0, outcome='invalid')."
            )
        numbers[component] = number
    return Reward(numbers.pop(""), numbers, applies=judged.applies)


def _components(name: str, judged: Reward) -> dict[str, Any]:
    given = judged.components
    try:
        found = dict(given) if isinstance(given, Mapping) else None
    except Exception as error:
        raise blame(f"reward '{name}'", error) from error
    if found is None or not all(isinstance(key, str) and key for key in found):
        raise UserCodeError(
            f"reward '{name}' returned the components {shown(given)}, expected a mapping of names "
            "to numbers"
        )
    return found
