"""The face of a backend: an Adapter updates the weights and serves samples of them.

A backend's `options.py` holds what a config may say about it and its Capabilities; it imports
nothing heavy, so that `--dry-run` and the start-up checks load no model code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict

from retrain.config import RunConfig
from retrain.errors import AdapterError
from retrain.sampler import Sampler, Tokenizer
from retrain.types import Batch, Metrics


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend can honour; a config that asks for more is refused at start-up."""

    losses: frozenset[str]
    """Names that `algorithm.loss` may have, wherever the loss is computed."""
    custom_losses: bool = False
    """It can train a user's own function of log-probs."""
    scores: bool = False
    """`Adapter.logprobs` works, which algorithm.kl_penalty and held-out losses need."""
    max_staleness: int | None = None
    """None: no limit."""
    sampling: frozenset[str] = frozenset(
        {"max_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "seed"}
    )
    """Fields of SamplingParams that have an effect."""
    scored_as_sampled: frozenset[str] = frozenset()
    """Those of them that shape the trainer's own log-probs too, so that the ratio starts at 1."""


@dataclass(frozen=True, slots=True)
class AdapterState:
    """What `save` left behind: files in `folder`, and small JSON-able facts beside them."""

    folder: Path
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON values


class Adapter(ABC):
    """Updates the weights and serves samples of them; an async context manager.

    Entering loads or connects, leaving frees every thread, connection and remote session.
    The pipe awaits one of update, publish, save and load at a time, beside any number of samples.
    Every method raises AdapterError when the backend fails.
    """

    capabilities: Capabilities
    sampler: Sampler
    tokenizer: Tokenizer
    context_length: int
    """Tokens that prompt and completion may have together."""

    @abstractmethod
    async def update(self, batch: Batch) -> Metrics:
        """One optimizer step; reports `loss`, `grad_norm` and `learning_rate` at least."""

    @abstractmethod
    async def publish(self) -> int:
        """Make the sampler serve the present weights; their version, one higher each time."""

    @abstractmethod
    async def save(self, folder: Path) -> AdapterState:
        """Write weights, optimizer, scheduler and RNG so that `load` continues bit-exactly."""

    @abstractmethod
    async def load(self, state: AdapterState) -> None:
        """Continue from `state`; the sampler serves it and the version is the saved one."""

    async def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """The log-prob of each token given those before it, at temperature 1; a first one's is 0.0.

        Under the weights that the sampler serves; with `reference` under those that the run
        started from, after a resume too.
        """
        raise AdapterError(f"{type(self).__name__} computes no log-probs of given tokens")

    async def forget(self, state: AdapterState) -> None:  # noqa: B027 - a default, not a forgotten body
        """The checkpoint is about to be deleted: free what a service keeps of it."""

    def hurry(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """The run is to stop soon: what isn't there is not to be waited for."""

    async def export(self, folder: Path) -> Path | str | None:
        """Write the model for others to load; where it is: the folder, or a service's own path.

        Called once the last checkpoint is written, or loaded.
        """
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        return None


class AdapterOptions(BaseModel):
    """A backend's keys in the YAML. Its module imports nothing heavy.

    `backend.type` names such a class: `trl`, `tinker`, `weaver`, or a user's `path.py:MyOptions`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    extra: ClassVar[str] = ""
    """The optional dependency set that the adapter needs."""
    adapter: ClassVar[str]
    """`module:Class` of the Adapter, imported when the run starts and called with
    (options, config)."""

    def capabilities(self) -> Capabilities:
        """What this backend can honour under these options."""
        raise NotImplementedError(f"{type(self).__name__} must say its capabilities()")

    def problems(self, config: RunConfig) -> list[str]:
        """What of `config` this backend refuses beyond its capabilities; empty when all is well."""
        return []
