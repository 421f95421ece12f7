"""The learning rate of each step, for services that get it with every optimizer step."""

from __future__ import annotations

import math
from typing import Literal

Schedule = Literal["constant", "linear", "cosine"]


def learning_rate(
    step: int, *, peak: float, schedule: Schedule, warmup_steps: int, total_steps: int
) -> float:
    """The rate of optimizer step `step` (from 0), as by transformers' scheduler of this name.

    It rises from 0 to `peak` over `warmup_steps`. Then it is constant, or decays to 0 at
    `total_steps`, linearly or along half a cosine.
    """
    if step < warmup_steps:
        return peak * step / warmup_steps
    if schedule == "constant":
        return peak
    done = min((step - warmup_steps) / max(1, total_steps - warmup_steps), 1.0)
    if schedule == "linear":
        return peak * (1.0 - done)
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))
