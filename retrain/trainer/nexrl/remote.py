"""Trainers that hand trajectories to a Tinker or Weaver service, which trains the weights.

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
    """Override `_prepare_trajectories`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        settings = self._settings
        if settings.service.backend not in HOLDERS:
            raise ConfigError(
                f"trainer.train_service.backend: got {settings.service.backend!r}, but "
                f"{type(self).__name__} trains by a service: expected tinker or weaver (with url: "
                "local there is one in this process)"
            )
        options = settings.run.backend.arguments
        self._loss_fn = settings.loss
        self._learning_rate: float = options["learning_rate"]
        self._beta1: float = options["beta1"]
        self._beta2: float = options["beta2"]
        self._eps: float = options["eps"]
        self._service_holder: Holder | None = None

    @abstractmethod
    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        """The algorithm: trajectories with `advantage` (or `token_advantages`), and metrics."""

    def set_service_holder(self, service_holder: Holder) -> None:
        """Who trains: a TinkerServiceHolder, a WeaverServiceHolder, or anything with their `train`.

        Raises ConfigError when the config names the other backend.
        """
        if isinstance(service_holder, ServiceHolder):
            service_holder.adopt(self._settings)
            self._service = service_holder.service
        self._service_holder = service_holder

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """One optimizer step over all of them; the new weights are served afterwards."""
        metrics: dict[str, Any] = {}
        trajectories = self._prepare_trajectories(trajectories, metrics)
        log_rollout_metrics(trajectories, metrics, prefix="rollout/")
        datums = convert_trajectories_to_datums(trajectories)
        response = self.service_holder.train(datums, config=self.train_config)
        metrics.update(response.get("metrics", {}))
        return metrics

    @property
    def service_holder(self) -> Holder:
        """The holder that was set, else one of the config's backend and url."""
        if self._service_holder is None:
            service = self._settings.service
            holder = HOLDERS[service.backend](service.url)
            holder.adopt(self._settings, TrainingService(self._settings.run))
            self.set_service_holder(holder)
            assert self._service_holder is not None
        return self._service_holder

    @property
    def service(self) -> TrainingService:
        """The holder's; raises ConfigError where a holder of your own has none."""
        holder = self.service_holder
        if not isinstance(holder, ServiceHolder):
            raise ConfigError(
                f"{type(holder).__name__} has a `train` alone: checkpoints, samples and the "
                "tokenizer need a TinkerServiceHolder or a WeaverServiceHolder"
            )
        return holder.service

    @property
    def train_config(self) -> dict[str, Any]:
        """What goes with each step: the loss and the optimizer's numbers."""
        return {
            "loss_fn": self._loss_fn,
            "learning_rate": self._learning_rate,
            "beta1": self._beta1,
            "beta2": self._beta2,
            "eps": self._eps,
        }

    def initialize_workers(self) -> None:
        """Connect now, where the holder is one of ours."""
        if isinstance(self.service_holder, ServiceHolder):
            self.service.open()


class RemoteApiGrpoTrainer(RemoteApiTrainer):
    """GRPO. Of `algorithm` it reads `eps` and `rule`, which
    `compute_grpo_advantage_for_trajectories` explains.
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
    """Supervised learning: `loss_mask` tells which tokens are trained, each with weight 1."""

    algorithm_keys: ClassVar[tuple[str, ...]] = ("type", "name", "loss", "loss_config")

    def __init__(self, config: Mapping[str, Any]) -> None:
        section = as_section(config)
        section.algorithm.setdefault("type", "cross_entropy")
        super().__init__(section)
        if self._loss_fn != "cross_entropy":
            raise ConfigError(
                f"trainer.train_service.config.loss_fn: got {self._loss_fn!r}, but "
                "RemoteApiCrossEntropyTrainer trains cross_entropy alone"
            )

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        return trajectories
