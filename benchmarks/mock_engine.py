"""An engine without a model: seeded completions after a seeded latency.

`backend: {type: benchmarks/mock_engine.py:MockOptions, latency: 0.3}` runs the pipeline on it.
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from retrain.adapters.base import (
    Adapter,
    AdapterOptions,
    AdapterState,
    Capabilities,
)
from retrain.config import RunConfig
from retrain.losses import LOSSES
from retrain.sampler import SamplingParams
from retrain.types import Batch, Completion, Metrics

LETTERS = "abcdefgh"


class MockOptions(AdapterOptions):
    """`latency`: mean seconds of a completion, lognormal with `sigma`; 0 answers immediately."""

    adapter: ClassVar[str] = "benchmarks.mock_engine:MockAdapter"
    latency: float = 0.0
    sigma: float = 0.5
    capacity: int | None = None
    """Completions in flight at the same time; None means no limit."""
    update: float = 0.0
    """Seconds of an update."""
    publish: float = 0.0
    """Seconds of a publication."""
    learning_rate: float = 0.1

    def capabilities(self) -> Capabilities:
        return Capabilities(losses=frozenset(LOSSES))


class CharacterTokenizer:
    """One token per character, for `chat: none`."""

    eos_token_id: int | None = 0
    chat_template: Any = None  # the protocol's type

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = False) -> str:
        return bytes(t for t in token_ids if t).decode(errors="replace")

    def apply_chat_template(self, *_: Any, **__: Any) -> str:
        raise NotImplementedError("the mock engine's tokenizer has no chat template: chat: none")


class MockAdapter(Adapter):
    """Each version has a probability of sampling the prompt's first letter; updates raise it."""

    def __init__(self, options: MockOptions, config: RunConfig) -> None:
        self.options = options
        self.capabilities = options.capabilities()
        self.tokenizer = CharacterTokenizer()
        self.context_length = 4096
        self.sampler = self
        self.version = 0
        self.skill = 0.1
        self.served_skill = self.skill
        self.batches: list[Batch] = []
        self.keep_batches = 0
        """How many of the newest batches `batches` holds, for tests."""
        limit = options.capacity
        self._slots = asyncio.Semaphore(limit) if limit else None
        self._median = options.latency * math.exp(-(options.sigma**2) / 2)

    async def sample(
        self, prompt_ids: list[int], params: SamplingParams, n: int = 1
    ) -> list[Completion]:
        draw = random.Random(params.seed)
        completions = self._completions(prompt_ids[0] if prompt_ids else 97, params, n, draw)
        if self.options.latency:
            await self._wait([draw.gauss(0.0, 1.0) for _ in range(n)])
        return completions

    async def update(self, batch: Batch) -> Metrics:
        self.batches = [*self.batches, batch][-self.keep_batches :] if self.keep_batches else []
        await asyncio.sleep(self.options.update)
        signal = sum(a for s in batch.samples for a in s.advantages if a > 0)
        self.skill = min(0.99, self.skill + self.options.learning_rate * (signal > 0))
        return {"loss": -signal, "grad_norm": 1.0, "learning_rate": self.options.learning_rate}

    async def publish(self) -> int:
        await asyncio.sleep(self.options.publish)
        self.served_skill = self.skill
        self.version += 1
        return self.version

    async def save(self, folder: Path) -> AdapterState:
        (folder / "skill.txt").write_text(repr(self.skill))
        return AdapterState(folder, {"version": self.version})

    async def load(self, state: AdapterState) -> None:
        self.skill = self.served_skill = float((state.folder / "skill.txt").read_text())
        self.version = state.data["version"]

    async def _wait(self, draws: Sequence[float]) -> None:
        """Wait for the slowest completion; with a capacity, each occupies a slot meanwhile."""
        slots = self._slots
        if slots is None:
            await asyncio.sleep(self._latency(max(draws)))
            return

        async def hold(drawn: float) -> None:
            async with slots:
                await asyncio.sleep(self._latency(drawn))

        await asyncio.gather(*map(hold, draws))

    def _latency(self, drawn: float) -> float:
        """The lognormal latency for a standard normal draw."""
        return self._median * math.exp(self.options.sigma * drawn)

    def _completions(
        self, right: int, params: SamplingParams, n: int, draw: random.Random
    ) -> list[Completion]:
        """Up to four letters each; `right` has the served skill as its probability."""
        count = min(4, params.max_tokens)
        others = (1 - self.served_skill) / len(LETTERS)
        weights = [self.served_skill, *[others] * len(LETTERS)]
        token_ids = draw.choices([right, *LETTERS.encode()], weights, k=count * n)
        rows = [token_ids[i : i + count] for i in range(0, count * n, count)]
        return [
            Completion(row, [-1.0] * count, bytes(row).decode(), "length", self.version)
            for row in rows
        ]


def mock_config(folder: Path, **changes: Mapping[str, Any]) -> RunConfig:
    """The config of the echo task on the mock engine; `changes` replace keys of its sections."""
    sections: dict[str, Any] = {
        "model": "tiny",
        "prompts": {
            "type": "list",
            "rows": [{"prompt": f"{c}=", "answer": c * 4} for c in LETTERS],
        },
        "environment": {"type": "single_turn"},
        "rewards": [{"type": "slot_match"}],
        "algorithm": {"type": "grpo", "group_size": 4},
        "backend": {"type": "benchmarks.mock_engine:MockOptions"},
        "sampling": {"max_tokens": 4},
        "chat": {"template": "none"},
        "train": {"total_train_steps": 4, "groups_per_step": 4},
        "checkpoint": {"every": 2},
        "run_dir": str(folder),
    }
    for name, change in changes.items():
        old = sections.get(name)
        replace = not isinstance(old, dict) or "type" in change
        sections[name] = change if replace else {**old, **change}
    return RunConfig.model_validate(sections)
