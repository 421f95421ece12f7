"""The values of the Tinker protocol, independent of their form on the wire.

Tensors are flat lists with a shape; only int64 and float32 exist. Prompts are tokens of text:
images and audio are not supported.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

Dtype = Literal["int64", "float32"]
StopReason = Literal["stop", "length"]
LossConfig = Mapping[str, float | str]


@dataclass(frozen=True, slots=True)
class Tensor:
    """Numbers in row-major order; `shape` None means one dimension."""

    data: Sequence[float]
    dtype: Dtype = "float32"
    shape: tuple[int, ...] | None = None
    sparse: tuple[Sequence[int], Sequence[int]] | None = None
    """Compressed rows: where each row starts in `data`, and the column of each number of `data`.
    All other entries of the (rows, columns) are implied, 0 in a training request."""

    @property
    def dimensions(self) -> tuple[int, ...]:
        return (len(self.data),) if self.shape is None else self.shape


@dataclass(frozen=True, slots=True)
class Datum:
    """One training sequence: its tokens, and the loss's inputs of the same length.

    cross_entropy wants `target_tokens` and `weights`; importance_sampling, ppo, cispo and dro want
    `target_tokens`, `logprobs` (the sampler's) and `advantages`. Targets are
    `Tensor(ids, "int64")`, the others `Tensor(numbers)`. Raises TypeError on a plain list.
    """

    tokens: Sequence[int]
    inputs: Mapping[str, Tensor]

    def __post_init__(self) -> None:
        for name, given in self.inputs.items():
            if not isinstance(given, Tensor):
                raise TypeError(
                    f"inputs[{name!r}]: got a {type(given).__name__}, expected a Tensor: "
                    'Tensor(ids, "int64") for token ids, Tensor(numbers) for the others'
                )

    @property
    def size(self) -> int:
        """Bytes on the wire, as the service counts them for its limits."""
        widths = {"int64": 8, "float32": 4}
        return 4 * len(self.tokens) + sum(
            widths[tensor.dtype] * len(tensor.data) for tensor in self.inputs.values()
        )


@dataclass(frozen=True, slots=True)
class ForwardBackward:
    """The request of a forward_backward, or of a forward only."""

    model_id: str
    seq_id: int
    data: Sequence[Datum]
    loss: str
    config: LossConfig = field(default_factory=dict)
    forward_only: bool = False


@dataclass(frozen=True, slots=True)
class ForwardBackwardOutput:
    """The service's result: one mapping of tensors per datum, in order."""

    outputs: Sequence[Mapping[str, Tensor]]
    metrics: Mapping[str, float] = field(default_factory=dict)
    """Named `name:reduction`; some servers send other names or no metrics."""
    kind: str = ""

    @property
    def logprobs(self) -> list[list[float]]:
        """The learner's log-prob of each target.

        Raises KeyError when the service left them out.
        """
        return [list(output["logprobs"].data) for output in self.outputs]


@dataclass(frozen=True, slots=True)
class TopTokens:
    """The likeliest tokens of each position, (length, width); an empty place is (0, `EMPTY`)."""

    ids: Sequence[Sequence[int]]
    logprobs: Sequence[Sequence[float]]
    width: int


EMPTY = -99999.0
"""The log-prob where there is no token."""


@dataclass(frozen=True, slots=True)
class SampledSequence:
    """One completion; if it ended with a stop token, that is its last token."""

    tokens: Sequence[int]
    logprobs: Sequence[float] | None
    stop_reason: StopReason
    top: TopTokens | None = None
    """Of each token's position."""


@dataclass(frozen=True, slots=True)
class SampleResult:
    """The completions of one prompt."""

    sequences: Sequence[SampledSequence]
    prompt_logprobs: Sequence[float | None] | None = None
    """None where a token has no context, such as the first."""
    prompt_top: TopTokens | None = None
    """Of each token's position in the prompt."""
    targets: Tensor | None = None
    """Log-probs of the ids that the request asked for at each position after the first."""
