"""Samples -> the tensor dicts that TRL's loss reads, micro-batch by micro-batch.

Each token of a batch is trained exactly once: a micro-batch is a set of whole samples. Samples
without a token to train are dropped, since they would only add padding, and rows are sorted by
length to need little padding. A micro-batch is split into prompt and completion at one column, the
earliest trained token of its rows. So no row is padded on the left, and positions are the sampler's
for every position encoding. The part of a longer prompt after the split is masked, like the other
tokens that the model did not sample.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from retrain.algorithms.batching import rollout_tokens
from retrain.errors import NonFiniteError, first_of
from retrain.types import Sample

Rows = dict[str, Tensor]
STREAM, SHARE = "stream:", "share"


def check_samples(samples: Sequence[Sample]) -> None:
    """Raises ValueError when there is no token to train, or when a first token is to be trained."""
    if not any(any(sample.loss_mask) for sample in samples):
        raise ValueError(
            f"a batch of {len(samples)} samples has no token to train: every loss_mask is 0"
        )
    for sample in samples:
        if sample.loss_mask and sample.loss_mask[0]:
            raise ValueError(
                f"a sample of group {sample.group_id!r} trains its first token, which has no "
                "context; give the prompt at least one token, e.g. a beginning-of-sequence token"
            )


def with_shares(samples: Sequence[Sample]) -> list[Sample]:
    """The samples with each one's share of its rollout's trained tokens as the stream `share`.

    A mean over rows, weighted by it, is a mean over rollouts of the mean over each one's tokens.
    """
    counts = zip(samples, rollout_tokens(samples), strict=True)
    shares = [sum(sample.loss_mask) / max(1, whole) for sample, whole in counts]
    return [
        replace(sample, streams={**sample.streams, SHARE: [share] * len(sample.token_ids)})
        for sample, share in zip(samples, shares, strict=True)
    ]


def micro_batches(
    samples: Sequence[Sample],
    *,
    rows: int | None,
    tokens: int,
    paired: bool = False,
    rollouts: bool = False,
) -> list[list[Sample]]:
    """Split into parts of at most `rows` samples and `tokens` padded tokens, longest last.

    `paired` keeps the two rows of a pair together (by the stream `pair_ids`, else 0-1, 2-3, ...),
    `rollouts` the samples of a rollout. What belongs together may exceed the limits.
    """
    parts: list[list[Sample]] = []
    for unit in sorted(units(samples, paired, rollouts), key=_longest):
        width = max(_longest(unit), _longest(parts[-1]) if parts else 0)
        count = len(unit) + (len(parts[-1]) if parts else 0)
        if parts and count * width <= tokens and (rows is None or count <= rows):
            parts[-1] += unit
        else:
            parts.append(list(unit))
    return parts


def collate(samples: Sequence[Sample], pad_token_id: int, void: int = 0) -> Rows:
    """One micro-batch of B rows: a prompt block (B, P) and a completion block (B, T).

    `tool_mask` is the loss mask, `completion_mask` tells tokens from padding, `rollouts` (B,)
    numbers the rollouts; a sample's own stream NAME is the key `stream:NAME`, (B, T). The last
    `void` rows train no token.

    Raises NonFiniteError on an advantage, log-prob or stream that is NaN or infinite.
    """
    cut = min(sample.loss_mask.index(1) for sample in samples if any(sample.loss_mask))
    ids = _padded((s.token_ids for s in samples), pad_token_id, torch.long)
    present = _padded(([1] * len(s.token_ids) for s in samples), 0, torch.long)
    floats = _floats(samples)
    for name, values in floats.items():
        _check_finite(name, values[:, cut:], samples)
    rows = {
        "rollouts": _numbers(samples),
        "prompt_ids": ids[:, :cut],
        "prompt_mask": present[:, :cut],
        "completion_ids": ids[:, cut:],
        "completion_mask": present[:, cut:],
        "tool_mask": _padded((s.loss_mask for s in samples), 0, torch.long)[:, cut:],
        **{name: values[:, cut:] for name, values in floats.items()},
    }
    if void:
        rows["tool_mask"][-void:] = 0
    return rows


def _floats(samples: Sequence[Sample]) -> Rows:
    """What has a number per token: log-probs, advantages and streams; (B, P + T) each."""
    streams = sorted({name for sample in samples for name in sample.streams})
    return {
        "old_per_token_logps": _padded((s.logprobs for s in samples), 0.0),
        "advantages": _padded((s.advantages for s in samples), 0.0),
        **{f"{STREAM}{name}": _stream(samples, name) for name in streams},
    }


def _numbers(samples: Sequence[Sample]) -> Tensor:
    """The number of each sample's rollout; (B,)."""
    runs = [sample.run_id or row for row, sample in enumerate(samples)]
    numbers = {run: number for number, run in enumerate(dict.fromkeys(runs))}
    return torch.tensor([numbers[run] for run in runs])


def group_ids(samples: Iterable[Sample]) -> str:
    """The groups of these samples, for a message."""
    return first_of(list(dict.fromkeys(sample.group_id for sample in samples)))


def units(samples: Sequence[Sample], paired: bool, rollouts: bool) -> Iterator[list[Sample]]:
    """What must stay in one micro-batch: a sample, the two of a pair, or those of a rollout."""
    units: dict[float | str, list[Sample]] = {}
    for row, sample in enumerate(samples):
        ids = sample.streams.get("pair_ids")
        unit: float | str = sample.run_id if rollouts and sample.run_id else row
        if paired:
            unit = max(ids) if ids else row // 2
        elif not any(sample.loss_mask):
            continue
        units.setdefault(unit, []).append(sample)
    yield from units.values()


def _longest(samples: Sequence[Sample]) -> int:
    return max(len(sample.token_ids) for sample in samples)


def _padded(
    rows: Iterable[Sequence[float]], fill: float, dtype: torch.dtype = torch.float32
) -> Tensor:
    lists = list(rows)
    width = max(map(len, lists))
    return torch.tensor([[*row, *([fill] * (width - len(row)))] for row in lists], dtype=dtype)


def _stream(samples: Sequence[Sample], name: str) -> Tensor:
    for sample in samples:
        if name not in sample.streams:
            raise ValueError(
                f"a sample of group {sample.group_id!r} lacks the stream {name!r}, which other "
                "samples of its batch have; give it to all or to none"
            )
    return _padded((sample.streams[name] for sample in samples), 0.0)


def _check_finite(name: str, values: Tensor, samples: Sequence[Sample]) -> None:
    good = values.isfinite().all(-1)
    if not bool(good.all()):
        bad = [sample for sample, fine in zip(samples, good.tolist(), strict=True) if not fine]
        raise NonFiniteError(
            f"{name} of groups {group_ids(bad)} is NaN or infinite; the batch was not trained"
        )
