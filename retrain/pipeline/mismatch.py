"""Warn once if sampler and trainer disagree for several steps about the tokens that they share.

Both compute the log-probs of the same tokens: another precision, kernel or engine gives others. The
loss then corrects for a difference that no weights have, or trusts what was never sampled.
"""

from __future__ import annotations

import logging

from retrain.config import RunConfig
from retrain.types import Metrics

STEPS = 5
"""Consecutive steps above the bar."""
FRESH = 0.01
"""The bar where no token was stale: exact arithmetic gives 0, and a good bf16 pair about 0.001."""
STALE = 0.1
"""The bar otherwise, since weights changed in between."""
logger = logging.getLogger(__name__)


class MismatchWatch:
    """Looks at the row of every step."""

    def __init__(self, config: RunConfig) -> None:
        shaped = config.sampling.top_p < 1 or config.sampling.top_k > 0
        corrected = config.algorithm.mismatch is not None
        self._done = shaped or corrected  # a difference that was warned of, or is corrected
        self._steps = 0

    def see(self, row: Metrics) -> None:
        """Count a step, and warn at the last of `STEPS`."""
        if self._done:
            return
        fresh = row.get("staleness/max", 0.0) == 0
        gap, bar = row.get("kl/sampler_trainer", 0.0), FRESH if fresh else STALE
        self._steps = self._steps + 1 if gap > bar else 0  # NaN is no gap
        if self._steps < STEPS:
            return
        self._done = True
        logger.warning(
            "kl/sampler_trainer was above %g for %d steps (now %.3g)%s: sampler and trainer give "
            "the same tokens different log-probs, and training may become unstable. Set "
            "algorithm.mismatch to correct it; %s",
            bar,
            STEPS,
            gap,
            " though no token was stale" if fresh else "",
            "or use the same precision in both"
            if fresh
            else "or lower staleness.max or the learning rate",
        )
