"""A process of a run that trains in several: its groups, and the state of accelerate.

accelerate keeps one state per process, which it reads from the environment once, so it is reset
before and after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch.distributed as dist
from accelerate.state import AcceleratorState, GradientState

from retrain.adapters.trl.ranks.contract import Place, as_place
from retrain.adapters.trl.ranks.group import ALONE, STOP, OutOfStepError, Ranks, join
from retrain.errors import AdapterError


@contextmanager
def together(
    place: Place | None,
    store: Any = None,  # a torch Store
    *,
    cuda: bool,
    waiting: Callable[[], None] = lambda: None,
) -> Iterator[Ranks]:
    """Meet the ranks of the run; the leader orders them to stop at the end.

    `place` None is a run of one process; the other arguments are those of `join`.

    Raises AdapterError if another run of this process trains in several processes meanwhile.
    """
    if place is None:
        if dist.is_initialized():
            raise AdapterError(
                "another run of this process trains in several processes; start this one in its "
                "own process, or wait for the other one"
            )
        yield ALONE
        return
    with as_place(place):
        ranks = join(place, store, cuda=cuda, waiting=waiting)
        _forget_processes()
        in_step = True
        try:
            yield ranks
        except OutOfStepError:
            in_step = False  # the followers wait for something else than an order
            raise
        finally:
            with suppress(Exception):  # followers that are gone need no order
                if place.rank == 0 and in_step:
                    ranks.lead(STOP)
            ranks.leave()
            _forget_processes()


def _forget_processes() -> None:
    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
