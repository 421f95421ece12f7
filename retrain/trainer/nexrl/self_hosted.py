"""Trainers that prepare a tensor Batch, and whose weights are trained in this process.

    trajectories -> Batch (padded, (B, T)) -> _prepare_batch (the algorithm) -> samples -> adapter

`_prepare_batch` must return a batch with `input_ids`, `attention_mask`, `position_ids`,
`loss_mask` and `advantages`. `old_log_probs` default to the sampler's `logprobs`, or without those
to a forward pass of the current weights.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor

from retrain.trainer.nexrl.advantages import EPS, compute_grpo_advantage_for_trajectories
from retrain.trainer.nexrl.base import BaseTrainer
from retrain.trainer.nexrl.batch import Batch, apply_kl_penalty, require
from retrain.trainer.nexrl.datums import samples_of_datums
from retrain.trainer.nexrl.metrics import log_grpo_metrics
from retrain.trainer.nexrl.trajectory import Trajectory, as_trajectories
from retrain.types import Sample

log = logging.getLogger(__name__)
REQUIRED = ("input_ids", "attention_mask", "position_ids", "loss_mask", "advantages")
"""What a batch must have to be trained."""


class SelfHostedTrainer(BaseTrainer):
    """Trains batches of tensors. Subclasses override `_prepare_batch`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        service = self.settings.service
        if service.backend == "self-hosted" and service.url != "local":
            log.warning("train_service.url %s has no effect: training runs here", service.url)

    @abstractmethod
    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """Return the batch with `advantages`, (B,) or (B, T), and metrics."""

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """Take one optimizer step over all trajectories and serve the new weights.

        Raises KeyError or ValueError when the prepared batch can't be trained.
        """
        rows = as_trajectories(trajectories)
        for row in rows:
            row.update(self.service.encode(row))
        batch = Batch.from_trajectories(rows, pad_token_id=self._pad_token_id)
        logged = self._log_rollout_metrics(batch)
        prepared, metrics = self._prepare_batch(batch)
        _check(prepared)
        samples = samples_of(prepared, self._compute_old_log_probs(prepared))
        own = {**logged, **metrics, "training/batch_size": float(len(prepared))}
        return own | self.service.update(samples)

    # --- for subclasses

    def _reward_fn(self, batch: Batch) -> Tensor:
        """(B, T): each row's reward on its last trained token."""
        trained = batch.values["loss_mask"] > 0
        last = trained & (trained.cumsum(-1) == trained.sum(-1, keepdim=True))
        return torch.where(last, batch.metadata["rewards"].float()[:, None], 0.0)

    def _compute_old_log_probs(self, batch: Batch) -> Tensor:
        """(B, T): `old_log_probs`, else the sampler's, else those of the current weights."""
        for name in ("old_log_probs", "logprobs"):
            if name in batch.values:
                found: Tensor = batch.values[name]
                return found
        return self._scored(batch, reference=False)

    def _compute_ref_log_probs(self, batch: Batch) -> Tensor:
        """(B, T): log-probs of the weights that the run started from."""
        return self._scored(batch, reference=True)

    def _compute_advantage(self, batch: Batch) -> Batch:
        """A copy with GRPO's `advantages`, (B, T), of each row's summed `token_level_scores`."""
        values, nobody = batch.values, [None] * len(batch)
        scores = values.get("token_level_scores")
        rewards = batch.metadata["rewards"] if scores is None else scores.sum(-1)
        ids = zip(values.get("group_id", nobody), values.get("run_id", nobody), strict=True)
        rows = [
            Trajectory(reward=reward, group_id=group, run_id=run)
            for reward, (group, run) in zip(rewards.tolist(), ids, strict=True)
        ]
        compute_grpo_advantage_for_trajectories(rows, eps=self._config.algorithm.get("eps", EPS))
        credit = torch.tensor([row.advantage for row in rows]).reshape(-1, 1)
        done = batch.copy()
        done.values["advantages"] = credit * (values["loss_mask"] > 0)
        return done

    def _scored(self, batch: Batch, *, reference: bool) -> Tensor:
        ids, keep = batch.values["input_ids"], batch.values["attention_mask"] > 0
        rows = [row[kept].tolist() for row, kept in zip(ids, keep, strict=True)]
        found = torch.zeros(ids.shape, dtype=torch.float32)
        for row, logprobs in enumerate(self.service.logprobs(rows, reference=reference)):
            found[row, keep[row]] = torch.tensor(logprobs)
        return torch.where(batch.values["loss_mask"] > 0, found, 0.0)


