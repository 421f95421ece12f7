"""A follower: a process that trains with rank 0, does what it orders, and nothing else."""

from __future__ import annotations

import tempfile
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from retrain.adapters.trl.build import build_trainer, hush, place_model
from retrain.adapters.trl.options import TrlOptions
from retrain.adapters.trl.plan import run_plan
from retrain.adapters.trl.ranks.contract import Place
from retrain.adapters.trl.ranks.group import STOP, Order, OutOfStepError, Ranks, lost_peer
from retrain.adapters.trl.shares import Share
from retrain.adapters.trl.together import together
from retrain.adapters.trl.worker import CALL, STEP, TRAIN, CutBatch, Stopped
from retrain.config import RunConfig
from retrain.engine.models import load_tokenizer, resolve_model
from retrain.errors import AdapterError, RetrainError
from retrain.types import Metrics


def follow(place: Place, work: tuple[TrlOptions, RunConfig]) -> None:
    """Train with rank 0 until it orders to stop, or is gone.

    An error that all ranks raise is rank 0's to report. Raises AdapterError if rank 0 is gone.
    """
    options, config = work
    hush()
    placement = place_model(options, place)
    with (
        tempfile.TemporaryDirectory(prefix="retrain-rank-") as scratch,
        together(place, cuda=placement.device.type == "cuda") as ranks,
    ):
        follower = Follower(ranks)
        with suppress(Stopped):
            try:
                follower.train(options, config, Path(scratch))
            except OutOfStepError:
                raise
            except RetrainError:
                follower.wait_for(STOP)
            except Exception as error:
                if not lost_peer(error):
                    raise
                raise AdapterError(
                    f"rank {place.rank} of {place.size}: another rank has ended: {error}"
                ) from error


class Follower:
    """The feed of a trainer whose batches come from rank 0."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._trainer: Any = None  # a PipeTrainer; mypy sees no TRL types

    def train(self, options: TrlOptions, config: RunConfig, scratch: Path) -> None:
        """Build the trainer and obey; raises Stopped at the order to stop."""
        folder = resolve_model(config.model, config.base_dir)
        self._trainer = self._ranks.together(
            lambda: build_trainer(
                options,
                config,
                run_plan(config),
                folder=folder,
                tokenizer=load_tokenizer(folder),
                scratch=scratch,
                feed=self,
                ranks=self._ranks,
            )
        )
        checkpoint = self.wait_for(TRAIN).args[0]
        self._trainer.train(resume_from_checkpoint=checkpoint)
        self.wait_for(STOP)

    def next_share(self, cut: CutBatch) -> Share:
        share: Share = self.wait_for(STEP).share
        return share

    def check_stop(self) -> None:
        """Does nothing: rank 0 decides."""

    def finish_step(self, metrics: Metrics) -> None:
        """Does nothing: rank 0 reports."""

    def wait_for(self, name: str) -> Order:
        """Do what is ordered until the order is `name`; raises Stopped at the order to stop."""
        while True:
            order = self._ranks.follow()
            if order.name == STOP:
                raise Stopped
            if order.name == name:
                return order
            if order.name == CALL:
                method, *args = order.args
                try:
                    self._ranks.together(partial(getattr(self._trainer, method), *args))
                except OutOfStepError:
                    raise
                except RetrainError:
                    pass  # rank 0 reports it
