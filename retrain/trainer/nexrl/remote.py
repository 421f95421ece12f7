"""Trainers whose weights are trained by a Tinker or Weaver service.

trajectories -> _prepare_trajectories (the algorithm) -> datums -> holder.train -> metrics
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from retrain.errors import ConfigError
from retrain.trainer.nexrl.advantages import compute_grpo_advantage_for_trajectories
from retrain.trainer.nexrl.base import BaseTrainer
from retrain.trainer.nexrl.datums import convert_trajectories_to_datums
from retrain.trainer.nexrl.holders import HOLDERS, Holder, ServiceHolder
from retrain.trainer.nexrl.metrics import log_grpo_metrics, log_rollout_metrics
from retrain.trainer.nexrl.service import TrainingService
from retrain.trainer.nexrl.settings import as_section
from retrain.trainer.nexrl.trajectory import Trajectory

log = logging.getLogger(__name__)


class RemoteApiTrainer(BaseTrainer):
    """Sends prepared trajectories to a service. Subclasses override `_prepare_trajectories`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        settings = self._settings
        if settings.service.backend not in HOLDERS:
            raise ConfigError(
                f"trainer.train_service.backend: got {settings.service.backend!r}, expected tinker "
                f"or weaver: {type(self).__name__} trains on a service (url: local runs one in "
                "this process)"
            )
        options = settings.run.backend.arguments
        self.train_config: dict[str, Any] = {
            "loss_fn": settings.run.algorithm.loss,
            **{name: options[name] for name in ("learning_rate", "beta1", "beta2", "eps")},
        }
        """The config of each step: the loss and the optimizer's numbers."""
        self._service_holder: Holder | None = None

    @abstractmethod
    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        """Set `advantage` (or `token_advantages`) on the trajectories, and add to `metrics`."""

    def set_service_holder(self, service_holder: Holder) -> None:
        """Train with a TinkerServiceHolder, a WeaverServiceHolder, or an object with their `train`.

        Raises ConfigError when the holder and the config name different backends.
        """
        if isinstance(service_holder, ServiceHolder):
            service_holder.adopt(self._settings)
            self._service = service_holder.service
        self._service_holder = service_holder

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """Take one optimizer step over all trajectories and serve the new weights."""
        metrics: dict[str, Any] = {}
        trajectories = self._prepare_trajectories(trajectories, metrics)
        log_rollout_metrics(trajectories, metrics, prefix="rollout/")
        datums = convert_trajectories_to_datums(trajectories)
        response = self.service_holder.train(datums, config=self.train_config)
        metrics.update(response.get("metrics", {}))
        return metrics

    @property
    def service_holder(self) -> Holder:
        """The holder that was set, else one made from the config's backend and url."""
        if self._service_holder is None:
            service = self._settings.service
            self.set_service_holder(HOLDERS[service.backend](service.url))
            assert self._service_holder is not None
        return self._service_holder

    @property
    def service(self) -> TrainingService:
        """The holder's service. Raises ConfigError for a custom holder, which has none."""
        holder = self.service_holder
        if not isinstance(holder, ServiceHolder):
            raise ConfigError(
                f"{type(holder).__name__} has only `train`: checkpoints, rollouts and the "
                "tokenizer need a TinkerServiceHolder or a WeaverServiceHolder"
            )
        return holder.service

    def initialize_workers(self) -> None:
        """Connect to the service, unless the holder is a custom one."""
        if isinstance(self.service_holder, ServiceHolder):
            self.service.open()


class RemoteApiGrpoTrainer(RemoteApiTrainer):
    """GRPO on a service.

    Reads `algorithm.eps` and `algorithm.rule`: see `compute_grpo_advantage_for_trajectories`.
    """

    algorithm_keys: ClassVar[tuple[str, ...]] = (
        "type", "name", "group_size", "loss", "loss_config", "eps", "rule",
    )  # fmt: skip

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        algorithm = self._config.algorithm
        trajectories = compute_grpo_advantage_for_trajectories(
            trajectories,
            logger=log,
            use_run_ids=True,
            eps=algorithm.get("eps"),
            rule=algorithm.get("rule", "page"),
        )
        log_grpo_metrics(trajectories, metrics)
        return trajectories


class RemoteApiCrossEntropyTrainer(RemoteApiTrainer):
    """Supervised learning on a service: tokens with `loss_mask` 1 are trained, with weight 1."""

    algorithm_keys: ClassVar[tuple[str, ...]] = ("type", "name", "loss", "loss_config")

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = as_section(config)
        section.algorithm.setdefault("type", "cross_entropy")
        super().__init__(section)
        if (loss := self.train_config["loss_fn"]) != "cross_entropy":
            raise ConfigError(
                f"trainer.train_service.config.loss_fn: got {loss!r}, expected "
                f"cross_entropy: {type(self).__name__} has no other loss"
            )

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        return trajectories
