"""The `backend:` keys of `type: weaver`, and its capabilities. Imports no httpx."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field

from retrain.adapters.remote.options import RemoteOptions
from retrain.config import RunConfig
from retrain.losses import native_to
from retrain.wire.vendors import WEAVER


class WeaverOptions(RemoteOptions):
    """`backend: {type: weaver, ...}`: a Weaver service trains and samples.

    The key comes from WEAVER_API_KEY.
    """

    adapter: ClassVar[str] = "retrain.adapters.weaver.adapter:WeaverAdapter"
    vendor = WEAVER

    base_model: str | None = None
    """The service's name for the model, if it isn't `model`; `NAME:262144` requests a context of
    that length."""
    training_mode: Literal["lora", "full_ft"] = "lora"
    """Train low-rank adapters (`lora`), or the full weights (`full_ft`)."""
    native_losses: frozenset[str] = native_to("weaver")
    """Losses that the service computes. The others are computed on this machine, cost another
    forward pass, and don't depend on how the service averages its own losses."""
    request_tokens: Annotated[int, Field(ge=1)] = 100_000
    """The maximum number of tokens per request. A larger batch is sent in several requests, whose
    gradients add up."""
    sampler_ttl: Annotated[int, Field(ge=60)] = 86_400
    """How many seconds the service keeps the weights of a sampler if the run is killed."""
    resend: bool = False
    """The service recognises a repeated seq_id (`retrain serve` does), so a training call whose
    reply was lost is sent again. Otherwise a lost reply ends the run."""

    def problems(self, config: RunConfig) -> list[str]:
        """Keys without an effect, and settings that can't work."""
        found = super().problems(config)
        if self.training_mode == "full_ft" and "lora" in self.model_fields_set:
            found.append("backend.lora has no effect with training_mode full_ft: remove one")
        return found
