"""Trainers whose weights are trained by a Tinker or Weaver service.

trajectories -> _prepare_trajectories (the algorithm) -> datums -> holder.train -> metrics
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from retrain.errors import ConfigError
from retrain.trainer.nexrl.advantages import EPS, compute_grpo_advantage_for_trajectories
from retrain.trainer.nexrl.base import BaseTrainer
from retrain.trainer.nexrl.datums import convert_trajectories_to_datums
from retrain.trainer.nexrl.holders import HOLDERS, Holder, ServiceHolder
from retrain.trainer.nexrl.metrics import log_grpo_metrics, log_rollout_metrics
from retrain.trainer.nexrl.settings import RecipeSettings, as_section
from retrain.trainer.nexrl.trajectory import Trajectory

log = logging.getLogger(__name__)


class RemoteApiTrainer(BaseTrainer):
    """Sends prepared trajectories to a service. Subclasses override `_prepare_trajectories`."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__(config)
        run = self.settings.run
        names = ("learning_rate", "beta1", "beta2", "eps")
        numbers = {name: run.backend.arguments[name] for name in names}
        self.train_config: dict[str, Any] = {"loss_fn": run.algorithm.loss, **numbers}
        """The config of each step: the loss and the optimizer's numbers."""

    @abstractmethod
    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        """Set `advantage` (or `token_advantages`) on the trajectories, and add to `metrics`."""

    def _make_service(self, settings: RecipeSettings) -> ServiceHolder:
        """The holder of the config's backend and url; `set_service_holder` replaces it."""
        backend, url = settings.service.backend, settings.service.url
        if backend not in HOLDERS:
            raise ConfigError(
                f"trainer.train_service.backend: got {backend!r}, expected tinker or weaver: "
                f"{type(self).__name__} trains on a service (url: local runs one in this process)"
            )
        holder = HOLDERS[backend](url)
        holder.adopt(settings)
        self._service_holder: Holder = holder
        return holder

    def set_service_holder(self, service_holder: Holder) -> None:
        """Train with a TinkerServiceHolder, a WeaverServiceHolder, or an object with their `train`.

        Checkpoints, rollouts and the tokenizer need one of the first two. Raises ConfigError when
        the holder and the config name different backends.
        """
        if isinstance(service_holder, ServiceHolder):
            service_holder.adopt(self.settings)
        self._service_holder = service_holder
        self.service = cast("ServiceHolder", service_holder)

    def train(self, trajectories: list[Trajectory]) -> dict[str, Any]:
        """Take one optimizer step over all trajectories and serve the new weights."""
        metrics: dict[str, Any] = {}
        trajectories = self._prepare_trajectories(trajectories, metrics)
        log_rollout_metrics(trajectories, metrics, prefix="rollout/")
        datums = convert_trajectories_to_datums(trajectories)
        response = self._service_holder.train(datums, config=self.train_config)
        metrics.update(response.get("metrics", {}))
        return metrics

    def initialize_workers(self) -> None:
        """Connect to the service, unless the holder is a custom one."""
        if isinstance(self._service_holder, ServiceHolder):
            self._service_holder.open()


class RemoteApiGrpoTrainer(RemoteApiTrainer):
    """GRPO on a service, with `algorithm.eps` in the advantages' divisor."""

    algorithm_keys: ClassVar[tuple[str, ...]] = ("type", "group_size", "eps")

    def _prepare_trajectories(
        self, trajectories: list[Trajectory], metrics: dict[str, Any]
    ) -> list[Trajectory]:
        trajectories = compute_grpo_advantage_for_trajectories(
            trajectories, logger=log, use_run_ids=True, eps=self._config.algorithm.get("eps", EPS)
        )
        log_grpo_metrics(trajectories, metrics)
        return trajectories


class RemoteApiCrossEntropyTrainer(RemoteApiTrainer):
    """Supervised learning on a service: tokens with `loss_mask` 1 are trained, with weight 1."""

    algorithm_keys: ClassVar[tuple[str, ...]] = ("type",)

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
