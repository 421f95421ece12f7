"""One model in training: accumulated gradients, AdamW steps, and its weights as tensors.

- Losses are the shared ones (engine.losses), summed over tokens. Gradients add up over calls until
  `optim_step` applies and clears them. A call that fails adds nothing.
- As in transformers' Trainer, weight decay skips biases and the gains of norms, so that a run means
  the same on TRL.
- Over several processes, every rank has a trainer of each model. On rank 0, a method first sends
  its call as an order, which `follow` carries out on the other ranks. Rows are shared out, and
  gradients are summed over ranks. All ranks succeed or fail together.

Everything here is synchronous and belongs to one thread.
"""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import partial
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from transformers import PreTrainedModel

from retrain.engine.ranks.group import ALONE, STOP, OutOfStepError, Ranks
from retrain.errors import RetrainError
from retrain.losses import settings
from retrain.protocols.training import AdamParams
from retrain.service.errors import ServiceError, invalid
from retrain.service.passes import (
    VOID,
    Part,
    Passed,
    Row,
    Share,
    joined,
    problem_of,
    run_micro_batch,
    share_out,
)
from retrain.service.trainable import ShardedBase, Trainable, Tuning, whole

LOGITS_AT_ONCE = {"cpu": 2**26, "cuda": 2**29}
"""Maximum size of a micro-batch's logits, by the kind of device. A pass takes about six times
their bytes; on a CPU, larger micro-batches are no faster."""
T = TypeVar("T")
_MOMENTS = ("exp_avg", "exp_avg_sq")
_numbers = itertools.count()
log = logging.getLogger(__name__)


