"""Training data of both protocols, as pure functions: from a body's JSON to rows of the trainer.

A missing, unknown or invalid input is a ServiceError (400) that names the datum and the input.
Nothing is padded, cut or guessed. Each loss takes exactly the inputs of its row in the protocol's
table of losses.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import cast

from retrain.errors import shown
from retrain.service.errors import ServiceError, invalid
from retrain.service.fields import INT64, KINDS, LARGEST, Json, fits, objects, want
from retrain.service.passes import TargetRow
from retrain.service.state import RequestLimits
from retrain.service.training_fields import Inputs
from retrain.wire.tinker.values import Datum, Dtype, Tensor

IGNORED_TARGET = -100
"""A target without loss, as in torch's cross_entropy."""


def tokens_of(prompt: Json) -> list[int]:
    """The tokens of a list of text chunks; images and audio are not supported."""
    tokens: list[int] = []
    for chunk in objects(prompt, "chunks"):
        if chunk.get("type", "encoded_text") != "encoded_text":
            raise invalid("only chunks of type encoded_text are supported")
        tokens += want(chunk, "tokens", list)
    return tokens


def prompt_of(body: Json, limits: RequestLimits) -> list[int]:
    prompt = tokens_of(want(body, "prompt", dict))
    _check_tokens("prompt", prompt, limits)
    return prompt


def datum_of(given: Json, expected: Inputs) -> Datum:
    """A training sequence, without the inputs that its loss ignores."""
    inputs = want(given, "loss_fn_inputs", dict)
    if expected.ignores_others:
        inputs = {name: inputs[name] for name in inputs if name in expected.required}
    tokens = tokens_of(want(given, "model_input", dict))
    return Datum(tokens, {name: tensor_of(inputs, name) for name in inputs})


def tensor_of(body: Json, name: str) -> Tensor:
    """`body[name]`, a tensor whose numbers are not checked yet."""
    given = want(body, name, dict)
    shape = want(given, "shape", list, None)
    dtype = cast(Dtype, want(given, "dtype", str))
    sparse: tuple[list[int], list[int]] | None = None
    if (starts := want(given, "sparse_crow_indices", list, None)) is not None:
        sparse = starts, want(given, "sparse_col_indices", list)
    return Tensor(want(given, "data", list), dtype, None if shape is None else tuple(shape), sparse)


def training_rows(
    data: Sequence[Datum], expected: Inputs, limits: RequestLimits
) -> list[TargetRow]:
    """One row per datum; raises ServiceError for data that doesn't fit the loss."""
    if not data:
        raise invalid("there is no data: expected at least one datum")
    rows, targets = [], 0
    for index, datum in enumerate(data):
        rows.append(_row(f"datum {index}", datum, expected, limits))
        targets += len(rows[-1].targets)
        if targets > limits.values:
            raise ServiceError(413, f"the data has more than {limits.values} targets; send less")
    return rows


def _row(where: str, datum: Datum, expected: Inputs, limits: RequestLimits) -> TargetRow:
    """The row of a datum; surrogate weights, dL/dlogp, become negated advantages."""
    tokens = list(datum.tokens)
    _check_tokens(where, tokens, limits)
    _check_names(where, set(datum.inputs), expected)
    shape = _shape(where, datum, expected, limits)
    numbers: dict[str, Sequence[float]] = {}
    for name in datum.inputs.keys() & (expected.required | expected.optional):
        kind = int if name == "target_tokens" else float
        numbers[name] = numbers_of(f"{where}: {name}", datum.inputs[name], shape, kind)
    targets = cast(Sequence[int], numbers["target_tokens"])
    labels = [0 if target == IGNORED_TARGET else target for target in targets]
    check_range(f"{where}: target_tokens", labels, limits)
    ones = [1.0] * len(targets)
    surrogate = [-weight for weight in numbers.get("surrogate_weights", ())]
    return TargetRow(
        tokens=tokens,
        targets=labels,
        advantages=surrogate or numbers.get("advantages", numbers.get("weights", ones)),
        logprobs=numbers.get("logprobs", [0.0] * len(targets)),
        mask=_mask(where, numbers.get("loss_mask", ones), targets),
        in_ratio=_in_ratio(where, numbers),
        width=None if len(shape) == 1 else shape[1],
    )


def _mask(where: str, given: Sequence[float], targets: Sequence[int]) -> list[float]:
    """`given`, without the targets that have no loss."""
    if not set(given) <= {0, 1}:
        raise invalid(f"{where}: loss_mask has values other than 0 and 1")
    return [float(m and t != IGNORED_TARGET) for m, t in zip(given, targets, strict=True)]


