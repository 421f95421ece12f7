"""A trainer's `environment`: a class, a function that makes one, or an instance to copy."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from retrain.errors import shown


def environment_factory(environment: Any) -> tuple[Callable[[], Any], Any, str]:
    """A function that makes one instance, the first instance, and a name for the run's config.

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
    named = environment if hasattr(environment, "__qualname__") else type(environment)
    try:
        return make, make(), f"{named.__module__}:{named.__qualname__}"
    except Exception as error:
        raise TypeError(
            f"environment: can't make a {named.__name__} for each rollout "
            f"({type(error).__name__}: {error}); pass a function that makes one"
        ) from error
