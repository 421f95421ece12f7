"""A run of a few steps, and what its files say of it."""

from collections import Counter

from benchmarks.mock_engine import MockAdapter, mock_config
from retrain.observe.run_dir import read_events, surviving
from tests.pipe_kit import rollouts_of

STEPS = 12


class Dies(MockAdapter):
    """Raises at the nth call of an adapter method: a crash at that point of the run."""

    class Crash(BaseException):
        """Not an Exception: nothing of the pipe may handle it."""

    calls = 0
    fatal = 0

    def _count(self):
        self.calls += 1
        if self.calls == self.fatal:
            raise self.Crash

    async def update(self, batch):
        self._count()
        metrics = await super().update(batch)
        self._count()
        return metrics

    async def publish(self):
        self._count()
        return await super().publish()

    async def save(self, folder):
        state = await super().save(folder)
        self._count()
        return state


def config_in(folder, **changes):
    train_keys = {"total_train_steps": STEPS, **changes.pop("train", {})}
    return mock_config(folder, train=train_keys, checkpoint={"every": 3}, **changes)


def trained(folder) -> Counter:
    """How often each ticket was trained, by the events that survive."""
    updates = [e for e in surviving(read_events(folder)) if e["event"] == "update"]
    return Counter(ticket for event in updates for ticket in event["tickets"])


def steps(folder) -> dict[str, int]:
    """The step that trained each ticket."""
    updates = [e for e in surviving(read_events(folder)) if e["event"] == "update"]
    return {ticket: event["step"] for event in updates for ticket in event["tickets"]}


def fates_of(folder) -> dict[str, tuple[int | None, str | None]]:
    """The step that trained each group of rollouts.jsonl, and why it was dropped."""
    return {
        row["ticket"]: (row["step"], row.get("dropped"))
        for row in rollouts_of(folder)
        if not row["ticket"].startswith("-1.")
    }
