"""A datum for the Tinker client."""

from __future__ import annotations

from retrain.adapters.tinker import Datum, Tensor


def datum(*tokens: int) -> Datum:
    inputs = {
        "target_tokens": Tensor(list(tokens[1:]), "int64"),
        "weights": Tensor([1.0] * (len(tokens) - 1)),
    }
    return Datum(list(tokens[:-1]), inputs)
