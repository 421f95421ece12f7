"""Where a run's losses are computed: by the service, or here.

The protocols say that a service sums a loss over tokens. One that averages would weigh rows in
another way than the config says, and one that divides a row by its sum of weights would train
nonsense with a loss that is computed here. So each loss is measured on a throw-away model before
its first step. A loss that the service does not sum is computed here if that is right, and rejected
if not.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from retrain.adapters.remote.measure import LONG, Trainee, UnfitError, check_sum
from retrain.adapters.remote.options import RemoteOptions
from retrain.errors import AdapterError
from retrain.losses import row_of
from retrain.sampler import Tokenizer

log = logging.getLogger(__name__)

Throwaway = Callable[[str | None], AbstractAsyncContextManager[Trainee]]
"""A throw-away model to train with a native loss, or with losses that are computed here (None)."""

PANGRAMS = (
    "The quick brown fox jumps over 13 lazy dogs. Sphinx of black quartz, judge my vow: pack five "
    "dozen liquor jugs in a box, and amaze exhausted wizards by waltzing, nymph."
)
TRUST = "backend.assume_sum: true"


class Places:
    """Whether the service computes a loss; measured once per loss."""

    def __init__(
        self,
        options: RemoteOptions,
        throwaway: Throwaway,
        token_ids: Sequence[int],
        seconds: float,
        *,
        weighted: bool = False,
    ) -> None:
        """`token_ids` are those to measure with; a measurement takes at most `seconds`.

        `weighted`: the learner's log-probs weigh the tokens (`algorithm.mismatch`), so each loss is
        computed here.
        """
        self._options = options
        self._native = frozenset[str]() if weighted else options.native_losses
        self._throwaway = throwaway
        self._token_ids = token_ids
        self._seconds = seconds
        self._known: dict[str, bool] = {}
        self._ours_sums = False

    async def native(self, loss: str) -> bool:
        """Whether the service computes `loss`; otherwise it is computed here.

        Raises AdapterError when the service trains it in neither way as the config says, or, for a
        loss that is computed here, when that can't be measured.
        """
        native = loss in self._native
        if self._options.url == "local" or self._options.assume_sum:
            return native
        if loss not in self._known:
            unfit = await self._own(loss) if native else None
            if native and unfit is None:
                self._known[loss] = True
            else:
                await self._check_ours(loss, unfit)
                self._known[loss] = False
        return self._known[loss]

    async def _own(self, loss: str) -> UnfitError | None:
        """Why the service's own loss can't be used; None if it can, as far as is known."""
        try:
            await self._measure(loss)
        except UnfitError as error:
            return error
        except AdapterError as error:
            log.warning(
                "Can't check whether the service sums %s over tokens: %s. If it averages, rows "
                "are weighted differently from the config. Set %s to skip this check.",
                *(loss, error, TRUST),
            )
        return None

    async def _check_ours(self, loss: str, unfit: UnfitError | None) -> None:
        """Raise AdapterError unless `loss` can be computed here, where the service is `unfit`."""
        own = f"the service's own {loss} can't be used: {unfit}. " if unfit else ""
        try:
            if not self._ours_sums:
                await self._measure(None)
        except UnfitError as error:
            raise AdapterError(
                f"{own}{loss} can't be computed here{' either' if own else ''}, because the "
                f"service weights the rows differently from what was sent: {error}. Choose "
                f"another loss or service. With {TRUST} the run trains anyway, but not as the "
                "config says."
            ) from error
        except AdapterError as error:
            raise AdapterError(
                f"{own}{loss} is computed here, which needs a service that sums over tokens, and "
                f"that can't be checked: {error}. If the service sums, set {TRUST}; otherwise "
                "choose another loss."
            ) from error
        self._ours_sums = True
        if unfit is not None:
            others = ", ".join(sorted(self._options.native_losses - {loss}))
            log.warning(
                "%sIt is computed here instead, which costs an extra forward pass per step. To "
                "skip this check, set backend.native_losses: [%s].",
                *(own, others),
            )

    async def _measure(self, loss: str | None) -> None:
        try:
            async with asyncio.timeout(self._seconds), self._throwaway(loss) as trainee:
                ratio = loss is not None and row_of(loss).reads == "ratio"
                await check_sum(trainee, self._token_ids, ratio=ratio)
        except TimeoutError:
            raise AdapterError(f"it took longer than {self._seconds:g} s") from None


def unlikely_text(tokenizer: Tokenizer) -> list[int]:
    """The tokens to measure with. Their log-probs are low, so that they can rise."""
    known = sorted(set(tokenizer.encode(PANGRAMS)), reverse=True)
    return (known * (LONG + 1))[: LONG + 1]
