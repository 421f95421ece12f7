"""NexRL's Batch: tensors (B, T) in `values`, further facts in `metadata`.

Rows are padded on the right. `attention_mask` marks tokens (an end-of-sequence token may have the
id of the padding), `loss_mask` marks the tokens that the model sampled. Two fields are in both
mappings, whichever of them was set, and always as tensors:

    metadata["rewards"]    = values["reward"]          (B,)
    metadata["advantages"] = values["advantages"]      (B,) or (B, T)
"""

from __future__ import annotations

from collections import UserDict
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from retrain.trainer.nexrl.trajectory import Trajectory

SHARED = {"reward": "rewards", "advantages": "advantages"}
"""Fields that are in both mappings: their names in `values`, and in `metadata`."""


class _Twin(UserDict[str, Any]):
    """A mapping that sets and deletes its shared names in another mapping too."""

    def __init__(self, names: Mapping[str, str]) -> None:
        super().__init__()
        self._names = names
        self.other: _Twin

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self._names:
            value = self.other.data[self._names[name]] = _numbers(value)
        self.data[name] = value

    def __delitem__(self, name: str) -> None:
        del self.data[name]
        if name in self._names:
            del self.other.data[self._names[name]]


def _used_columns(anchor: Tensor, mask: Any, pad_token_id: int) -> list[int]:
    """The columns that are no padding in some row; the first one if there is none."""
    if not isinstance(mask, Tensor) or mask.shape != anchor.shape:
        mask = anchor != pad_token_id
    return torch.nonzero((mask > 0).any(dim=0)).flatten().tolist() or [0]


def _stripped(
    side: Literal["left", "right"],
    batch: Batch,
    pad_token_id: int = 0,
    anchor_field: str = "input_ids",
    fields: Sequence[str] | None = None,
) -> Batch:
    """A copy without the columns on one side that are padding in every row.

    A column is padding by `attention_mask`, or without that mask where `anchor_field` is
    `pad_token_id`. At least one column stays. `fields` None means all fields as wide as the anchor.
    Raises KeyError for a missing field.
    """
    require(batch, (anchor_field, *(fields or ())))
    anchor = batch.values[anchor_field]
    used = _used_columns(anchor, batch.values.get("attention_mask"), pad_token_id)
    kept = slice(used[0], None) if side == "left" else slice(used[-1] + 1)
    done = batch.copy()
    for name in batch.values if fields is None else fields:
        value = batch.values[name]
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == anchor.shape[1]:
            done.values[name] = value[:, kept]
    return done


class Batch:
    """The rows of one step."""

    def __init__(
        self, values: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> None:
        self.values = _Twin(SHARED)
        self.metadata = _Twin({theirs: ours for ours, theirs in SHARED.items()})
        self.values.other, self.metadata.other = self.metadata, self.values
        self.values.update(values or {})
        self.metadata.update(metadata or {})

    def __len__(self) -> int:
        for value in self.values.values():
            if isinstance(value, list) or (isinstance(value, Tensor) and value.dim() > 0):
                return len(value)
        return int(self.metadata.get("batch_size", 0))

    def __repr__(self) -> str:
        shapes = {name: tuple(getattr(v, "shape", ())) for name, v in self.values.items()}
        return f"Batch({len(self)} rows, values={shapes}, metadata={list(self.metadata)})"

    def copy(self) -> Batch:
        """A batch with mappings of its own and the same tensors."""
        return Batch(self.values, self.metadata)

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], *, pad_token_id: int = 0
    ) -> Batch:
        """Rows of trajectories that have `tokens` and `loss_mask`, padded on the right.

        `logprobs` (0.0 where nothing was sampled), `versions` and `reward` are present if every
        trajectory has them. `group_id` and `run_id` are lists. `metadata["trajectories"]` holds the
        trajectories. Raises ValueError when there are none.
        """
        if not trajectories:
            raise ValueError("Batch.from_trajectories: got no trajectories, expected at least one")
        values: dict[str, Any] = {
            "input_ids": [one["tokens"] for one in trajectories],
            "loss_mask": [one["loss_mask"] for one in trajectories],
        }
        for name in ("logprobs", "versions", "reward"):
            if all(one.get(name) is not None for one in trajectories):
                values[name] = [one[name] for one in trajectories]
        for name in ("group_id", "run_id"):
            values[name] = [one.get(name) for one in trajectories]
        metadata = {"batch_size": len(trajectories), "trajectories": list(trajectories)}
        return padding_data(cls(values, metadata), pad_token_id=pad_token_id)

    remove_redundant_left_padding = staticmethod(partial(_stripped, "left"))
    remove_redundant_right_padding = staticmethod(partial(_stripped, "right"))


def padding_data(batch: Batch, pad_token_id: int = 0) -> Batch:
    """A copy whose lists of rows are tensors (B, T), padded on the right to the longest row.

    `input_ids` is padded with `pad_token_id`, every other field with 0. Missing `attention_mask`
    and `position_ids` are added.
    """
    padded = batch.copy()
    values = padded.values
    values.setdefault("attention_mask", [[1] * len(row) for row in values["input_ids"]])
    for name, value in list(values.items()):
        if isinstance(value, list) and value and isinstance(value[0], list | tuple | Tensor):
            values[name] = _padded(value, pad_token_id if name == "input_ids" else 0)
    if "position_ids" not in values:
        values["position_ids"] = compute_position_id_with_mask(values["attention_mask"])
    return padded


def _padded(value: Sequence[Any], fill: int) -> Tensor:
    rows = [torch.as_tensor(row) for row in value]
    if any(row.is_floating_point() for row in rows):
        rows = [row.float() for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, True, fill)


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """(B, T) attention mask to positions: 0, 1, ... over the tokens, 0 on padding before them."""
    return torch.clamp(torch.cumsum(mask, dim=-1) - 1, min=0)


def apply_kl_penalty(batch: Batch, beta: float) -> Batch:
    """A copy with beta x (log p - log ref) subtracted from `token_level_scores` where tokens train.

    Reads `ref_log_probs`, and `log_probs` or else `old_log_probs`. Raises KeyError for a missing
    field.
    """
    own = "log_probs" if "log_probs" in batch.values else "old_log_probs"
    require(batch, ("token_level_scores", "loss_mask", "ref_log_probs", own))
    penalised, values = batch.copy(), batch.values
    gaps = torch.where(values["loss_mask"] > 0, values[own] - values["ref_log_probs"], 0.0)
    penalised.values["token_level_scores"] = values["token_level_scores"] - beta * gaps
    return penalised


def require(batch: Batch, names: Sequence[str]) -> None:
    """Raises KeyError unless the batch has all of these fields."""
    if missing := [name for name in names if name not in batch.values]:
        raise KeyError(
            f"the batch has no field {', '.join(map(repr, missing))}: it has "
            f"{', '.join(batch.values) or 'none'}"
        )


def _numbers(value: Any) -> Any:
    """A list of numbers, or of tensors of one shape, as a tensor; anything else unchanged."""
    if isinstance(value, Tensor | str) or not isinstance(value, Sequence):
        return value
    if value and all(isinstance(row, Tensor) and row.dim() > 0 for row in value):
        return torch.stack(list(value))
    try:
        return torch.tensor([float(number) for number in value], dtype=torch.float32)
    except (TypeError, ValueError):  # rows of different lengths, which padding_data pads
        return value
