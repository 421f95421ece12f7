"""Trainers that work on a tensor Batch, and whose weights are trained in this process.

    trajectories -> Batch (padded, (B, T)) -> _prepare_batch (the algorithm) -> samples -> adapter

A batch that leaves `_prepare_batch` must hold `input_ids`, `attention_mask`, `position_ids`,
`loss_mask` and `advantages`; `old_log_probs` are the sampler's (`logprobs`) unless it sets its own,
and a forward pass gives them where nobody sampled.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from retrain.batching import batch_of
from retrain.trainer.nexrl.base import BaseTrainer
from retrain.trainer.nexrl.batch import REQUIRED, Batch
from retrain.trainer.nexrl.metrics import log_grpo_metrics, log_rollout_metrics
from retrain.trainer.nexrl.patterns import apply_kl_penalty, grpo_advantages, token_level_rewards
from retrain.trainer.nexrl.trajectory import Trajectory
from retrain.types import Sample

log = logging.getLogger(__name__)


class SelfHostedTrainer(BaseTrainer):
    """Override `_prepare_batch`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        self._logged: dict[str, Any] = {}
        service = self._settings.service
        if service.backend == "self-hosted" and service.url != "local":
            log.warning("train_service.url %s is not used: training runs here", service.url)

    @abstractmethod
    def _prepare_batch(self, batch: Batch) -> tuple[Batch, dict[str, Any]]:
        """The algorithm: a batch with `advantages`, (B,) or (B, T), and metrics."""

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """One optimizer step over all of them; the new weights are served afterwards.

        Raises KeyError or ValueError when the prepared batch can't be trained.
        """
        rows = self._tokenised(trajectories)
        batch = Batch.from_trajectories(rows, pad_token_id=self._pad_token_id)
        self._logged = {}
        self._log_rollout_metrics(batch)
        prepared, metrics = self._prepare_batch(batch)
        _check(prepared)
        samples = samples_of(prepared, self._compute_old_log_probs(prepared))
        told = {**self._logged, **metrics, "training/batch_size": float(len(prepared))}
        if not any(any(sample.advantages) for sample in samples):
            return {**told, "training/skipped": 1.0}
        settings = self._settings
        step = batch_of(
            samples,
            loss=settings.loss,
            loss_config=settings.run.algorithm.loss_config,
            normalisation=settings.normalisation,
        )
        told |= self.service.update(step)
        self.service.publish()
        return told

    # --- for subclasses

    def _log_rollout_metrics(
        self,
        trajectories: Batch | Sequence[Mapping[str, Any]],
        metrics: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        """Of a batch too; they join the step's metrics."""
        rows = rows_of(trajectories) if isinstance(trajectories, Batch) else trajectories
        found = log_rollout_metrics(rows, {})
        self._logged |= found
        if metrics is not None:
            metrics |= found
        return found

    def _reward_fn(self, batch: Batch) -> Tensor:
        """(B, T): each row's reward on its last trained token."""
        return token_level_rewards(batch.metadata["rewards"], batch.values["loss_mask"])

    def _compute_old_log_probs(self, batch: Batch) -> Tensor:
        """(B, T): `old_log_probs`, or else the sampler's, or else those of the present weights."""
        for name in ("old_log_probs", "logprobs"):
            if name in batch.values:
                found: Tensor = batch.values[name]
                return found
        return self._scored(batch, reference=False)

    def _compute_ref_log_probs(self, batch: Batch) -> Tensor:
        """(B, T): under the weights that the run started from."""
        return self._scored(batch, reference=True)

    def _compute_advantage(self, batch: Batch) -> Batch:
        """A batch with GRPO's `advantages`, (B, T), of the rows' summed `token_level_scores`."""
        values = batch.values
        scores = values.get("token_level_scores")
        rewards = batch.metadata["rewards"] if scores is None else scores.sum(-1)
        algorithm = self._config.algorithm
        done = batch.copy()
        done.values["advantages"] = grpo_advantages(
            rewards,
            values["loss_mask"],
            values.get("group_id"),
            values.get("run_id"),
            rule=algorithm.get("rule", "page"),
            eps=algorithm.get("eps"),
        )
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

    Of `algorithm` it reads `eps` and `rule` (see `compute_grpo_advantage_for_trajectories`) and
    `kl_penalty`, the weight of a KL to the starting weights that is charged to the rewards.
    """

    algorithm_keys: ClassVar[tuple[str, ...]] = (
        "type", "name", "group_size", "loss", "loss_config", "eps", "rule", "kl_penalty",
    )  # fmt: skip

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
    """What of a batch's rows the metrics read; an advantage is the mean over the trained tokens."""
    trajectories = batch.metadata.get("trajectories") or [{}] * len(batch)
    rows: list[dict[str, Any]] = [dict(trajectory) for trajectory in trajectories]
    masks: Tensor | None = batch.values.get("loss_mask")
    for name in ("reward", "group_id", "run_id"):
        for row, value in zip(rows, batch.values.get(name, ()), strict=False):
            row[name] = float(value) if name == "reward" else value
    if masks is not None:
        for row, mask, attended in zip(
            rows, masks, batch.values.get("attention_mask", masks), strict=True
        ):
            row["loss_mask"] = mask[attended > 0].tolist()
        if "advantages" in batch.values:
            credit = _spread(batch) * (masks > 0)
            means = credit.sum(-1) / (masks > 0).sum(-1).clamp(min=1)
            for row, mean in zip(rows, means.tolist(), strict=True):
                row["advantage"] = mean
    return rows


def samples_of(batch: Batch, old_log_probs: Tensor) -> list[Sample]:
    """The pipe's samples of a prepared batch: its rows without their padding.

    A row without any trained token, and a first token that is masked in, are refused by the
    adapter or left out as everywhere.
    """
    values = batch.values
    trained = (values["loss_mask"] > 0) & (values["attention_mask"] > 0)
    credit, logprobs = _spread(batch) * trained, old_log_probs * trained
    versions = values.get("versions")
    versions = torch.zeros_like(trained, dtype=torch.long) if versions is None else versions
    versions = torch.where(trained, versions, -1)
    groups = values.get("group_id") or [None] * len(batch)
    samples = []
    for row, keep in enumerate(values["attention_mask"] > 0):
        group = "" if groups[row] is None else str(groups[row])
        samples.append(
            Sample(
                values["input_ids"][row][keep].tolist(),
                trained[row][keep].long().tolist(),
                logprobs[row][keep].tolist(),
                credit[row][keep].tolist(),
                versions[row][keep].tolist(),
                group_id=group or f"row {row}",
                run_id=f"{group}#{row}",
            )
        )
    return samples


def _spread(batch: Batch) -> Tensor:
    """The advantages as (B, T)."""
    advantages: Tensor = batch.values["advantages"].float()
    return advantages.reshape(-1, 1) if advantages.dim() == 1 else advantages


def _check(batch: Batch) -> None:
    """Raises KeyError on a missing field, ValueError on one whose shape doesn't fit."""
    missing = [name for name in REQUIRED if name not in batch.values]
    if missing:
        raise KeyError(
            f"_prepare_batch returned a batch without {', '.join(missing)}: it must keep "
            f"{', '.join(REQUIRED)} (this one has {', '.join(batch.values)})"
        )
    shape = tuple(batch.values["input_ids"].shape)
    for name in (*REQUIRED, "old_log_probs", "logprobs", "versions"):
        value = batch.values.get(name)
        allowed = {shape, shape[:1]} if name == "advantages" else {shape}
        if value is None or (isinstance(value, Tensor) and tuple(value.shape) in allowed):
            continue
        got = tuple(value.shape) if isinstance(value, Tensor) else f"a {type(value).__name__}"
        raise ValueError(
            f"_prepare_batch returned {name} as {got}, but input_ids is {shape}: they must agree; "
            "give the field to remove_redundant_*_padding too (fields=None takes all of them)"
        )
    if not bool(batch.values["advantages"].isfinite().all()):
        raise ValueError("_prepare_batch returned an advantage that is NaN or infinite")
