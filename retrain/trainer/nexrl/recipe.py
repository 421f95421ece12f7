"""A recipe with a `trainer:` section, run by the pipe.

The pipe plays the rollouts, bounds their staleness, checkpoints and writes the run directory. The
trainer is the run's Learner: it gets the trajectories of each step, and its `train` updates the
weights. Its metrics join the step's row of metrics.jsonl.

A supervised recipe (cross_entropy) trains the rows of its `prompts` as they are.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from retrain.adapters.base import Adapter
from retrain.assembly import Learner, assemble
from retrain.config import RunConfig
from retrain.config.yaml_text import read_config_file
from retrain.errors import ConfigError
from retrain.observe.callbacks import Callback, TrainingResult
from retrain.pipeline import train
from retrain.supervision.threads import DaemonPool
from retrain.trainer.nexrl.base import BaseTrainer
from retrain.trainer.nexrl.select import build_trainer
from retrain.trainer.nexrl.settings import as_section
from retrain.trainer.nexrl.trajectory import from_group
from retrain.types import Batch, Group, Metrics


@dataclass(frozen=True, slots=True)
class Recipe:
    """A trainer and the config of its run."""

    trainer: BaseTrainer
    config: RunConfig

    async def train(
        self,
        *,
        callbacks: Sequence[Callback] = (),
        resume: bool = False,
        console: bool = True,
    ) -> TrainingResult:
        """Train; see `pipeline.train`."""
        parts = replace(assemble(self.config), learner=TrainerLearner(self.trainer))
        return await train(
            self.config, callbacks=callbacks, resume=resume, parts=parts, console=console
        )


def load_recipe(config: str | Path | Mapping[str, Any]) -> Recipe:
    """The recipe in a YAML file or a mapping, checked; no model is loaded.

    Raises ConfigError with every problem.
    """
    if isinstance(config, Mapping):
        section = as_section(config)
    else:
        file = Path(config)
        mapping, _ = read_config_file(file)
        section = as_section({"name": file.stem, **mapping}, file.parent)
    if "prompts" not in section:
        raise ConfigError(
            "prompts: missing. A recipe needs `prompts`, `environment` and `rewards` next to "
            "`trainer:`, for example `prompts: {type: file, path: prompts.jsonl}`."
        )
    trainer = build_trainer(section)
    return Recipe(trainer, trainer.settings.run)


class TrainerLearner(Learner):
    """Updates by the trainer's `train`, in a thread, with the trajectories of the step."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer
        self._threads = DaemonPool(1, name="retrain-trainer")

    def attach(self, adapter: Adapter) -> None:
        self._trainer.service.attach(adapter, asyncio.get_running_loop())

    async def update(self, groups: Sequence[Group], batch: Batch) -> Metrics:
        trajectories = [one for group in groups for one in from_group(group)]
        return await self._threads.run(lambda: self._trainer.advance(trajectories))

    def restore(self, step: int, state: Mapping[str, Any]) -> None:
        self._trainer._train_step = step

    def close(self) -> None:
        self._threads.close()
        self._trainer.service.close()