def _in_ratio(where: str, numbers: Mapping[str, Sequence[float]]) -> list[float]:
    """1 for the tokens of a sequence's ratio; empty if the loss has none."""
    given = numbers.get("sequence_ratio_mask")
    if given is not None and not any(given):
        raise invalid(f"{where}: sequence_ratio_mask is 0 everywhere, expected a sampled token")
    return [float(part != 0) for part in given or ()]


def _shape(where: str, datum: Datum, expected: Inputs, limits: RequestLimits) -> tuple[int, ...]:
    """(N,), or (N, K) if the loss allows several targets per token and this datum has them."""
    length, found = len(datum.tokens), datum.inputs["target_tokens"].dimensions
    if not expected.wide or len(found) != 2:
        return (length,)
    width = found[1]
    if type(width) is not int or not 1 <= width <= limits.top:
        raise invalid(
            f"{where}: target_tokens: got {shown(width)} targets per token, expected 1 to "
            f"{limits.top}"
        )
    return length, width


def _check_names(where: str, got: set[str], expected: Inputs) -> None:
    unknown = got - expected.required - expected.optional
    if not expected.required <= got or (unknown and not expected.ignores_others):
        wanted = ", ".join(sorted(expected.required))
        raise invalid(f"{where}: got loss inputs {shown(sorted(got))}, expected {wanted}")


def numbers_of(
    where: str,
    tensor: Tensor,
    shape: tuple[int, ...],
    kind: type[int] | type[float],
    implied: int = 0,
) -> Sequence[float]:
    """The numbers of a tensor of this shape, (N,) or (N, K), in row-major order.

    `implied` are the numbers that a sparse tensor leaves out.
    """
    dtype = "int64" if kind is int else "float32"
    if tensor.dtype != dtype:
        raise invalid(f"{where}: got {tensor.dtype}, expected {dtype}")
    count, values = math.prod(shape), len(tensor.data)
    if tensor.dimensions != shape or (tensor.sparse is None and values != count):
        got = shown(list(tensor.dimensions))
        raise invalid(f"{where}: got shape {got} with {values} values, expected {list(shape)}")
    _check_numbers(where, tensor.data, kind)
    return tensor.data if tensor.sparse is None else _dense(where, tensor, count, implied)


def _dense(where: str, tensor: Tensor, count: int, implied: int) -> list[float]:
    """The `count` numbers of a sparse tensor whose shape and numbers have been checked."""
    assert tensor.sparse is not None
    starts, columns = tensor.sparse
    for indices in (starts, columns):
        _check_numbers(f"{where}: its indices", indices, int)
    whole = len(tensor.dimensions) == 2 and len(columns) == len(tensor.data)
    if not (whole and _fit(starts, columns, tensor.dimensions)):
        raise invalid(f"{where}: the indices of the sparse tensor do not fit its shape")
    numbers: list[float] = [implied] * count
    for row, (first, last) in enumerate(itertools.pairwise(starts)):
        for place in range(first, last):
            numbers[row * tensor.dimensions[1] + columns[place]] = tensor.data[place]
    return numbers


def _fit(starts: Sequence[int], columns: Sequence[int], shape: tuple[int, ...]) -> bool:
    rises = all(first <= last for first, last in itertools.pairwise(starts))
    inside = all(0 <= column < shape[1] for column in columns)
    rows = len(starts) == shape[0] + 1
    return rises and inside and rows and (starts[0], starts[-1]) == (0, len(columns))


def _check_numbers(where: str, values: Sequence[float], kind: type[int] | type[float]) -> None:
    """Raise ServiceError unless all are finite numbers of this kind."""
    kinds = {int} if kind is int else {int, float}
    low, high = INT64 if kind is int else (-LARGEST, LARGEST)
    if set(map(type, values)) <= kinds and all(low <= value <= high for value in values):
        return
    position, wrong = next((i, v) for i, v in enumerate(values) if not fits(v, kind))
    raise invalid(f"{where}[{position}]: got {shown(wrong)}, expected {KINDS[kind]}")


def _check_tokens(where: str, tokens: Sequence[int], limits: RequestLimits) -> None:
    if not tokens:
        raise invalid(f"{where} has no tokens")
    if limits.context is not None and len(tokens) > limits.context:
        raise invalid(f"{where} has {len(tokens)} tokens, expected at most {limits.context}")
    if not set(map(type, tokens)) <= {int}:
        raise invalid(f"{where}: tokens must be integers")
    check_range(f"{where}: tokens", tokens, limits)


def check_range(where: str, tokens: Sequence[int], limits: RequestLimits, lowest: int = 0) -> None:
    """Raise ServiceError for an id below `lowest`, or outside the vocabulary."""
    if tokens and not (min(tokens) >= lowest and max(tokens) < limits.vocabulary):
        wrong = next(t for t in tokens if not lowest <= t < limits.vocabulary)
        last = limits.vocabulary - 1
        raise invalid(f"{where}: got token {shown(wrong)}, expected {lowest} to {last}")