class Trainer:
    """Trains a model made from `base`, whose own weights never change."""

    def __init__(
        self, base: PreTrainedModel | ShardedBase, tuning: Tuning, ranks: Ranks = ALONE
    ) -> None:
        """Raises ServiceError if the model has none of the layers of `tuning`."""
        self.tuning = tuning
        self.steps = 0
        self._ranks = ranks
        self._number = next(_numbers)
        self._lead("make", tuning)
        with self._together():
            self._part = self._made(base)
        self.model = self._part.model
        self._trained = self._part.trained
        self._spread = any(isinstance(p, DTensor) for p in self._trained.values())
        self._optimizer = self._fresh_optimizer()

    def forward(self, rows: Sequence[Row], loss: str, config: Mapping[str, Any]) -> Passed:
        """The same numbers as `forward_backward`, without gradients."""
        return self._pass(rows, loss, config, backward=False)

    def forward_backward(self, rows: Sequence[Row], loss: str, config: Mapping[str, Any]) -> Passed:
        """Add the gradient of the loss to the accumulated gradients.

        Raises ServiceError, and adds nothing, if the loss is NaN or infinite.
        """
        return self._pass(rows, loss, config, backward=True)

    def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradients; returns the norm before clipping.

        Raises ServiceError, and leaves the weights unchanged, if there is no gradient or its norm
        is NaN or infinite. In the latter case the gradients are cleared.
        """
        self._lead("optim_step", adam)
        with self._together():
            self._sum_gradients()
            gradients = [p.grad for p in self._trained.values() if p.grad is not None]
            if not gradients:
                raise invalid(
                    "there is no gradient to apply; call forward_backward before optim_step"
                )
            total = _whole(get_total_norm(gradients))
            norm = float(total)
            if not math.isfinite(norm):
                self._optimizer.zero_grad()
                raise invalid(f"gradient norm: got {norm}, expected a finite number; no step taken")
            limit = adam.grad_clip_norm or math.inf
            clip_grads_with_norm_(self._trained.values(), limit, total)
            for group in self._optimizer.param_groups:
                group.update(
                    lr=adam.learning_rate,
                    betas=(adam.beta1, adam.beta2),
                    eps=adam.eps,
                    weight_decay=adam.weight_decay if group["decayed"] else 0.0,
                )
            self._optimizer.step()
            self._optimizer.zero_grad()
            self.steps += 1
            return {"grad_norm": norm, "learning_rate": adam.learning_rate}

    def weights(self) -> dict[str, Tensor]:
        """A copy of the trained weights on the CPU; LoRA weights have PEFT's names."""
        if self._spread:
            self._lead("weights")
        with self._together():
            return self._copies(self._trained)

    def optimizer_state(self) -> dict[str, Any]:
        """A copy on the CPU: AdamW's state by the number of its parameter, and the step count."""
        if self._spread:
            self._lead("optimizer_state")
        with self._together():
            states = enumerate(self._optimizer.state.get(p) for p in self._parameters)
            found = {i: self._copies(state) for i, state in states if state}
        return {"state": found, "steps": self.steps}

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None) -> None:
        """Continue from a copy; without an optimizer state, AdamW starts anew.

        Raises ServiceError if the tensors don't fit this model.
        """
        state = {} if optimizer is None else optimizer["state"]
        _check_fit(self._trained, weights)
        for index, moments in state.items():
            parameter = self._parameters[index]
            if any(moments[name].shape != parameter.shape for name in _MOMENTS):
                raise invalid("the checkpoint's optimizer state does not fit this model")
        counts = {index: float(moments["step"]) for index, moments in state.items()}
        steps = int(optimizer["steps"]) if optimizer is not None else 0
        self._lead("receive", counts, steps)
        self.receive(counts, steps, weights, state)

    def close(self) -> None:
        """Free the memory on all ranks; no other call may follow."""
        self._lead("close")
        self._part.close()

    # On every rank

    def run_share(
        self, share: Share, loss: str, config: Mapping[str, Any], backward: bool
    ) -> list[Part]:
        """Compute this rank's rows; returns the parts of all ranks, or raises on all."""
        before = [p.grad.clone() if p.grad is not None else None for p in self._trained.values()]
        try:
            with self._together(), torch.set_grad_enabled(backward):
                return self._ranks.gather(self._computed(share, loss, config))
        except BaseException:
            for parameter, gradient in zip(self._trained.values(), before, strict=True):
                parameter.grad = gradient
            raise

    def receive(
        self,
        counts: Mapping[int, float],
        steps: int,
        weights: Mapping[str, Tensor] | None = None,
        state: Mapping[int, Mapping[str, Tensor]] | None = None,
    ) -> None:
        """Take over rank 0's `weights` and moments; `counts` are AdamW's steps by parameter."""
        with self._together(), torch.no_grad():
            for name, own in self._trained.items():
                own.copy_(self._spread_like(own, weights[name] if weights else None))
            self._optimizer = self._fresh_optimizer()
            parameters = self._parameters
            for index, count in counts.items():
                parameter = parameters[index]
                moments = {
                    name: self._spread_like(parameter, state[index][name] if state else None)
                    for name in _MOMENTS
                }
                self._optimizer.state[parameter] = {"step": torch.tensor(count), **moments}
            self.steps = steps

    def _pass(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, Any], *, backward: bool
    ) -> Passed:
        settings("ppo" if loss == "gspo" else loss, config)  # before the other ranks compute
        shares = share_out(rows, self._ranks.size, self._limit)
        self._lead("run_share", loss, config, backward, shares=shares)
        return joined(shares, self.run_share(shares[0], loss, config, backward))

    def _made(self, base: PreTrainedModel | ShardedBase) -> Trainable:
        found: list[Trainable] = []
        make = base.trainable if isinstance(base, ShardedBase) else partial(whole, base)
        self._agreed(lambda: found.append(make(self.tuning)))
        return found[0]

    def _agreed(self, compute: Callable[[], T]) -> list[T]:
        """What `compute` returns on each rank; if it failed on one, that error on all of them."""
        own: T | _Failure
        error: Exception | None = None
        try:
            own = compute()
        except OutOfStepError:
            raise
        except Exception as raised:
            if self._ranks.size == 1:
                raise
            own, error = _Failure.of(raised), raised
        found: list[T | _Failure] = self._ranks.gather(own)
        for one in found:
            if isinstance(one, _Failure):
                raise ServiceError(one.status, one.message) from error
        return cast(list[T], found)

    def _computed(self, share: Share, loss: str, config: Mapping[str, Any]) -> Part:
        """The ranks meet after every micro-batch: the call's deadline counts from there."""
        self._part.activate()
        logprobs: list[Any] = [None] * len(share.rows)
        total = tokens = 0.0
        for batch in share.batches:
            found = self._agreed(partial(self._micro_batch, share, batch, loss, config, logprobs))
            total += found[self._ranks.rank]
            tokens += sum(float(sum(share.rows[i].mask)) for i in batch)
        return Part(logprobs, total, tokens)

    def _micro_batch(
        self,
        share: Share,
        batch: Sequence[int],
        loss: str,
        config: Mapping[str, Any],
        logprobs: list[Any],
    ) -> float:
        """The loss of the rows `batch`, whose log-probs go to `logprobs`."""
        if not batch and not self._part.sharded:
            return 0.0
        rows = [share.rows[i] for i in batch] or [VOID]
        if not batch:
            loss, config = "cross_entropy", {}
        with self._in_step():
            value, found = run_micro_batch(self.model, self._part.device, rows, loss, config)
            problem = problem_of(loss, value, found)
            if torch.is_grad_enabled() and (problem is None or self._part.sharded):
                value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        if problem:
            raise problem
        numbers = found.detach().cpu().numpy()
        for index, values, row in zip(batch, numbers, rows, strict=False):
            logprobs[index] = values[: len(row.tokens), : row.width or 1].flatten()
        return float(value.detach())

    def _sum_gradients(self) -> None:
        """Over ranks, which hold the same parameters; FSDP2 has summed those of its shards."""
        if self._ranks.size == 1 or self._spread:
            return
        parameters = list(self._trained.values())
        there = torch.tensor([int(p.grad is not None) for p in parameters])
        dist.all_reduce(there, dist.ReduceOp.MAX)
        found = itertools.compress(parameters, there.tolist())
        works = []
        for parameter in found:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            works.append(dist.all_reduce(parameter.grad, async_op=True))
        for work in works:
            work.wait()

    def _copies(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """On rank 0; nothing on the others."""
        kept = {}
        for name, tensor in tensors.items():
            found = _whole(tensor.detach())
            if self._ranks.rank == 0:
                kept[name] = found.cpu().clone()
        return kept

    def _spread_like(self, parameter: Tensor, given: Tensor | None) -> Tensor:
        """Rank 0's `given` tensor, laid out over the ranks as `parameter` is."""
        tensor = torch.empty(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        if given is not None:
            tensor.copy_(given)
        if isinstance(parameter, DTensor):
            spread: Tensor = distribute_tensor(tensor, parameter.device_mesh, parameter.placements)
            return spread
        if self._ranks.size > 1:
            dist.broadcast(tensor, src=0)
        return tensor

    @property
    def _limit(self) -> int:
        """Tokens of a micro-batch."""
        return max(1, LOGITS_AT_ONCE[self._part.device.type] // self._part.vocabulary)

    @property
    def _parameters(self) -> list[Tensor]:
        """In the optimizer's order."""
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self._trained.values() if p.dim() > 1]
        others = [p for p in self._trained.values() if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": matrices, "decayed": True}, {"params": others, "decayed": False}]
        )

    def _lead(self, name: str, *args: Any, shares: Sequence[Any] | None = None) -> None:
        if self._ranks.rank == 0:
            with self._together():
                self._ranks.lead(name, self._number, *args, shares=shares)

    def _in_step(self) -> AbstractContextManager[None]:
        """A micro-batch, in which the other ranks wait for this one if the model is sharded."""
        return self._together() if self._part.sharded else nullcontext()

    @contextmanager
    def _together(self) -> Iterator[None]:
        """What all ranks do alike: an error on one of them leaves them out of step."""
        try:
            yield
        except RetrainError:
            raise
        except Exception as error:
            if self._ranks.size == 1:
                raise
            raise OutOfStepError(f"{type(error).__name__}: {error}") from error


class _Failure(NamedTuple):
    """An error on its way to the other ranks."""

    status: int
    message: str

    @classmethod
    def of(cls, error: Exception) -> _Failure:
        if isinstance(error, ServiceError):
            return cls(error.status, str(error))
        log.error("a request failed on this rank", exc_info=error)
        return cls(500, f"{type(error).__name__}: {error}")


def follow(base: PreTrainedModel | ShardedBase, ranks: Ranks) -> None:
    """Carry out rank 0's orders until it says stop.

    Raises OutOfStepError if this rank can't go on with the others.
    """
    trainers: dict[int, Trainer] = {}
    while (order := ranks.follow()).name != STOP:
        number, *args = order.args
        with suppress(ServiceError):  # rank 0 raises the same
            if order.name == "make":
                [tuning] = args
                trainers[number] = Trainer(base, tuning, ranks)
            elif order.name == "close":
                trainers.pop(number).close()
            elif order.name == "run_share":
                trainers[number].run_share(order.share, *args)
            else:
                getattr(trainers[number], order.name)(*args)


def _check_fit(trained: Mapping[str, Tensor], weights: Mapping[str, Tensor]) -> None:
    if {n: p.shape for n, p in trained.items()} != {n: w.shape for n, w in weights.items()}:
        raise invalid(
            "the LoRA rank or the trained layers of the checkpoint differ from this model's"
        )


def _whole(tensor: Tensor) -> Tensor:
    if isinstance(tensor, DTensor):
        whole_tensor: Tensor = tensor.full_tensor()
        return whole_tensor
    return tensor
