"""A recipe with a `trainer:` section, run by the pipe.

The pipe plays the rollouts, bounds their staleness, checkpoints and writes the run directory; where
it would update the weights, the recipe's trainer gets the step's trajectories, and its `train` has
the last word. Its metrics join the step's line of metrics.jsonl.

A supervised recipe (cross_entropy) trains the rows of its `prompts` as they stand.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from retrain.adapters.base import Adapter, AdapterState
from retrain.algorithms.base import Algorithm
from retrain.algorithms.grpo import GRPO
from retrain.algorithms.sft import SFT
from retrain.assembly import Given, Parts, assemble
from retrain.concurrency.threads import DaemonPool
from retrain.config import RunConfig
from retrain.config.yaml_text import read_config_file
from retrain.errors import ConfigError
from retrain.observe.callbacks import Callback, TrainingResult
from retrain.pipeline import train
from retrain.trainer.nexrl.base import BaseTrainer
from retrain.trainer.nexrl.select import build_trainer
from retrain.trainer.nexrl.settings import Section, as_section
from retrain.trainer.nexrl.trajectory import from_group
from retrain.types import Batch, Group, Metrics

STEP = "nexrl_step"


@dataclass(frozen=True, slots=True)
class Recipe:
    """A trainer, and the run that it is the trainer of."""

    trainer: BaseTrainer
    config: RunConfig

    async def train(
        self, *, callbacks: Sequence[Callback] = (), resume: bool = False
    ) -> TrainingResult:
        """Run it; see `pipeline.train`."""
        parts = _parts(self.trainer, self.config)
        return await train(self.config, callbacks=callbacks, resume=resume, parts=parts)


def load_recipe(config: str | Path | Mapping[str, Any]) -> Recipe:
    """The recipe in a YAML file or a mapping, checked; no model is loaded.

    Raises ConfigError with every problem.
    """
    if isinstance(config, Mapping):
        section: Section = as_section(config)
    else:
        file = Path(config)
        mapping, _ = read_config_file(file)
        section = as_section({"name": file.stem, **mapping}).found_in(file.resolve().parent)
    if "prompts" not in section:
        raise ConfigError(
            "prompts: missing; a recipe needs what the model is trained on beside `trainer:`, e.g. "
            "`prompts: {type: file, path: prompts.jsonl}`, and its `environment` and `rewards`"
        )
    trainer = build_trainer(section)
    return Recipe(trainer, trainer.run_config)


def _parts(trainer: BaseTrainer, config: RunConfig) -> Parts:
    algorithm = _HandedSFT() if config.algorithm.type == "sft" else _HandedGRPO()
    made = assemble(config, Given(algorithm=algorithm))
    parts = {field.name: getattr(made, field.name) for field in fields(made)}
    return _Parts(**parts, trainer=trainer)


class _Handed(Algorithm):
    """Keeps the groups of a step for the trainer.

    The credit that it gives itself tells the pipe alone whether there is any signal.
    """

    groups: Sequence[Group] = ()

    def advantages(self, groups: Sequence[Group]) -> list[list[float]]:
        self.groups = groups
        return super().advantages(groups)  # type: ignore[safe-super, return-value]  # the algorithm that it is mixed into


class _HandedGRPO(_Handed, GRPO):
    pass


class _HandedSFT(_Handed, SFT):
    pass


@dataclass(frozen=True)
class _Parts(Parts):
    trainer: BaseTrainer | None = None

    def open_adapter(self) -> Adapter:
        assert self.trainer is not None
        assert isinstance(self.algorithm, _Handed)
        return _TrainerAdapter(super().open_adapter(), self.trainer, self.algorithm)


class _TrainerAdapter(Adapter):
    """An adapter whose update is the trainer's `train`, in a thread; else the inner one."""

    def __init__(self, inner: Adapter, trainer: BaseTrainer, handed: _Handed) -> None:
        self._inner = inner
        self._trainer = trainer
        self._handed = handed
        self._threads = DaemonPool(1, name="retrain-trainer")
        self.capabilities = inner.capabilities

    async def __aenter__(self) -> Self:
        await self._inner.__aenter__()
        self.sampler, self.tokenizer = self._inner.sampler, self._inner.tokenizer
        self.context_length = self._inner.context_length
        self._trainer.service.attach(self._inner, asyncio.get_running_loop())
        return self

    def hurry(self) -> None:
        self._inner.hurry()

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._threads.close()
        self._trainer.service.close()
        await self._inner.__aexit__(kind, error, trace)

    async def update(self, batch: Batch) -> Metrics:
        """The trainer's step over the groups that the batch was made of."""
        groups = self._handed.groups
        trajectories = [one for group in groups for one in from_group(group)]
        return await self._threads.run(lambda: self._trainer.advance(trajectories))

    async def publish(self) -> int:
        return await self._inner.publish()

    async def save(self, folder: Path) -> AdapterState:
        state = await self._inner.save(folder)
        return AdapterState(state.folder, {**state.data, STEP: self._trainer.step})

    async def load(self, state: AdapterState) -> None:
        await self._inner.load(state)
        self._trainer.resume_at(int(state.data[STEP]))

    async def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        return await self._inner.logprobs(sequences, reference=reference)

    async def forget(self, state: AdapterState) -> None:
        await self._inner.forget(state)

    async def export(self, folder: Path) -> Path | str | None:
        return await self._inner.export(folder)
