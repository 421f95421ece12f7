"""Trajectories as what a service holder trains.

A datum has the pages' fields `prompt`, `response`, `advantage` (None where none was set) and
`metadata`; one of a trajectory with tokens also has `tokens`, `loss_mask` and, where it has them,
`logprobs`, `versions` and `token_advantages`. Lining tokens up with their targets is the adapters'
business (`adapters.remote.datums.shift`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from retrain.trainer.nexrl.trajectory import as_trajectories
from retrain.types import Sample

TOKEN_FIELDS = ("tokens", "loss_mask", "logprobs", "versions", "token_advantages")
Datum = dict[str, Any]
Encode = Callable[[Mapping[str, Any]], tuple[list[int], list[int]]]
"""A text datum to its ids and loss mask."""


def convert_trajectories_to_datums(trajectories: Sequence[Mapping[str, Any]]) -> list[Datum]:
    """One datum a trajectory, in order. Raises ValueError when one has neither tokens nor texts."""
    datums = []
    for index, trajectory in enumerate(as_trajectories(trajectories)):
        tokens = {n: trajectory[n] for n in TOKEN_FIELDS if trajectory.get(n) is not None}
        if not {"tokens", "loss_mask"} <= tokens.keys() and trajectory.get("response") is None:
            raise ValueError(
                f"trajectory {index} has neither `tokens` and `loss_mask` nor the texts `prompt` "
                f"and `response`; it has {', '.join(trajectory) or 'nothing'}"
            )
        advantage = trajectory.get("advantage")
        named = {"prompt", "response", "advantage", *TOKEN_FIELDS}
        datums.append(
            {
                "prompt": trajectory.get("prompt", ""),
                "response": trajectory.get("response", ""),
                "advantage": None if advantage is None else float(advantage),
                "metadata": {k: v for k, v in trajectory.items() if k not in named},
                **tokens,
            }
        )
    return datums


def samples_of_datums(
    datums: Sequence[Mapping[str, Any]], *, weighted: bool, encode: Encode
) -> list[Sample]:
    """The pipe's samples of datums; log-probs are NaN where a datum has none.

    With `weighted` every trained token weighs 1, whatever the advantages (cross-entropy). Otherwise
    ValueError names the datum that has no finite advantage.
    """
    samples = []
    for index, datum in enumerate(datums):
        if datum.get("tokens") is None or datum.get("loss_mask") is None:
            tokens, mask = encode(datum)
        else:
            tokens, mask = list(datum["tokens"]), [int(on > 0) for on in datum["loss_mask"]]
        credit = [1.0] * sum(mask) if weighted else _credit(datum, index, sum(mask))
        facts = datum.get("metadata") or {}
        group = str(facts.get("group_id", facts.get("run_id", f"datum {index}")))
        given = datum.get("logprobs")
        samples.append(
            Sample(
                tokens,
                mask,
                _where(mask, given if given is not None else [math.nan] * len(mask), 0.0),
                _laid(mask, credit),
                [int(v) for v in _where(mask, datum.get("versions") or [0] * len(mask), -1)],
                group_id=group,
                run_id=f"{group}#{facts.get('run_id', index)}",
            )
        )
    return samples


def _credit(datum: Mapping[str, Any], index: int, trained: int) -> list[float]:
    """An advantage for each trained token."""
    given = datum.get("token_advantages")
    if given is None or len(given) == 0:
        advantage = datum.get("advantage")
        if advantage is None:
            raise ValueError(
                f"datum {index} has no advantage: set `trajectory.advantage` (or "
                "`token_advantages`) in _prepare_trajectories"
            )
        given = [advantage] * trained
    if len(given) != trained:
        raise ValueError(
            f"datum {index} has {trained} trained tokens, but {len(given)} token_advantages: one "
            "for each is expected"
        )
    credit = [float(value) for value in given]
    if not all(map(math.isfinite, credit)):
        raise ValueError(f"datum {index} has an advantage that is NaN or infinite")
    return credit


def _laid(mask: Sequence[int], credit: Sequence[float]) -> list[float]:
    """The values on the positions with mask 1, in order; 0.0 elsewhere."""
    values = iter(credit)
    return [next(values) if on else 0.0 for on in mask]


def _where(mask: Sequence[int], values: Sequence[float], otherwise: float) -> list[float]:
    return [float(v) if on else otherwise for on, v in zip(mask, values, strict=True)]
