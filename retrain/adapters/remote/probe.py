"""Measures whether a service sums a loss over tokens, as the protocols say, or what it averages.

It is measured on a throw-away model, with Adam as plain gradient descent (no memory, a large eps).
Under a sum, `MIXED` rows lower log-probs as much as one row raised them, in any number of requests.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import replace

from retrain.adapters.remote.datums import SUM, Average, Shifted
from retrain.errors import AdapterError
from retrain.losses import row_of
from retrain.wire.training import AdamParams

PREFIX, RATIO = 48, 4.9
MIXED = ((48, 48, -20.0, 2), (96, 48, 10.0, 1), (144, 96, 5.0, 2))
"""Tokens, mask, weight and count of rows; of two, each trains half of the prefix. Two averages
change them by factors that differ by 1.4, and so does a server that normalises weights, forgets
requests, ignores log-probs (p_learner / p_sampler is RATIO in negative rows, where no loss clips),
or clips gradients: the weights add up to -5, at a fifth of the rate."""
AIM, SIGNAL, TRIES, TOLERANCE = 0.01, 20.0, 8, 1.2
"""The least change of log-probs by one row, and by their noise: larger ones are less linear."""
Train = Callable[[Shifted, Sequence[Shifted], AdamParams, bool], Awaitable[Sequence[float]]]
"""An update with rows, if any, in one request or one per row; then the first row's log-probs."""
Throwaway = Callable[[str | None], AbstractAsyncContextManager[Train]]
"""A model that is trained with a loss of the service, or with those that are computed here."""
log = logging.getLogger(__name__)
_PAIRS = (("", "rows"), ("trained", "rows"), ("tokens", "rows"), ("", "trained"), ("", "tokens"))
AVERAGES = [SUM, Average("trained"), Average("tokens")]
AVERAGES += [Average(*pair, of) for pair in _PAIRS for of in ("request", "step")]
"""In an order in which none is undone far too much before its turn."""


async def place_of(
    loss: str, throwaway: Throwaway, ids: Sequence[int], seconds: float, *, native: bool
) -> tuple[bool, Average]:
    """Whether the service computes `loss`, rather than this process, and its average.

    Raises AdapterError if neither trains the loss, or that can't be measured within `seconds`.
    """
    reasons = []
    for own in (True, False) if native else (False,):
        try:
            async with asyncio.timeout(seconds), throwaway(loss if own else None) as train:
                ratio = RATIO if own and row_of(loss).reads == "ratio" else 1.0
                average = await average_of(train, ids, ratio)
        except (AdapterError, TimeoutError) as error:
            where = "by the service" if own else "here"
            reasons.append(f"computed {where}: {error or f'no result after {seconds:g} s'}")
        else:
            if reasons:
                log.warning("%s is computed here, with another forward pass: %s", loss, reasons[0])
            return own, average
    raise AdapterError(
        f"the service can't train {loss} as the config says ({'; '.join(reasons)}). Choose another "
        "loss or service, or set backend.assume_sum: true if the service sums over tokens."
    )


async def average_of(train: Train, ids: Sequence[int], ratio: float) -> Average:
    """`ids`: unlikely tokens; `ratio`: p_learner / p_sampler where weights are negative.

    Raises AdapterError if no average explains what the service trains.
    """
    one = _row(ids, PREFIX, PREFIX, 1.0)
    rows = [_row(ids, size, mask, w, i, n) for size, mask, w, n in MIXED for i in range(n)]
    ways = [rows], [[row] for row in rows]
    rate, before = 0.03, await train(one, [], AdamParams(0.0), False)
    again = await train(rows[-1], [], AdamParams(0.0), False)
    noise = math.dist(before, again[:PREFIX]) / PREFIX  # of the mean
    aim = max(AIM, SIGNAL * noise)

    async def change(rows: Sequence[Shifted], rate: float, apart: bool = False) -> float:
        nonlocal before
        sent = [_known(row, before, ratio) for row in rows]
        earlier, before = before, await train(one, sent, AdamParams(rate, 0.0, 0.0, 1e3), apart)
        return (math.fsum(before) - math.fsum(earlier)) / PREFIX

    async def sums(average: Average) -> bool:
        """Whether the rows, with the average undone, lower log-probs as much as one raises them."""
        unit = average.undone([[one]])[0].advantages[0]
        for apart in (False, True) * 2:
            undone = average.undone(ways[apart], unit)
            up, fall = await change([one], rate), await change(undone, rate / 5, apart)
            if not up / TOLERANCE < -fall < up * TOLERANCE:
                undo = max(-6.0, min(-1 - fall / (up or 1.0), 6.0))
                await change([replace(one, advantages=[undo] * PREFIX)], rate)
                return False
        return True

    for _ in range(TRIES):
        up = await change([one], rate)
        if aim / 1.5 < up < aim * 1.5:
            break
        rate *= aim / max(aim / 30, up)  # in this order, up may be NaN
    else:
        raise AdapterError(f"no learning rate raises log-probs by {aim:.2g} (noise {noise:.2g})")
    for average in (SUM, SUM, *AVERAGES):
        if await sums(average):
            return average
    raise AdapterError("it trains neither a sum over tokens nor an average that can be undone")


def _row(
    ids: Sequence[int], size: int, mask: int, weight: float, i: int = 0, n: int = 1
) -> Shifted:
    kept, ids = [1.0] * mask + [0.0] * (size - mask), (list(ids) * size)[: size + 1]
    advantages = [weight * (at < PREFIX and at % n == i) for at in range(size)]
    return Shifted(ids[:-1], ids[1:], kept, [0.0] * size, advantages)


def _known(row: Shifted, now: Sequence[float], ratio: float) -> Shifted:
    by = ratio if min(row.advantages) < 0 else 1.0
    old = [*(lp - math.log(by) for lp in now), *row.logprobs[PREFIX:]]
    return replace(row, logprobs=old, advantages=[a / by for a in row.advantages])
