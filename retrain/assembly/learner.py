"""The Learner: where a trainer takes part in the steps of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from retrain.adapters.base import Adapter
from retrain.types import Batch, Group, Metrics


class Learner:
    """What happens to a step's groups; by default the adapter trains on their batch.

    A trainer overrides the methods that it needs and passes its object as `Parts.learner`. The
    pipe still chooses the groups, publishes the weights, writes the files and the checkpoints.
    """

    adapter: Adapter
    """The adapter of the run, from `attach` on."""

    def attach(self, adapter: Adapter) -> None:
        """Called on the event loop once the adapter is open."""
        self.adapter = adapter

    async def review(self, groups: Sequence[Group]) -> Metrics:
        """Called before advantages are computed: may change rewards, returns metrics."""
        return {}

    async def update(self, groups: Sequence[Group], batch: Batch) -> Metrics:
        """Take one optimizer step. `batch` was made of `groups`, which hold scored rollouts only.

        The call has the deadline `deadlines.update`. The pipe publishes the weights afterwards.
        Unless this method is overridden, it is not called for a batch whose advantages are all 0
        if the loss has no other term.
        """
        return await self.adapter.update(batch)

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps of this object, as JSON values."""
        return {}

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        """Continue after optimizer step `step`; `state` is what `state()` returned then.

        Called when a run resumes, after `Adapter.load`.
        """

    def close(self) -> None:
        """Called before the adapter closes, however the run ends."""
