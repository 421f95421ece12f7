"""Which packages a run needs and are not installed; imports none of them."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec

from retrain.adapters.base import AdapterOptions
from retrain.errors import install_command


def missing_packages(options: AdapterOptions, backend: str) -> Iterator[str]:
    """One problem per optional dependency set of which a module is missing."""
    for extra, modules in options.needs().items():
        missing = ", ".join(name for name in modules if not installed(name))
        if missing:
            yield (
                f"backend.type: {backend} needs what is not installed ({missing}): "
                f"{install_command(extra)}"
            )


def installed(module: str) -> bool:
    """Whether the module can be found."""
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the package that it is in
        return False
