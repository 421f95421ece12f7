"""The interface of a backend: an Adapter updates the weights and serves samples of them.

A backend's `options.py` holds its config keys and its Capabilities. It imports nothing heavy, so
that `--dry-run` and the checks at the start load no model code.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field

from retrain.config import RunConfig
from retrain.errors import AdapterError
from retrain.sampler import Sampler, Tokenizer
from retrain.types import Batch, Metrics


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a backend supports; a config that needs more is an error at the start."""

    losses: frozenset[str]
    """The names that `algorithm.loss` may have."""
    custom_losses: bool = False
    """It can train a user's own function of log-probs."""
    scores: bool = False
    """`Adapter.logprobs` works, which algorithm.kl_penalty and held-out losses need."""
    checks: Literal["no", "free", "billed"] = "no"
    """Whether `Adapter.own_logprobs` works, which train.check_publish needs, and what it costs."""
    mismatch: bool = False
    """It weighs tokens by `algorithm.mismatch`."""
    max_staleness: int | None = None
    """The highest `staleness.max` that it supports; None: no limit."""
    sampling: frozenset[str] = frozenset(
        {"max_tokens", "temperature", "top_p", "top_k", "stop", "stop_token_ids", "seed"}
    )
    """Fields of SamplingParams that have an effect."""
    scored_as_sampled: frozenset[str] = frozenset()
    """Those that the trainer also applies to its own log-probs, so that the ratio starts at 1."""


@dataclass(frozen=True, slots=True)
class AdapterState:
    """The result of `save`: files in `folder`, and small values that JSON can hold."""

    folder: Path
    data: Mapping[str, Any] = field(default_factory=dict)  # JSON values


@dataclass(frozen=True, slots=True)
class Forecast:
    """The memory that a run needs on this machine, in words for the terminal."""

    text: str
    warning: str = ""
    """Empty if there is enough."""

    def lines(self) -> Iterator[str]:
        """What to print."""
        yield self.text
        if self.warning:
            yield f"warning: {self.warning}"


class Adapter(ABC):
    """Updates the weights and serves samples of them; an async context manager.

    Entering it loads or connects. Leaving it frees every thread, connection and remote session.
    The pipe awaits one of update, publish, save and load at a time, and any number of samples
    meanwhile. Every method raises AdapterError when the backend fails.
    """

    capabilities: Capabilities
    sampler: Sampler
    tokenizer: Tokenizer
    context_length: int
    """The maximum number of tokens of prompt and completion together."""
    model_loss: bool = False
    """The model adds a term of its own to the loss, such as that of a router: a batch without any
    advantage is trained too."""
    exact: bool = False
    """Whether sampler and trainer compute in float32."""

    @abstractmethod
    async def update(self, batch: Batch) -> Metrics:
        """One optimizer step; returns at least `loss`, `grad_norm` and `learning_rate`."""

    @abstractmethod
    async def publish(self) -> int:
        """Make the sampler serve the present weights; returns their version, one more each time.

        If it raises, the run saves a checkpoint and ends: `save` must still work, with the version
        that was served before.
        """

    def pinned(self) -> AbstractContextManager[Sampler] | None:
        """A sampler of the weights that are served now, also after later publishes.

        They are kept until the block ends. None: the backend serves one version at a time, so the
        next publish waits until an evaluation has ended (P15).
        """
        return None

    @abstractmethod
    async def save(self, folder: Path) -> AdapterState:
        """Write weights, optimizer, scheduler and RNG so that `load` continues bit-exactly."""

    @abstractmethod
    async def load(self, state: AdapterState) -> None:
        """Continue from `state`: the sampler serves its weights, under the saved version."""

    async def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """The log-prob of each token given those before it, at temperature 1; 0.0 for the first.

        The weights are those that the sampler serves or, with `reference`, those that the run
        started from, also after a resume.
        """
        raise AdapterError(f"{type(self).__name__} does not compute log-probs of given tokens")

    async def own_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        """`logprobs` under the weights in training, computed by the trainer, not the sampler.

        The pipe awaits it as it awaits `publish`: not beside an update.
        """
        raise AdapterError(f"{type(self).__name__} does not score tokens with its trainer")

    async def forget(self, state: AdapterState) -> None:  # noqa: B027 - a default, not a forgotten body
        """Free what a service keeps of a checkpoint that is about to be deleted."""

    def stop_retrying(self) -> None:  # noqa: B027 - a default, not a forgotten body
        """The run is shutting down: stop retrying requests and waiting for servers."""

    def watch(self, report: Callable[..., None]) -> None:  # noqa: B027 - a default, not a forgotten body
        """Call `report(state, url=..., **fields)` when a server that samples is lost or is back."""

    async def export(self, folder: Path) -> Path | str | None:
        """Write the model for others to load; returns the folder, or a service's own path.

        The pipe calls it after it has written or loaded the last checkpoint.
        """
        return None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        return None


class AdapterOptions(BaseModel):
    """A backend's keys in the YAML. Its module imports nothing heavy.

    `backend.type` names a subclass: `trl`, `tinker`, `weaver`, or a user's `path.py:MyOptions`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)
    extra: ClassVar[str] = ""
    """The optional dependency set that the adapter needs."""
    adapter: ClassVar[str]
    """`module:Class` of the Adapter, imported when the run starts and called with
    (options, config)."""
    follower: ClassVar[str] = ""
    """`module:function`, called with (place, (options, config)) in a launcher's processes other
    than the first; empty: the backend trains in one process."""

    def needs(self) -> Mapping[str, Sequence[str]]:
        """The modules that the adapter imports, by the optional set that installs them.

        A run, a dry run and a check report those that are not installed before anything loads.
        """
        return {}

    def needed_by(self, extra: str) -> str | None:
        """The key and value that need this optional set; None: `backend.type`."""
        return None

    def capabilities(self) -> Capabilities:
        """What this backend supports with these options."""
        raise NotImplementedError(f"{type(self).__name__} does not define capabilities()")

    def problems(self, config: RunConfig) -> list[str]:
        """Messages about what else in `config` this backend does not support."""
        return []

    def forecast(self, config: RunConfig) -> Forecast | None:
        """The memory that the run needs on this machine, if it can be known before it starts."""
        return None

    def local_tokenizer(self, config: RunConfig) -> Tokenizer | None:
        """The model's tokenizer, if it is on this machine; imports no torch."""
        return None

    def layout(self) -> str:
        """For the line at the start: the processes that train and the servers that sample, unless
        that is one process."""
        return ""

    def warnings(self, config: RunConfig) -> list[str]:
        """Messages about what is allowed, but rarely intended."""
        return []


class OptimizerOptions(AdapterOptions):
    """The keys of AdamW, which every backend that has it reads alike."""

    model_config = ConfigDict(allow_inf_nan=False)

    learning_rate: Annotated[float, Field(gt=0)] = 1e-5
    """The learning rate, after the warm-up."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps over which the learning rate rises from 0."""
    beta1: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Adam's decay of the mean of the gradients."""
    beta2: Annotated[float, Field(ge=0, lt=1)] = 0.999
    """Adam's decay of the mean of the squared gradients."""
    eps: Annotated[float, Field(gt=0)] = 1e-8
    """Adam's term that prevents a division by zero."""
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    """The coefficient of decoupled weight decay."""
    max_grad_norm: Annotated[float, Field(ge=0)] = 1.0
    """The largest norm of the gradients; larger ones are scaled down. 0: no limit."""