class SelfHostedGrpoTrainer(SelfHostedTrainer):
    """GRPO on tensors.

    Reads `algorithm.eps`, a number in the advantages' divisor, and `algorithm.kl_penalty`, the
    weight of a KL to the starting weights, subtracted from the rewards.
    """

    algorithm_keys: ClassVar[tuple[str, ...]] = ("type", "group_size", "eps", "kl_penalty")

    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        pad = self._pad_token_id
        batch = Batch.remove_redundant_left_padding(batch, pad_token_id=pad)
        batch = Batch.remove_redundant_right_padding(batch, pad_token_id=pad)
        batch.values["token_level_scores"] = self._reward_fn(batch)
        batch.values["old_log_probs"] = self._compute_old_log_probs(batch)
        metrics: dict[str, Any] = {}
        if penalty := self._config.algorithm.get("kl_penalty"):
            before = batch.values["token_level_scores"].sum()
            batch.values["ref_log_probs"] = self._compute_ref_log_probs(batch)
            batch = apply_kl_penalty(batch, float(penalty))
            charged = before - batch.values["token_level_scores"].sum()
            metrics["actor/reward_kl_penalty"] = float(charged) / len(batch)
        batch = self._compute_advantage(batch)
        return batch, log_grpo_metrics(rows_of(batch), metrics)


def rows_of(batch: Batch) -> list[dict[str, Any]]:
    """The trajectories of a batch for the metrics, with the mean advantage of their tokens."""
    values = batch.values
    rows = [dict(trajectory) for trajectory in batch.metadata.get("trajectories", ())]
    if "advantages" in values:
        trained = values["loss_mask"] > 0
        means = (_spread(batch) * trained).sum(-1) / trained.sum(-1).clamp(min=1)
        for row, mean in zip(rows, means.tolist(), strict=True):
            row["advantage"] = mean
    return rows


def samples_of(batch: Batch, old_log_probs: Tensor) -> list[Sample]:
    """The pipe's samples of a prepared batch: its rows without their padding."""
    values = batch.values
    columns = {
        "tokens": values["input_ids"],
        "loss_mask": (values["loss_mask"] > 0).long(),
        "logprobs": old_log_probs,
        "versions": values.get("versions", torch.zeros_like(values["input_ids"])),
    }
    credit = _spread(batch).expand(old_log_probs.shape)
    unknown = [None] * len(batch)
    groups, runs = values.get("group_id") or unknown, values.get("run_id") or unknown
    datums = []
    for row, keep in enumerate(values["attention_mask"] > 0):
        datum: dict[str, Any] = {name: v[row][keep].tolist() for name, v in columns.items()}
        trained = keep & (values["loss_mask"][row] > 0)
        datum["token_advantages"] = credit[row][trained].tolist()
        group = f"row {row}" if groups[row] is None else groups[row]
        datum["metadata"] = {"group_id": group, "run_id": row if runs[row] is None else runs[row]}
        datums.append(datum)
    return samples_of_datums(datums)


def _spread(batch: Batch) -> Tensor:
    """The advantages as (B, T) or (B, 1)."""
    advantages: Tensor = batch.values["advantages"].float()
    return advantages.reshape(-1, 1) if advantages.dim() == 1 else advantages


def _check(batch: Batch) -> None:
    """Raises KeyError for a missing field, ValueError for one of another shape."""
    values = batch.values
    require(batch, REQUIRED)
    shape = tuple(values["input_ids"].shape)
    for name in {*REQUIRED, "old_log_probs", "logprobs", "versions"} & values.keys():
        got = tuple(getattr(values[name], "shape", ()))
        if got == shape or (name == "advantages" and got == shape[:1]):
            continue
        raise ValueError(
            f"_prepare_batch returned {name} with shape {got}, but input_ids has shape {shape}; "
            "remove padding from all fields (fields=None of remove_redundant_*_padding)"
        )
