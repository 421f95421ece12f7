"""Check each publish: the trainer scores tokens that the sampler has just sampled (P16).

After a publish both have the same weights, so only rounding separates their log-probs of the same
tokens. In `kl/sampler_trainer` and `ratio/*` such an error is mixed with staleness.

- A check samples as a rollout does, with its own seed, so it changes no rollout and no event.
- With `auto` checks take at most 2 % of the time: one of t seconds is followed by none for 50 t.
- A difference is a warning. If the sampler fails, the run ends as it does for a failed publish.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence

from retrain.adapters.base import Adapter
from retrain.config import RunConfig
from retrain.errors import AdapterError
from retrain.sampler import SamplingParams
from retrain.types import Completion, Group, Metrics

ERROR = "logprob/error_own_version"
PROMPT, TOKENS = 64, 8
"""Tokens of the prompt, the last ones of an opening, and of the completion."""
FIRST_ROWS = 4
"""Completions of the measurement that sets the bound."""
BOUND = 1e-3
"""The largest difference in float32, in nats."""
MARGIN, LOWEST, HIGHEST = 4.0, 0.02, 1.0
"""In lower precision the bound is `MARGIN` times the largest difference at the start, between
these: merged LoRA weights are rounded again, and a difference above `HIGHEST` is no rounding."""
REST = 50.0
"""Seconds without a check for each second of one."""
logger = logging.getLogger(__name__)


class PublishCheck:
    """The checks of a run; `report` records a publish that failed one."""

    def __init__(self, config: RunConfig, adapter: Adapter, report: Callable[[str], None]) -> None:
        self._adapter, self._report, self._seed = adapter, report, config.train.seed
        self._always = config.train.check_publish is True
        self._on = True
        self._bound = BOUND if adapter.exact else None
        self._next = -math.inf
        self._warned = False

    @property
    def needs_bound(self) -> bool:
        """Whether `begin` is to measure the bound."""
        return self._on and self._bound is None

    async def begin(self, version: int, groups: Sequence[Group]) -> None:
        """Measure the bound in lower precision: on the weights that the run starts from, which no
        publish of this run has changed."""
        error = await self._measure(version, groups, FIRST_ROWS, HIGHEST)
        if error is not None:
            self._bound = min(max(LOWEST, MARGIN * error), HIGHEST)

    async def published(self, version: int, groups: Sequence[Group]) -> Metrics:
        """Check what is served as `version`; {} without a check. `groups` provide the prompt."""
        began = time.monotonic()
        if not self._on or began < self._next:
            return {}
        error = await self._measure(version, groups, 1, self._bound or HIGHEST)
        now = time.monotonic()
        self._next = -math.inf if self._always else now + REST * (now - began)
        return {} if error is None else {ERROR: error}

    async def _measure(
        self, version: int, groups: Sequence[Group], rows: int, bound: float
    ) -> float | None:
        """The largest difference in nats, which is reported above `bound`; None: not known."""
        [opening, *_] = (t.turns[0].prompt_ids for g in groups for t in g.trajectories if t.turns)
        room = min(PROMPT, self._adapter.context_length - TOKENS)
        prompt = list(opening[-max(1, room) :])
        params = SamplingParams(max_tokens=TOKENS, seed=self._seed)
        found = await self._adapter.sampler.sample(prompt, params, rows)
        try:
            scored = await self._adapter.own_logprobs([[*prompt, *c.token_ids] for c in found])
        except AdapterError as error:
            if self._always:
                raise
            self._on = False
            logger.warning(
                "publishes are not checked, since the trainer can't score tokens: %s. Set "
                "train.check_publish to false to remove this warning.",
                error,
            )
            return None
        gaps = [
            abs(served - own)
            for completion, row in zip(found, scored, strict=True)
            for served, own in zip(completion.logprobs, row[len(prompt) :], strict=True)
        ]
        if not gaps:
            return None
        worst = next(filter(math.isnan, gaps), max(gaps))
        self._judge(version, found, worst, bound)
        return worst

    def _judge(self, version: int, found: Sequence[Completion], worst: float, bound: float) -> None:
        """Report other weights than those of `version`."""
        served = {tag for c in found for tag in c.versions or (c.version,)}
        if served != {version}:
            tags = ", ".join(map(str, sorted(served)))
            self._warn(version, f"the sampler labelled new tokens as of version {tags}")
        elif not worst <= bound:  # also NaN
            self._warn(
                version,
                f"the log-probs of the same tokens differ by up to {worst:.3g} nats between "
                f"sampler and trainer, expected at most {bound:.2g}",
            )

    def _warn(self, version: int, problem: str) -> None:
        """Record each failed check, but log only the first."""
        text = f"after the publish of version {version}, {problem}"
        self._report(text)
        if not self._warned:
            logger.warning(
                "%s. The sampler has other weights than the trainer (old ones, or without a "
                "tensor), labels them wrong, or computes in another precision, so the run corrects "
                "for the wrong difference or for none. Check the sampler's log, version and dtype; "
                "for the precision, set algorithm.mismatch. Further cases are only recorded, as %s "
                "and as `fault` events.",
                text,
                ERROR,
            )
        self._warned = True
