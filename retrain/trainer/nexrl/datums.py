"""Trajectories as datums, which service holders train, and datums as the pipe's samples.

A datum has the fields of NexRL's pages: `prompt`, `response`, `advantage` (None if it was not set)
and `metadata`. A datum of a trajectory with tokens also has `tokens`, `loss_mask` and, if the
trajectory has them, `logprobs`, `versions` and `token_advantages`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from retrain.trainer.nexrl.trajectory import as_trajectories
from retrain.types import Sample

TOKEN_FIELDS = ("tokens", "loss_mask", "logprobs", "versions", "token_advantages")
Datum = dict[str, Any]


def convert_trajectories_to_datums(trajectories: Sequence[Mapping[str, Any]]) -> list[Datum]:
    """One datum per trajectory, in order. Raises ValueError if one has no tokens and no strings."""
    datums = []
    for index, trajectory in enumerate(as_trajectories(trajectories)):
        tokens = {n: trajectory[n] for n in TOKEN_FIELDS if trajectory.get(n) is not None}
        if not {"tokens", "loss_mask"} <= tokens.keys() and trajectory.get("response") is None:
            raise nothing_to_train(trajectory, f"trajectory {index}")
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


def nothing_to_train(fields: Mapping[str, Any], name: str = "the trajectory") -> ValueError:
    return ValueError(
        f"{name} has neither `tokens` and `loss_mask` nor `prompt` and `response` as strings; it "
        f"has {', '.join(fields) or 'no fields'}"
    )


def samples_of_datums(
    datums: Sequence[Mapping[str, Any]], *, weighted: bool = False
) -> list[Sample]:
    """The pipe's samples of datums with tokens; log-probs are NaN where a datum has none.

    With `weighted` every trained token has weight 1 and advantages are ignored (cross-entropy).
    Otherwise a datum without a finite advantage is a ValueError.
    """
    samples = []
    for index, datum in enumerate(datums):
        tokens, mask = list(datum["tokens"]), [int(on > 0) for on in datum["loss_mask"]]
        credit = [1.0] * sum(mask) if weighted else _credit(datum, index, sum(mask))
        on_tokens = iter(credit)
        group, rollout = _names(datum.get("metadata") or {}, index)
        logprobs, versions = datum.get("logprobs"), datum.get("versions")
        samples.append(
            Sample(
                tokens,
                mask,
                masked([math.nan] * len(mask) if logprobs is None else logprobs, mask),
                [next(on_tokens) if on else 0.0 for on in mask],
                [int(v) for v in masked(versions or [0] * len(mask), mask, -1)],
                group_id=group,
                run_id=f"{group}#{rollout}",
            )
        )
    return samples


def _names(facts: Mapping[str, Any], index: int) -> tuple[str, Any]:
    """The prompt and the rollout of datum `index`.

    Without a group_id, run_id names the prompt: then each datum is a rollout.
    """
    if "group_id" in facts:
        return str(facts["group_id"]), facts.get("run_id", index)
    return str(facts.get("run_id", f"datum {index}")), index


def masked(values: Sequence[float], mask: Sequence[int], otherwise: float = 0.0) -> list[float]:
    """The values where the mask is 1, `otherwise` elsewhere."""
    return [float(v) if on else otherwise for v, on in zip(values, mask, strict=True)]


def _credit(datum: Mapping[str, Any], index: int, trained: int) -> list[float]:
    given = datum.get("token_advantages")
    if given is None or len(given) == 0:
        if datum.get("advantage") is None:
            raise ValueError(
                f"datum {index} has no advantage: set `trajectory.advantage` (or "
                "`token_advantages`) in _prepare_trajectories"
            )
        given = [datum["advantage"]] * trained
    if len(given) != trained:
        raise ValueError(
            f"datum {index} has {len(given)} token_advantages for {trained} trained tokens: "
            "expected one per trained token"
        )
    credit = [float(value) for value in given]
    if not all(map(math.isfinite, credit)):
        raise ValueError(f"datum {index} has an advantage that is NaN or infinite")
    return credit
