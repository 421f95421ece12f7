"""Service holders: a Tinker or Weaver service with a blocking `train(datums, config)`.

A holder is one of our adapters with NexRL's face. It connects when it is first used; `url="local"`
starts a service inside this process. What the trainer's config says of the model and the optimizer
reaches it through `set_service_holder`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar, Protocol

from retrain.batching import batch_of
from retrain.errors import ConfigError
from retrain.trainer.nexrl.datums import samples_of_datums
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
"""Keys of `config` that go with each optimizer step, and the adapters' names for them."""
READ = (*OPTIONS, "loss_fn", "loss_config", "normalisation")


class Holder(Protocol):
    """What a remote trainer asks of its holder; one of your own will do."""

    def train(
        self, datums: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
    ) -> Mapping[str, Any]: ...


class ServiceHolder:
    """A service that trains `model`; use TinkerServiceHolder or WeaverServiceHolder."""

    backend: ClassVar[Backend]

    def __init__(
        self,
        url: str = "local",
        model: str | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Nothing is opened yet. `config` are the keys of `train_service.config`.

        Raises ConfigError when one of them can't be honoured.
        """
        self.url = url
        self._own = model is not None or config is not None
        named = {} if model is None else {"model": model}
        service = {"backend": self.backend, "url": url, "config": dict(config or {})}
        self._settings = read_settings({**named, "train_service": service})
        self._service: TrainingService | None = None

    @property
    def service(self) -> TrainingService:
        """The adapter behind it."""
        if self._service is None:
            self._service = TrainingService(self._settings.run)
        return self._service

    def adopt(self, settings: Settings, service: TrainingService | None = None) -> None:
        """Take a trainer's settings, all but the url, unless it was given its own or is in use.

        Raises ConfigError when they are another backend's.
        """
        if settings.service.backend != self.backend:
            raise ConfigError(
                f"trainer.train_service.backend is {settings.service.backend!r}, but the holder is "
                f"a {type(self).__name__}: make them agree"
            )
        if self._service is not None or self._own:
            return
        self._settings = settings.with_url(self.url)
        self._service = service

    def train(
        self, datums: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """forward_backward and optim_step over all datums, then the new weights are served.

        `config` holds loss_fn, learning_rate and the other keys of `train_service.config` that go
        with a step; what it leaves out is as before. Returns `{"metrics": {...}}`. When every
        advantage is 0 nothing is trained and `training/skipped` is 1.

        Raises ConfigError on an unknown key, ValueError on a datum that can't be trained.
        """
        if unknown := sorted(config.keys() - {*READ}):
            raise ConfigError(
                f"the training config has {', '.join(unknown)}: it may hold {', '.join(READ)}"
            )
        settings = self._settings
        loss = config.get("loss_fn", settings.loss)
        weighted = loss == "cross_entropy"
        samples = samples_of_datums(datums, weighted=weighted, encode=self.service.encode)
        told = {"training/num_datums": float(len(samples))}
        if not any(any(sample.advantages) for sample in samples):
            return {"metrics": {**told, "training/skipped": 1.0}}
        self.service.adjust({OPTIONS[k]: v for k, v in config.items() if k in OPTIONS})
        batch = batch_of(
            self._with_logprobs(samples, needed=not weighted),
            loss=loss,
            loss_config=config.get("loss_config", settings.run.algorithm.loss_config),
            normalisation=config.get("normalisation", settings.normalisation),
        )
        metrics = self.service.update(batch)
        self.service.publish()
        return {"metrics": {**told, **metrics}}

    def close(self) -> None:
        """End the session with the service."""
        if self._service is not None:
            self._service.close()

    def _with_logprobs(self, samples: list[Sample], *, needed: bool) -> list[Sample]:
        """With the served weights' log-probs where nobody sampled: they count as on-policy."""
        blank = [any(map(math.isnan, sample.logprobs)) for sample in samples]
        if not any(blank):
            return samples
        if not needed:
            return [replace(sample, logprobs=[0.0] * len(sample.token_ids)) for sample in samples]
        bare = [sample for sample, one in zip(samples, blank, strict=True) if one]
        found = iter(self.service.logprobs([sample.token_ids for sample in bare]))
        return [
            replace(
                sample,
                logprobs=[
                    lp if on else 0.0 for lp, on in zip(next(found), sample.loss_mask, strict=True)
                ],
            )
            if one
            else sample
            for sample, one in zip(samples, blank, strict=True)
        ]


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
