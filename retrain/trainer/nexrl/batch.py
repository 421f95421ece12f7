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


def _stripped(
    side: Literal["left", "right"],
    batch: Batch,
    pad_token_id: int = 0,
    anchor_field: str = "input_ids",
    fields: Sequence[str] | None = None,
    max_strip_threshold: int = -1,
) -> Batch:
    """A copy without the columns on one side that are padding in every row.

    A column is padding by `attention_mask`, or without that mask where `anchor_field` is
    `pad_token_id`. At least one column stays, and a `max_strip_threshold` of 0 or more limits how
    many are removed. `fields` None means all fields as wide as the anchor. Raises KeyError for a
    missing field.
    """
    require(batch, (anchor_field, *(fields or ())))
    anchor = batch.values[anchor_field]
    mask = batch.values.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.shape != anchor.shape:
        mask = anchor != pad_token_id
    used = torch.nonzero((mask > 0).any(dim=0)).flatten().tolist() or [0]
    width = anchor.shape[1]
    spare = used[0] if side == "left" else width - 1 - used[-1]
    spare = min(spare, max_strip_threshold) if max_strip_threshold >= 0 else spare
    kept = slice(spare, None) if side == "left" else slice(width - spare)
    done = batch.copy()
    for name in batch.values if fields is None else fields:
        value = batch.values[name]
        if isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == width:
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
        """The number of rows."""
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
        batch: Batch = padding_data(cls(values, metadata), pad_token_id=pad_token_id)
        return batch

    remove_redundant_left_padding = staticmethod(partial(_stripped, "left"))
    remove_redundant_right_padding = staticmethod(partial(_stripped, "right"))


def padding_data(
    data: Batch | Tensor | Sequence[Sequence[float]],
    max_length: int | None = None,
    pad_token_id: int = 0,
    left_pad: bool = False,
    truncation: Literal["error", "left", "right"] = "error",
) -> Any:  # any: a Batch of a Batch, else a Tensor
    """Pad rows of different lengths to one tensor (B, max_length), or all such fields of a batch.

    `max_length` None means the longest row. In a batch, `input_ids` is padded with `pad_token_id`,
    every other field with 0, and missing `attention_mask` and `position_ids` are added. Raises
    ValueError for a longer row, unless `truncation` names the side to cut.
    """
    if not isinstance(data, Batch):
        return _padded(data, max_length, pad_token_id, left_pad, truncation)
    padded = data.copy()
    ids = padded.values["input_ids"]
    length = max(map(len, ids)) if max_length is None else max_length
    padded.values.setdefault("attention_mask", [[1] * len(row) for row in ids])
    for name, value in list(padded.values.items()):
        if _per_token(value):
            fill = pad_token_id if name == "input_ids" else 0
            padded.values[name] = _padded(value, length, fill, left_pad, truncation)
    if "position_ids" not in padded.values:
        mask = padded.values["attention_mask"]
        padded.values["position_ids"] = compute_position_id_with_mask(mask)
    return padded


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """(B, T) attention mask to positions: 0, 1, ... over the tokens, 0 on padding before them."""
    return torch.clamp(torch.cumsum(mask, dim=-1) - 1, min=0)


def require(batch: Batch, names: Sequence[str]) -> None:
    """Raises KeyError unless the batch has all of these fields."""
    if missing := [name for name in names if name not in batch.values]:
        raise KeyError(
            f"the batch has no field {', '.join(map(repr, missing))}: it has "
            f"{', '.join(batch.values) or 'none'}"
        )


def _padded(
    data: Tensor | Sequence[Sequence[float]],
    length: int | None,
    fill: int,
    left: bool,
    truncation: str,
) -> Tensor:
    rows = [row.tolist() if isinstance(row, Tensor) else list(row) for row in data]
    length = max(map(len, rows), default=0) if length is None else length
    fractional = any(isinstance(value, float) for row in rows for value in row)
    made = []
    for index, row in enumerate(rows):
        over = max(0, len(row) - length)
        if over and truncation == "error":
            raise ValueError(
                f"row {index} has {len(row)} values, but max_length is {length}: shorten it, or "
                "name the side to cut (truncation='left' or 'right')"
            )
        kept = row[over:] if truncation == "left" else row[:length]
        padding = [fill] * (length - len(kept))
        made.append([*padding, *kept] if left else [*kept, *padding])
    return torch.tensor(made, dtype=torch.float32 if fractional else torch.long)


def _per_token(value: Any) -> bool:
    """Whether a field has one number per token of each row."""
    if isinstance(value, Tensor):
        return value.dim() == 2
    rows = isinstance(value, list) and value
    return bool(rows) and all(isinstance(row, list | tuple | Tensor) for row in value)


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
