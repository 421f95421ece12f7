"""A trainer's `environment`: a class, a function that makes one, or an instance to copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from retrain.errors import shown


def environment_factory(environment: Any) -> tuple[Callable[[], Any], Any]:
    """A function that makes one instance, and the first instance.

    Raises TypeError when the object can't be an environment, or can't be made or copied.
    """
    make: Callable[[], Any] = environment
    if not isinstance(environment, type) and callable(getattr(environment, "step", None)):
        make = lambda: copy.deepcopy(environment)  # noqa: E731
    elif not callable(environment):
        raise TypeError(
            f"environment: got {shown(environment)}, expected an Environment class, an instance, "
            "or a function that makes one"
        )
    try:
        return make, make()
    except Exception as error:
        name = getattr(environment, "__name__", type(environment).__name__)
        raise TypeError(
            f"environment: can't make a {name} for each rollout ({type(error).__name__}: "
            f"{error}); pass a function that makes one"
        ) from error


def environment_label(environment: Any) -> str:
    """The environment's name in the run's config: `module:Class`, or that of the function."""
    named = environment if hasattr(environment, "__qualname__") else type(environment)
    return f"{named.__module__}:{named.__qualname__}"
