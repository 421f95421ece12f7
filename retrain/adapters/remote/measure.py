"""Measures whether a service sums a loss over tokens, as the protocols say; some servers average.

The measurement trains a throw-away model and compares the changes of log-probs by three updates.
Adam runs without memory (both betas 0) and with an eps far above the gradients, so that a step is
-rate / eps x gradient: plain gradient descent, in which a factor of the gradient shows.

    one    one row of `PREFIX` tokens, each of weight 1
    many   the same prefix in twelve longer rows, each of which trains 2 of its tokens, and two
           rows each token; a token's weights add up to 5, and the rate is a fifth
    less   as `one`, with the weights -1; for a loss with a ratio, -1 / `RATIO` at this ratio
    apart  as `one`, in four requests with the weights 1/4

Attention is causal, so a token has the same gradient in a longer row. Under a sum, `many` and
`apart` therefore take the same step as `one`, and `less` the opposite one, whatever the model. No
average does: each changes the gradient of `many` by one of the factors in `AVERAGES`, or that of
`less`. A service that forgets the sampler's log-probs changes that of `less`, and one that forgets
the gradients of earlier requests that of `apart`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple, Protocol

from retrain.adapters.remote.datums import Datum
from retrain.errors import AdapterError
from retrain.protocols.training import AdamParams
from retrain.transport.refusals import RemoteError

PREFIX, LONG = 12, 36
"""Targets of the rows."""
PARTS = 4
"""Requests of `apart`."""
RATIO = 4.9
"""No loss clips it where the advantage is negative."""
EPS = 1e3
RATE = 0.03
"""The first learning rate that is tried."""
CHANGE, LARGEST = 0.05, 1.0
"""The least and the largest mean change of log-probs that `one` should have."""
SIGNAL = 20.0
"""The least ratio of the change to the noise, the difference of two readings of log-probs."""
ATTEMPTS = (1.0, 4.0, 1.0)
"""Factors of the change: a larger one stands out of a service's rounding. The first attempt that
finds a sum decides; once one has found none, two must agree."""
TRIES = 8
"""Updates to find a learning rate."""
TOLERANCE, DECISIVE = 1.4, 1.7
"""The factors by which two changes may differ that should be equal, and must differ if not."""
OPPOSITE = 3.0
"""The factor for negative weights: a clamp on their sum changes them by orders of magnitude."""
AVERAGES = {
    2.4: "divides each row by the sum of its weights",
    6.0: "averages over the trained tokens of each row",
    1 / 2: "averages over the trained tokens of a request",
    1 / 2.75: "averages over the tokens of each row, or divides the weights by their size",
    1 / 5: "divides by the sum of the weights, or always clips gradients",
    1 / 12: "averages over the rows of a request",
    1 / 36: "averages over the tokens of a request",
}
"""The change of `many` by that of `one`, and what a service does whose ratio it is."""
_ABOUT_ADAM = re.compile(r"\b(adam_params|eps|betas?[12]?|learning_rate)\b")


class Trainee(Protocol):
    """A throw-away model, trained with one loss."""

    async def forward(self, datums: Sequence[Datum]) -> Sequence[Sequence[float]]:
        """The log-probs of the targets."""

    async def step(self, datums: Sequence[Datum], adam: AdamParams, *, apart: bool = False) -> None:
        """One update with the loss, whose weights are the advantages.

        With `apart`, each row is sent in a separate request.
        """


class UnfitError(AdapterError):
    """The service does not train the loss as a sum."""


class _Changes(NamedTuple):
    """By those of `one`."""

    many: float
    less: float
    apart: float


async def check_sum(trainee: Trainee, token_ids: Sequence[int], *, ratio: bool = False) -> None:
    """Measure; `token_ids` are `LONG` + 1 tokens, best an unlikely text.

    `ratio`: the gradient of the loss grows with p_learner / p_sampler.

    Raises UnfitError when the service rejects the loss, does not train it or does not sum it, and
    another AdapterError when that can't be found out.
    """
    await _Measurement(trainee, token_ids, RATIO if ratio else 1.0).run()


class _Measurement:
    def __init__(self, trainee: Trainee, token_ids: Sequence[int], ratio: float) -> None:
        self._trainee = trainee
        self._ratio = ratio
        self._short = _row(token_ids, PREFIX)
        self._long = _row(token_ids, LONG)
        self._before: list[float] = []
        self._rate = RATE

    async def run(self) -> None:
        self._before, again = await self._look()
        gaps = [one - other for one, other in zip(self._before, again, strict=True)]
        noise = math.hypot(*gaps) / PREFIX  # of the mean, if the gaps are independent
        least = max(CHANGE, SIGNAL * noise)
        fits, unfit = 0, list[float]()
        for number, factor in enumerate(ATTEMPTS):
            found = None
            if least * factor <= LARGEST:
                found = await self._compared(least * factor, first=number == 0)
            sums = None if found is None else _sums(found)
            fits += sums is True
            if sums and (not unfit or fits == 2):
                return
            if found is not None and sums is False:
                await self._judge(found, unfit)
        raise AdapterError(
            "the log-probs of its model are too imprecise: those of the same tokens differ by "
            f"{noise:.2g} between two rows, and equal updates change them differently"
        )

    async def _judge(self, found: _Changes, before: list[float]) -> None:
        """Raise UnfitError if these changes agree with those of an attempt before."""
        if not abs(found.less) < 30:  # no noise: the model is broken
            raise UnfitError(_described(found))
        if any((found.many > 1) == (other > 1) for other in before):
            await self._check_eps()
            raise UnfitError(_described(found))
        before.append(found.many)

    async def _compared(self, aim: float, *, first: bool) -> _Changes | None:
        """None if two updates of `one` differ: the model changed too much, or there is noise."""
        try:
            one = await self._calibrated(aim)
        except UnfitError:
            if first:
                raise
            return None  # the attempts before have changed the model too much
        then = await self._change([_weighted(self._short, 1.0)], self._rate)
        if not _near(then / one):
            return None
        pairs = [range(start, start + 2) for start in range(0, PREFIX, 2)]
        rows = [_weighted(self._long, 2.5, pair) for pair in pairs for _ in range(2)]
        many = await self._change(rows, self._rate / 5)
        row = _weighted(self._short, -1.0 / self._ratio)
        less = await self._change([row], self._rate, ratio=self._ratio)
        rows = [_weighted(self._short, 1.0 / PARTS)] * PARTS
        apart = await self._change(rows, self._rate, apart=True)
        drift = then / one  # by which the gradient changes with each update
        return _Changes(*(change / (then * drift) for change in (many, less, apart)))

    async def _check_eps(self) -> None:
        """Raise AdapterError if a larger eps does not make updates smaller.

        Adam without its eps takes steps of one size, whatever the gradients are.
        """
        row = [_weighted(self._short, 1.0)]
        small = await self._change(row, self._rate, eps=EPS * 4)  # first: later ones saturate
        if small > await self._change(row, self._rate) / 2:
            raise AdapterError(
                "its optimizer ignores eps, so that its updates don't show the size of gradients"
            )

    async def _calibrated(self, aim: float) -> float:
        """The change of `one`, with a learning rate at which it is about `aim`."""
        largest = 0.0
        for _ in range(TRIES):
            change = await self._change([_weighted(self._short, 1.0)], self._rate)
            if aim / 2 <= change <= aim * 2:
                return change
            if not change > -aim / 2:  # or NaN
                break
            largest = max(largest, change)
            self._rate *= aim / change if change > aim / 30 else 10.0
        else:
            if largest == 0.0:
                raise UnfitError("it accepts updates, but the log-probs of its model don't change")
        if largest > aim:
            raise AdapterError("no learning rate changes its log-probs by a small amount")
        raise UnfitError("updates with positive weights don't raise the log-probs of its model")

    async def _change(
        self,
        rows: Sequence[Datum],
        rate: float,
        *,
        eps: float = EPS,
        ratio: float = 1.0,
        apart: bool = False,
    ) -> float:
        """The mean change of the prefix's log-probs by one update at this ratio."""
        padded = [*(lp - math.log(ratio) for lp in self._before), *[0.0] * LONG]
        known = [
            replace(row, logprobs=[lp * kept for lp, kept in zip(padded, row.mask, strict=False)])
            for row in rows
        ]
        try:
            await self._trainee.step(known, AdamParams(rate, 0.0, 0.0, eps), apart=apart)
        except RemoteError as error:
            if error.retryable or error.code == "malformed" or _ABOUT_ADAM.search(str(error)):
                raise
            raise UnfitError(f"it rejects an update ({error})") from error
        before, (self._before, _) = self._before, await self._look()
        return _mean(self._before) - _mean(before)

    async def _look(self) -> tuple[list[float], list[float]]:
        """The log-probs of the prefix, in the short row and in the long one."""
        found = await self._trainee.forward([self._short, self._long])
        if [len(row) for row in found] != [PREFIX, LONG]:
            raise AdapterError("the service does not return one log-prob per target")
        return list(found[0]), list(found[1][:PREFIX])


