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
from retrain.trainer.nexrl.settings import Backend, RecipeSettings, read_settings
from retrain.types import Sample

OPTIONS = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "max_grad_norm")
LOSS = {"loss_fn": "loss", "loss_config": "loss_config", "normalisation": "normalisation"}
"""The keys of a step's `config`: options of the optimizer, and the loss."""


class Holder(Protocol):
    """What a remote trainer calls on its holder. Any object with this method will do."""

    def train(
        self, datums: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
    ) -> Mapping[str, Any]: ...


class ServiceHolder(TrainingService):
    """A service that trains a model. Use TinkerServiceHolder or WeaverServiceHolder."""

    backend: ClassVar[Backend]

    def __init__(self, url: str = "local") -> None:
        """Opens nothing. Raises ConfigError."""
        self.url = url
        settings = read_settings({"train_service": {"backend": self.backend, "url": url}})
        super().__init__(settings.run)

    def adopt(self, settings: RecipeSettings) -> None:
        """Use a trainer's settings, except for the URL.

        Does nothing if the holder is in use. Raises ConfigError for settings of another backend.
        """
        if settings.service.backend != self.backend:
            raise ConfigError(
                f"trainer.train_service.backend is {settings.service.backend!r}, but the holder "
                f"is a {type(self).__name__}: make them agree"
            )
        if not self.used:
            backend = settings.run.backend.model_copy(update={"url": self.url})
            self.use(settings.run.model_copy(update={"backend": backend}))

    def train(
        self, datums: Sequence[Mapping[str, Any]], config: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Take one optimizer step over all datums and serve the new weights.

        `config` has the keys of `train_service.config` that belong to a step (loss_fn,
        learning_rate, ...). Keys that it lacks keep their values. Returns `{"metrics": {...}}`.
        When every advantage is 0, trains nothing and returns `training/skipped`: 1.

        Raises ConfigError for an unknown key, ValueError for a datum that can't be trained.
        """
        if unknown := sorted(config.keys() - {*OPTIONS, *LOSS}):
            raise ConfigError(
                f"the training config has unknown keys: {', '.join(unknown)}; expected "
                f"{', '.join((*OPTIONS, *LOSS))}"
            )
        supervised = config.get("loss_fn", self.run.algorithm.loss) == "cross_entropy"
        encoded = [{**datum, **self.encode(datum)} for datum in datums]
        samples = samples_of_datums(encoded, weighted=supervised)
        self.adjust({key: value for key, value in config.items() if key in OPTIONS})
        changes = {LOSS[key]: value for key, value in config.items() if key in LOSS}
        metrics = self.update(self._with_logprobs(samples, needed=not supervised), **changes)
        return {"metrics": {"training/num_datums": float(len(samples)), **metrics}}

    def _with_logprobs(self, samples: list[Sample], *, needed: bool) -> list[Sample]:
        """Fill in missing log-probs with those of the served weights: such data is on-policy."""
        bare = [i for i, sample in enumerate(samples) if any(map(math.isnan, sample.logprobs))]
        sequences = [samples[i].token_ids for i in bare]
        if bare and needed:
            found = self.logprobs(sequences)
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


HOLDERS = {holder.backend: holder for holder in (TinkerServiceHolder, WeaverServiceHolder)}
