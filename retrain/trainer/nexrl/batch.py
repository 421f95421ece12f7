"""NexRL's Batch: tensors (B, T) in `values`, further facts in `metadata`.

Rows are padded on the right. `attention_mask` tells tokens from padding (a real end-of-sequence
token may have the padding's id), `loss_mask` what the model sampled. Two fields can be reached from
both sides, and read as tensors however they were set:

    metadata["rewards"]    = values["reward"]          (B,)
    metadata["advantages"] = values["advantages"]      (B,), or (B, T)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from typing import Any, Literal, overload

import torch
from torch import Tensor

from retrain.trainer.nexrl.trajectory import Trajectory

SHARED = {"rewards": "reward", "advantages": "advantages"}
"""Names in `metadata`, and what they are called in `values`."""
REQUIRED = ("input_ids", "attention_mask", "position_ids", "loss_mask", "advantages")
"""What a batch must hold to be trained."""


class _Values(dict[str, Any]):
    """`reward` and `advantages` become tensors when they are set."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__()
        for name, value in values.items():
            self[name] = value

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, _numbers(value) if name in SHARED.values() else value)


class _Metadata(MutableMapping[str, Any]):
    """A mapping whose shared names live in `values`."""

    def __init__(self, fields: Mapping[str, Any], values: _Values) -> None:
        self._own: dict[str, Any] = {}
        self._values = values
        for name, value in fields.items():
            self[name] = value

    def __getitem__(self, name: str) -> Any:
        return self._values[SHARED[name]] if name in SHARED else self._own[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if name in SHARED:
            self._values[SHARED[name]] = value
        else:
            self._own[name] = value

    def __delitem__(self, name: str) -> None:
        if name in SHARED:
            del self._values[SHARED[name]]
        else:
            del self._own[name]

    def __iter__(self) -> Iterator[str]:
        yield from self._own
        yield from (name for name, home in SHARED.items() if home in self._values)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return repr(dict(self))


class Batch:
    """The rows of one step."""

    def __init__(
        self, values: Mapping[str, Any] | None = None, metadata: Mapping[str, Any] | None = None
    ) -> None:
        self.values = _Values(values or {})
        self.metadata: MutableMapping[str, Any] = _Metadata(metadata or {}, self.values)

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
        """A batch of its own with the same tensors."""
        return Batch(dict(self.values), {k: v for k, v in self.metadata.items() if k not in SHARED})

    @classmethod
    def from_trajectories(
        cls, trajectories: Sequence[Trajectory], *, pad_token_id: int = 0
    ) -> Batch:
        """Rows of trajectories that have `tokens` and `loss_mask`, padded on the right.

        `logprobs` (0.0 where nothing was sampled), `versions` and `reward` are there when every
        trajectory has them; `group_id` and `run_id` are lists. The trajectories themselves stand
        in `metadata["trajectories"]`. Raises ValueError when there are none.
        """
        if not trajectories:
            raise ValueError("a batch needs at least one trajectory, got none")
        masks = [[1] * len(one["tokens"]) for one in trajectories]
        values: dict[str, Any] = {
            "input_ids": [list(one["tokens"]) for one in trajectories],
            "attention_mask": masks,
            "loss_mask": [list(one["loss_mask"]) for one in trajectories],
        }
        for name in ("logprobs", "versions", "reward"):
            if all(one.get(name) is not None for one in trajectories):
                values[name] = [one[name] for one in trajectories]
        for name in ("group_id", "run_id"):
            values[name] = [one.get(name) for one in trajectories]
        metadata = {"batch_size": len(trajectories), "trajectories": list(trajectories)}
        return padding_data(cls(values, metadata), pad_token_id=pad_token_id)

    @staticmethod
    def remove_redundant_left_padding(
        batch: Batch,
        pad_token_id: int = 0,
        anchor_field: str = "input_ids",
        fields: Sequence[str] | None = None,
        max_strip_threshold: int = -1,
    ) -> Batch:
        """Without the leading columns that are padding in every row; see `_stripped`."""
        return _stripped(batch, "left", pad_token_id, anchor_field, fields, max_strip_threshold)

    @staticmethod
    def remove_redundant_right_padding(
        batch: Batch,
        pad_token_id: int = 0,
        anchor_field: str = "input_ids",
        fields: Sequence[str] | None = None,
        max_strip_threshold: int = -1,
    ) -> Batch:
        """Without the trailing columns that are padding in every row; see `_stripped`."""
        return _stripped(batch, "right", pad_token_id, anchor_field, fields, max_strip_threshold)


@overload
def padding_data(
    data: Batch,
    max_length: int | None = None,
    pad_token_id: int = 0,
    left_pad: bool = False,
    truncation: Literal["error", "left", "right"] = "error",
) -> Batch: ...
@overload
def padding_data(
    data: Tensor | Sequence[Sequence[float]],
    max_length: int | None = None,
    pad_token_id: int = 0,
    left_pad: bool = False,
    truncation: Literal["error", "left", "right"] = "error",
) -> Tensor: ...
def padding_data(
    data: Batch | Tensor | Sequence[Sequence[float]],
    max_length: int | None = None,
    pad_token_id: int = 0,
    left_pad: bool = False,
    truncation: Literal["error", "left", "right"] = "error",
) -> Batch | Tensor:
    """Rows of differing lengths as one tensor (B, max_length), or all such fields of a batch.

    `max_length` None is the longest row's. Of a batch, `input_ids` is filled with `pad_token_id`
    and every other field with 0; missing `attention_mask` and `position_ids` are made. A field that
    is a tensor already is kept, or widened. Raises ValueError on a longer row unless `truncation`
    says which of its sides is cut off.
    """
    if not isinstance(data, Batch):
        rows = [row.tolist() if isinstance(row, Tensor) else list(row) for row in data]
        length = max(map(len, rows), default=0) if max_length is None else max_length
        fill = float(pad_token_id) if _fractional(rows) else pad_token_id
        return _padded(rows, length, fill, left_pad, truncation)
    padded = data.copy()
    ids = padded.values["input_ids"]
    length = max(map(len, ids)) if max_length is None else max_length
    padded.values.setdefault("attention_mask", [[1] * len(row) for row in ids])
    for name, value in list(padded.values.items()):
        if _per_token(value):
            fill = pad_token_id if name == "input_ids" else 0
            padded.values[name] = padding_data(value, length, fill, left_pad, truncation)
    if "position_ids" not in padded.values:
        mask = padded.values["attention_mask"]
        padded.values["position_ids"] = compute_position_id_with_mask(mask)
    return padded


def compute_position_id_with_mask(mask: Tensor) -> Tensor:
    """(B, T) attention mask to positions: 0, 1, ... over the tokens, 0 on padding before them."""
    return torch.clamp(torch.cumsum(mask, dim=-1) - 1, min=0)


def _stripped(
    batch: Batch,
    side: Literal["left", "right"],
    pad_token_id: int,
    anchor_field: str,
    fields: Sequence[str] | None,
    limit: int,
) -> Batch:
    """A column goes when it is padding in every row: by `attention_mask`, which knows an
    end-of-sequence token from padding with its id, or else where the anchor is `pad_token_id`.

    `fields` None are all that are as wide as the anchor; at most `limit` columns go unless it is
    negative, and one column always stays. Raises KeyError when a field is missing.
    """
    _require(batch, (anchor_field, *(fields or ())))
    anchor = batch.values[anchor_field]
    mask = batch.values.get("attention_mask")
    if isinstance(mask, Tensor) and mask.shape == anchor.shape:
        used = (mask > 0).any(dim=0)
    else:
        used = (anchor != pad_token_id).any(dim=0)
    columns = torch.nonzero(used).flatten().tolist()
    width = anchor.shape[1]
    first, last = (columns[0], columns[-1]) if columns else (0, 0)
    spare = first if side == "left" else width - 1 - last
    spare = min(spare, limit) if limit >= 0 else spare
    stripped = batch.copy()
    for name, value in batch.values.items():
        wide = isinstance(value, Tensor) and value.dim() == 2 and value.shape[1] == width
        if wide and (fields is None or name in fields):
            stripped.values[name] = (
                value[:, spare:] if side == "left" else value[:, : width - spare]
            )
    return stripped


def _require(batch: Batch, names: Sequence[str]) -> None:
    for name in names:
        if name not in batch.values:
            raise KeyError(
                f"the batch has no field {name!r}: it has {', '.join(batch.values) or 'none'}"
            )


def _padded(
    rows: Sequence[Sequence[float]], length: int, fill: float, left: bool, truncation: str
) -> Tensor:
    made = []
    for index, row in enumerate(rows):
        over = len(row) - length
        if over > 0 and truncation == "error":
            raise ValueError(
                f"row {index} has {len(row)} values and max_length is {length}: shorten it, or "
                "say which side to cut off (truncation='left' or 'right')"
            )
        kept = row if over <= 0 else (row[over:] if truncation == "left" else row[:length])
        padding = [fill] * (length - len(kept))
        made.append([*padding, *kept] if left else [*kept, *padding])
    dtype = torch.float32 if isinstance(fill, float) else torch.long
    return torch.tensor(made, dtype=dtype)


def _per_token(value: Any) -> bool:
    """Whether a field holds one number per token of each row."""
    if isinstance(value, Tensor):
        return value.dim() == 2
    if not isinstance(value, list) or not value:
        return False
    return all(isinstance(row, list | tuple | Tensor) for row in value)


def _fractional(rows: Sequence[Sequence[float]]) -> bool:
    return any(isinstance(value, float) for row in rows for value in row)


def _numbers(value: Any) -> Any:
    """A list of numbers, or of tensors of one shape, as a tensor; anything else as it is."""
    if isinstance(value, Tensor | str) or not isinstance(value, Sequence):
        return value
    if value and all(isinstance(row, Tensor) and row.dim() > 0 for row in value):
        return torch.stack(list(value))
    try:
        return torch.tensor([float(number) for number in value], dtype=torch.float32)
    except (TypeError, ValueError):  # rows of differing lengths: padding_data makes them one tensor
        return value