def _row(token_ids: Sequence[int], length: int) -> Datum:
    """`length` targets, of which the prefix is trained."""
    mask = [1.0] * PREFIX + [0.0] * (length - PREFIX)
    return Datum(token_ids[:length], token_ids[1 : length + 1], mask, [0.0] * length, mask)


def _weighted(row: Datum, weight: float, trained: Sequence[int] = range(PREFIX)) -> Datum:
    mask = [float(position in trained) for position in range(len(row.targets))]
    return replace(row, mask=mask, advantages=[weight * kept for kept in mask])


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _near(ratio: float, factor: float = TOLERANCE) -> bool:
    return 1 / factor < ratio < factor


def _sums(found: _Changes) -> bool | None:
    """Whether these are the changes of a sum; None if that is not clear."""
    even = (found.many, found.apart)
    if not _near(-found.less, OPPOSITE) or not all(_near(one, DECISIVE) for one in even):
        return False
    return True if all(map(_near, even)) else None


def _described(found: _Changes) -> str:
    many, less, apart = found
    nearest = min(AVERAGES, key=lambda ratio: abs(math.log(max(many, 1e-9) / ratio)))
    guess = f"; it probably {AVERAGES[nearest]}" if _near(many / nearest, 1.25) else ""
    if _near(many, DECISIVE) and not _near(apart, DECISIVE):
        guess = "; it probably does not add up the gradients of several requests"
    elif _near(many, DECISIVE) and _near(-less * RATIO, TOLERANCE):
        guess = "; it probably ignores the sampler's log-probs"
    return (
        f"it does not sum over tokens{guess} (of two updates whose gradients should be equal, one "
        f"changed log-probs {many:.3g} times as much as the other, or {apart:.3g} times when sent "
        f"in {PARTS} requests; negative weights changed them {less:.3g} times as much, expected -1)"
    )
