"""Between `retrain`'s values and the protocol's: datums and loss settings out, metrics in."""

from __future__ import annotations

import math
from collections.abc import Sequence

from retrain.adapters.remote.datums import Datum
from retrain.errors import NonFiniteError
from retrain.losses import clip_bounds, settings
from retrain.protocols.tinker import values as wire
from retrain.types import Batch, Metrics


def row(loss: str, datum: Datum) -> wire.Datum:
    """The datum of a loss that the service computes; it knows no mask, the zeros stand for it."""
    if loss == "cross_entropy":
        return weighted(datum, datum.advantages)
    inputs = {
        "target_tokens": wire.Tensor(datum.targets, "int64"),
        "logprobs": wire.Tensor(datum.logprobs),
        "advantages": wire.Tensor(datum.advantages),
    }
    return wire.Datum(datum.inputs, inputs)


def weighted(datum: Datum, weights: Sequence[float]) -> wire.Datum:
    inputs = {
        "target_tokens": wire.Tensor(datum.targets, "int64"),
        "weights": wire.Tensor(weights),
    }
    return wire.Datum(datum.inputs, inputs)


def loss_config(batch: Batch) -> dict[str, float | str]:
    """Our keys in the protocol's: the clip's bounds are ratios there, not distances from 1."""
    keys = settings(batch.loss, batch.loss_config)
    bounds = clip_bounds(keys)
    if bounds is None:
        return dict(keys)
    return {"clip_low_threshold": bounds[0], "clip_high_threshold": bounds[1]}


def service_metrics(output: wire.ForwardBackwardOutput, *, needed: bool = False) -> Metrics:
    """The service's own metrics under `service/`; with `needed` its loss is the step's."""
    named = {f"service/{name}": value for name, value in output.metrics.items()}
    if not needed:
        return named
    loss = output.metrics.get("loss:sum", output.metrics.get("loss", math.nan))
    if not math.isfinite(loss):
        raise NonFiniteError(f"the service returns no log-probs, and its loss is {loss}")
    return {**named, "loss": loss}


def has_logprobs(output: wire.ForwardBackwardOutput) -> bool:
    return all("logprobs" in one for one in output.outputs)
