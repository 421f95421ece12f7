"""Plain values as JSON and back, in the process of the program and in that of the judge."""

from __future__ import annotations

import math
from typing import Any

PLAIN = "a value of the type {}, which tests can't compare"


def encode(value: Any, depth: int = 0) -> Any:
    """The value of built-in types; raises TypeError for others."""
    if depth > 100:
        raise TypeError("a deeply nested value, which tests can't compare")
    if value is None or isinstance(value, bool):
        return value
    for kind in (int, str):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, float):
        return float(value) if math.isfinite(value) else {"float": repr(float(value))}
    if isinstance(value, complex):
        return {"complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, bytes | bytearray):
        return {"bytes": bytes(value).hex()}
    if isinstance(value, dict):
        pairs = [[encode(k, depth + 1), encode(v, depth + 1)] for k, v in value.items()]
        return {"dict": pairs}
    for kind in (list, tuple, set, frozenset):
        if isinstance(value, kind):
            return {kind.__name__: [encode(item, depth + 1) for item in value]}
    if hasattr(value, "tolist"):  # an array or a number of numpy
        return encode(value.tolist(), depth + 1)
    raise TypeError(PLAIN.format(type(value).__name__))


def decode(value: Any) -> Any:
    """What `encode` got; raises ValueError or TypeError for anything else."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list has no type")
        return value
    ((name, inner),) = value.items()
    if name == "float":
        return {"inf": math.inf, "-inf": -math.inf}.get(inner, math.nan)
    if name == "complex":
        return complex(float(inner[0]), float(inner[1]))
    if name == "bytes":
        return bytes.fromhex(inner)
    if name == "dict":
        return {decode(k): decode(v) for k, v in inner}
    kinds: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
    return kinds[name](decode(item) for item in inner)
