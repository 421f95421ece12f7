"""One model in training: accumulated gradients, AdamW steps, and its weights as tensors.

- Losses are the shared ones (engine.losses), summed over tokens. Gradients add up over calls until
  `optim_step` applies and clears them. A call that fails adds nothing.
- As in transformers' Trainer, weight decay skips biases and the gains of norms, so that a run means
  the same on TRL.

Everything here is synchronous and belongs to one thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from retrain.engine.lengths import of_like_length
from retrain.service.errors import diverged, invalid
from retrain.service.passes import Passed, TargetRow, run_micro_batch, tokens_at_once
from retrain.service.tuning import BaseModel, Tuning
from retrain.wire.training import AdamParams

_MOMENTS = ("exp_avg", "exp_avg_sq")


class Trainer:
    """Trains a model made from `base`, whose own weights never change."""

    def __init__(self, base: BaseModel, tuning: Tuning) -> None:
        """Raises ServiceError if the model has none of the layers of `tuning`."""
        self.steps = 0
        self.model = base.tuned(tuning)
        self._device, self._tokens_at_once = base.device, tokens_at_once(base)
        self._trained = {  # LoRA matrices have PEFT's names
            name.replace(".default.", "."): parameter
            for name, parameter in self.model.named_parameters()
            if parameter.requires_grad
        }
        self._optimizer = self._fresh_optimizer()

    def forward(self, rows: Sequence[TargetRow], loss: str, config: Mapping[str, Any]) -> Passed:
        """The same numbers as `forward_backward`, without gradients."""
        with torch.no_grad():
            return self._pass(rows, loss, config)

    def forward_backward(
        self, rows: Sequence[TargetRow], loss: str, config: Mapping[str, Any]
    ) -> Passed:
        """Add the gradient of the loss to the accumulated gradients.

        Raises ServiceError, and adds nothing, if the loss is NaN or infinite.
        """
        with ExitStack() as undo, torch.enable_grad():
            for parameter in self._trained.values():
                before = None if parameter.grad is None else parameter.grad.clone()
                undo.callback(setattr, parameter, "grad", before)
            passed = self._pass(rows, loss, config)
            undo.pop_all()
            return passed

    def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradients; returns the norm before clipping.

        Raises ServiceError, and leaves the weights unchanged, if there is no gradient or its norm
        is NaN or infinite. In the latter case the gradients are cleared.
        """
        gradients = [p.grad for p in self._trained.values() if p.grad is not None]
        if not gradients:
            raise invalid("there is no gradient to apply; call forward_backward before optim_step")
        total = get_total_norm(gradients)
        norm = float(total)
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise invalid(f"gradient norm: got {norm}, expected a finite number; no step taken")
        clip_grads_with_norm_(self._trained.values(), adam.grad_clip_norm or math.inf, total)
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
        return _copies(self._trained)

    def optimizer_state(self) -> dict[str, Any]:
        """A copy on the CPU: AdamW's state by the number of its parameter, and the step count."""
        states = enumerate(self._optimizer.state.get(p) for p in self._parameters)
        return {"state": {i: _copies(state) for i, state in states if state}, "steps": self.steps}

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None) -> None:
        """Continue from a copy; without an optimizer state, AdamW starts anew.

        Raises ServiceError if the tensors don't fit this model.
        """
        state = {} if optimizer is None else optimizer["state"]
        self._check_fit(weights, state)
        with torch.no_grad():
            for name, own in self._trained.items():
                own.copy_(weights[name])
        self._optimizer = self._fresh_optimizer()
        for index, moments in state.items():
            parameter = self._parameters[index]
            self._optimizer.state[parameter] = {
                "step": moments["step"].clone(),
                **{name: moments[name].to(parameter, copy=True) for name in _MOMENTS},
            }
        self.steps = int(optimizer["steps"]) if optimizer is not None else 0

    def _pass(self, rows: Sequence[TargetRow], loss: str, config: Mapping[str, Any]) -> Passed:
        logprobs: list[list[float]] = [[]] * len(rows)
        total = tokens = 0.0
        for batch in of_like_length([len(row.tokens) for row in rows], self._tokens_at_once):
            together = [rows[i] for i in batch]
            value, found = run_micro_batch(self.model, self._device, together, loss, config)
            if not torch.isfinite(found).all():
                raise diverged()
            if not torch.isfinite(value):
                raise invalid(f"{loss} loss: got {value.item()}; check logprobs and advantages")
            if torch.is_grad_enabled():
                value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
            total += float(value.detach())
            for index, values, row in zip(batch, found.detach().cpu(), together, strict=True):
                logprobs[index] = values[: len(row.tokens), : row.width or 1].flatten().tolist()
                tokens += sum(row.mask)
        return Passed(logprobs, total, tokens)

    def _check_fit(self, weights: Mapping[str, Tensor], state: Mapping[int, Any]) -> None:
        shapes = {name: parameter.shape for name, parameter in self._trained.items()}
        if shapes != {name: tensor.shape for name, tensor in weights.items()}:
            raise invalid(
                "the LoRA rank or the trained layers of the checkpoint differ from this model's"
            )
        for index, moments in state.items():
            if any(moments[name].shape != self._parameters[index].shape for name in _MOMENTS):
                raise invalid("the checkpoint's optimizer state does not fit this model")

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


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().cpu().clone() for name, tensor in tensors.items()}
