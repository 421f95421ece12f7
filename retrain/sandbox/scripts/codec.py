"""Plain values as JSON and back, in the process of the program and in that of the judge."""

from __future__ import annotations

import math
from typing import Any


def encode(value: Any, depth: int = 0) -> Any:
    """The value of built-in types, or of a subclass; raises TypeError for others."""
    if depth > 100:
        raise TypeError("a deeply nested value, which tests can't compare")
    if value is None or isinstance(value, bool):
        return value
    for kind, encoded in ENCODERS.items():
        if isinstance(value, kind):
            return encoded(value, depth + 1)
    if hasattr(value, "tolist"):  # an array or a number of numpy
        return encode(value.tolist(), depth + 1)
    raise TypeError(f"a value of the type {type(value).__name__}, which tests can't compare")


def items(kind: str) -> Any:
    return lambda value, depth: {kind: [encode(item, depth) for item in value]}


ENCODERS: dict[type, Any] = {
    int: lambda value, _: int(value) if abs(value) < 2**63 else {"int": hex(value)},
    str: lambda value, _: str(value),
    float: lambda value, _: float(value) if math.isfinite(value) else {"float": repr(value)},
    complex: lambda value, _: {"complex": [repr(value.real), repr(value.imag)]},
    bytes: lambda value, _: {"bytes": bytes(value).hex()},
    bytearray: lambda value, _: {"bytes": bytes(value).hex()},
    dict: lambda value, depth: {
        "dict": [[encode(k, depth), encode(v, depth)] for k, v in value.items()]
    },
    **{kind: items(kind.__name__) for kind in (list, tuple, set, frozenset)},
}


def decode(value: Any) -> Any:
    """What `encode` got; raises ValueError or TypeError for anything else."""
    if not isinstance(value, dict):
        if isinstance(value, list):
            raise ValueError("a list has no type")
        return value
    ((name, inner),) = value.items()
    if name == "int":
        return int(inner, 16)
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
