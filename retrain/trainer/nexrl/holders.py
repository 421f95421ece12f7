"""Service holders: a Tinker or Weaver service with a blocking `train(datums, config)`.

A holder connects when it is first used; `url="local"` starts a service in this process. It gets the
model and the optimizer's settings from the trainer, through `set_service_holder`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from retrain.errors import ConfigError
from retrain.trainer.nexrl.datums import masked, samples_of_datums
from retrain.trainer.nexrl.service import TrainingService
from retrain.trainer.nexrl.settings import Backend, Settings, read_settings
from retrain.types import Sample

OPTIONS = {
    "learning_rate": "learning_rate",
    "beta1": "beta1",
    "beta2": "beta2",
    "eps": "eps",
    "weight_decay": "weight_decay",
    "grad_clip_norm": "max_grad_norm",
}
"""Keys of `config` that are sent with each optimizer step, and their names in the adapters."""
KEYS = (*OPTIONS, "loss_fn", "loss_config", "normalisation")


class Holder(Protocol):
    """What a remote trainer calls on its holder. Any object with this method will do."""

    def train(
        self, datums: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
    ) -> Mapping[str, Any]: ...


class ServiceHolder:
    """A service that trains a model. Use TinkerServiceHolder or WeaverServiceHolder."""

    backend: ClassVar[Backend]

    def __init__(self, url: str = "local") -> None:
        """Opens nothing. Raises ConfigError."""
        self.url = url
        self._settings = read_settings({"train_service": {"backend": self.backend, "url": url}})
        self._service: TrainingService | None = None

    @property
    def service(self) -> TrainingService:
        """The connection to the service: checkpoints, rollouts and the tokenizer."""
        if self._service is None:
            self._service = TrainingService(self._settings.run)
        return self._service

    def adopt(self, settings: Settings) -> None:
        """Use a trainer's settings, except for the URL.

        Does nothing if the holder is in use. Raises ConfigError for settings of another backend.
        """
        if settings.service.backend != self.backend:
            raise ConfigError(
                f"trainer.train_service.backend is {settings.service.backend!r}, but the holder is "
                f"a {type(self).__name__}: make them agree"
            )
        if self._service is None:
            self._settings = settings.with_url(self.url)

    def train(
        self, datums: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Take one optimizer step over all datums and serve the new weights.

        `config` has the keys of `train_service.config` that belong to a step (loss_fn,
        learning_rate, ...). Keys that it lacks keep their values. Returns `{"metrics": {...}}`.
        When every advantage is 0, trains nothing and returns `training/skipped`: 1.

        Raises ConfigError for an unknown key, ValueError for a datum that can't be trained.
        """
        if unknown := sorted(config.keys() - {*KEYS}):
            raise ConfigError(
                f"the training config has unknown keys: {', '.join(unknown)}; expected "
                f"{', '.join(KEYS)}"
            )
        settings = self._settings
        loss = config.get("loss_fn", settings.run.algorithm.loss)
        supervised = loss == "cross_entropy"
        samples = samples_of_datums(datums, weighted=supervised, encode=self.service.encode)
        self.service.adjust({OPTIONS[k]: v for k, v in config.items() if k in OPTIONS})
        metrics = self.service.train(
            self._with_logprobs(samples, needed=not supervised),
            loss=loss,
            loss_config=config.get("loss_config", settings.run.algorithm.loss_config),
            normalisation=config.get("normalisation", settings.run.algorithm.normalisation),
        )
        return {"metrics": {"training/num_datums": float(len(samples)), **metrics}}

    def close(self) -> None:
        """End the session with the service."""
        if self._service is not None:
            self._service.close()

    def _with_logprobs(self, samples: list[Sample], *, needed: bool) -> list[Sample]:
        """Fill in missing log-probs with those of the served weights: such data is on-policy."""
        bare = [i for i, sample in enumerate(samples) if any(map(math.isnan, sample.logprobs))]
        sequences = [samples[i].token_ids for i in bare]
        if bare and needed:
            found = self.service.logprobs(sequences)
        else:
            found = [[0.0] * len(ids) for ids in sequences]
        for i, logprobs in zip(bare, found, strict=True):
            known = masked(logprobs, samples[i].loss_mask)
            samples[i] = replace(samples[i], logprobs=known)
        return samples


class TinkerServiceHolder(ServiceHolder):
    """A service that speaks Tinker's protocol."""

    backend: ClassVar[Backend] = "tinker"


class WeaverServiceHolder(ServiceHolder):
    """A service that speaks Weaver's protocol."""

    backend: ClassVar[Backend] = "weaver"


HOLDERS: dict[str, type[ServiceHolder]] = {
    "tinker": TinkerServiceHolder,
    "weaver": WeaverServiceHolder,
}
