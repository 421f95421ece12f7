"""One model in training: accumulated gradients, AdamW steps, and its weights as tensors.

- Losses are the shared ones (engine.losses), summed over tokens. Gradients add up over calls until
  `optim_step` applies and clears them. A call that fails adds nothing.
- LoRA leaves the base weights unchanged, so that all models share them. Attention and MLP
  projections get their matrices by name, and with `unembed` so does the output layer. A tied output
  layer is untied first, since its delta would otherwise change the embedding. Without `unembed` a
  model of random weights can't learn which token to say: its output layer is noise.
- Rank 0 trains the full weights, in a copy.
- As in transformers' Trainer, weight decay skips biases and the gains of norms, so that a run means
  the same on TRL.

Everything here is synchronous and belongs to one thread.
"""

from __future__ import annotations

import copy
import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils import clip_grad_norm_
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from retrain.engine.lengths import of_like_length
from retrain.engine.losses import shared_loss, token_logprobs
from retrain.protocols.training import AdamParams
from retrain.service.errors import invalid

LORA_ALPHA = 32
"""The value of the hosted services, whose protocols have no field for alpha."""
LOGITS_AT_ONCE = 2**29
"""Maximum size of a micro-batch's logits (2 GiB in float32)."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """Which weights are trained."""

    rank: int = 32
    """Of the LoRA matrices; 0 trains the full weights."""
    attention: bool = True
    mlp: bool = True
    unembed: bool = True
    seed: int = 0
    """Of the initial LoRA matrices."""


class Row(NamedTuple):
    """A training sequence whose position t predicts `targets[t]`.

    Every field has length N. With K targets per token, all but `tokens` have N x K numbers, row by
    row.
    """

    tokens: Sequence[int]
    targets: Sequence[int]
    advantages: Sequence[float]
    logprobs: Sequence[float]
    mask: Sequence[float]
    in_ratio: Sequence[float] = ()
    """1 for the tokens that make up a sequence's ratio; only for gspo."""
    width: int | None = None
    """K; None is one target per token, in one dimension."""


@dataclass(frozen=True, slots=True)
class Passed:
    """The result of a forward pass."""

    logprobs: list[list[float]]
    """Of each row's targets, as many as it has."""
    loss: float
    tokens: float
    """Targets with mask 1."""


class Trainer:
    """Trains a model made from `base`, whose own weights never change."""

    def __init__(self, base: PreTrainedModel, tuning: Tuning) -> None:
        """Raises ServiceError if the model has none of the layers of `tuning`."""
        self.tuning = tuning
        self.steps = 0
        self.model: torch.nn.Module
        if tuning.rank:
            self.model = _with_lora(untied(base), tuning)
        else:
            self.model = copy.deepcopy(base).requires_grad_(True)
        self.model.eval()  # no dropout: the log-probs must equal the sampler's
        self._trained = {n: p for n, p in self.model.named_parameters() if p.requires_grad}
        self._optimizer = self._fresh_optimizer()
        self._device = base.device
        self._vocabulary = int(_embedding(base).weight.shape[0])

    def forward(self, rows: Sequence[Row], loss: str, config: Mapping[str, Any]) -> Passed:
        """The same numbers as `forward_backward`, without gradients."""
        with torch.no_grad():
            return self._passed(rows, loss, config)

    def forward_backward(self, rows: Sequence[Row], loss: str, config: Mapping[str, Any]) -> Passed:
        """Add the gradient of the loss to the accumulated gradients.

        Raises ServiceError, and adds nothing, if the loss is NaN or infinite.
        """
        before = [p.grad.clone() if p.grad is not None else None for p in self._trained.values()]
        try:
            return self._passed(rows, loss, config)
        except BaseException:
            for parameter, gradient in zip(self._trained.values(), before, strict=True):
                parameter.grad = gradient
            raise

    def optim_step(self, adam: AdamParams) -> dict[str, float]:
        """Apply and clear the accumulated gradients; returns the norm before clipping.

        Raises ServiceError, and leaves the weights unchanged, if there is no gradient or its norm
        is NaN or infinite. In the latter case the gradients are cleared.
        """
        if all(parameter.grad is None for parameter in self._trained.values()):
            raise invalid("there is no gradient to apply; call forward_backward before optim_step")
        limit = adam.grad_clip_norm or math.inf
        norm = float(clip_grad_norm_(self._trained.values(), limit))
        if not math.isfinite(norm):
            self._optimizer.zero_grad()
            raise invalid(f"gradient norm: got {norm}, expected a finite number; no step taken")
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
        return {
            name.replace(".default.", "."): parameter.detach().cpu().clone()
            for name, parameter in self._trained.items()
        }

    def optimizer_state(self) -> dict[str, Any]:
        """A copy of AdamW's moments and step counts on the CPU."""
        state = self._optimizer.state_dict()["state"]
        moments = {i: {k: v.cpu().clone() for k, v in one.items()} for i, one in state.items()}
        return {"state": moments, "steps": self.steps}

    def load(self, weights: Mapping[str, Tensor], optimizer: Mapping[str, Any] | None) -> None:
        """Continue from a copy; without an optimizer state, AdamW starts anew.

        Raises ServiceError if the tensors don't fit this model.
        """
        named = {name.replace(".default.", "."): p for name, p in self._trained.items()}
        if {n: p.shape for n, p in named.items()} != {n: w.shape for n, w in weights.items()}:
            raise invalid("the checkpoint has another rank or other trained layers than this model")
        with torch.no_grad():
            for name, parameter in named.items():
                parameter.copy_(weights[name])
        self._optimizer = self._fresh_optimizer()
        if optimizer is not None:
            groups = self._optimizer.state_dict()["param_groups"]
            state = copy.deepcopy(dict(optimizer["state"]))
            self._optimizer.load_state_dict({"state": state, "param_groups": groups})
        self.steps = int(optimizer["steps"]) if optimizer is not None else 0

    def _fresh_optimizer(self) -> torch.optim.AdamW:
        matrices = [p for p in self._trained.values() if p.dim() > 1]
        others = [p for p in self._trained.values() if p.dim() <= 1]
        return torch.optim.AdamW(
            [{"params": matrices, "decayed": True}, {"params": others, "decayed": False}]
        )

    def _passed(self, rows: Sequence[Row], loss: str, config: Mapping[str, Any]) -> Passed:
        logprobs: list[list[float]] = [[]] * len(rows)
        total = tokens = 0.0
        limit = max(1, LOGITS_AT_ONCE // self._vocabulary)
        for batch in of_like_length([len(row.tokens) for row in rows], limit):
            part, found = self._micro_batch([rows[i] for i in batch], loss, config)
            total, tokens = total + part, tokens + sum(sum(rows[i].mask) for i in batch)
            for index, values in zip(batch, found, strict=True):
                row = rows[index]
                own = values[: len(row.tokens), : row.width or 1]
                logprobs[index] = own.flatten().tolist()
        return Passed(logprobs, total, tokens)

    def _micro_batch(
        self, rows: Sequence[Row], loss: str, config: Mapping[str, Any]
    ) -> tuple[float, Tensor]:
        """The loss and the log-probs of the targets, (B, T, K)."""
        lengths = torch.tensor([len(row.tokens) for row in rows])
        attended = (torch.arange(int(lengths.max())) < lengths[:, None]).long().to(self._device)
        tokens = self._padded([(row.tokens, 1) for row in rows], torch.long)[..., 0]
        widths = [row.width or 1 for row in rows]
        _, targets, *credit = zip(*(row[:5] for row in rows), strict=True)
        labels = self._padded(list(zip(targets, widths, strict=True)), torch.long)
        advantages, old, mask = (
            self._padded(list(zip(values, widths, strict=True)), torch.float32) for values in credit
        )
        logits = self.model(input_ids=tokens, attention_mask=attended, use_cache=False).logits
        logprobs = _target_logprobs(logits, labels)
        if not torch.isfinite(logprobs).all():
            raise invalid("the model's log-probs are not finite: its weights have diverged")
        if loss == "gspo":
            in_ratio = self._padded([(row.in_ratio, 1) for row in rows], torch.float32)
            loss, old = "ppo", _sequence_old(logprobs.detach(), old, in_ratio)
        flat, *inputs = (tensor.flatten(1) for tensor in (logprobs, old, advantages, mask))
        value, _ = shared_loss(loss, config, flat, inputs[0], inputs[1], inputs[2])
        if not torch.isfinite(value):
            raise invalid(f"{loss} loss: got {value.item()}; check logprobs and advantages")
        if torch.is_grad_enabled():
            value.backward()  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return float(value.detach()), logprobs.detach()

    def _padded(self, rows: Sequence[tuple[Sequence[float], int]], dtype: torch.dtype) -> Tensor:
        """Rows of N x K numbers, each with its K, as (B, T, K); padding is 0."""
        widest = max(width for _, width in rows)
        tensors = [
            pad(torch.tensor(values, dtype=dtype).view(-1, width), (0, widest - width))
            for values, width in rows
        ]
        return pad_sequence(tensors, batch_first=True).to(self._device)


def _target_logprobs(logits: Tensor, targets: Tensor) -> Tensor:
    """log softmax(logits)[targets] in float32: (B, T, V) and (B, T, K) to (B, T, K)."""
    if targets.shape[-1] == 1:
        return token_logprobs(logits, targets[..., 0])[..., None]
    wide = logits.float()
    return wide.gather(-1, targets) - wide.logsumexp(-1, keepdim=True)


def _sequence_old(logprobs: Tensor, old: Tensor, in_ratio: Tensor) -> Tensor:
    """The `old` with which every token's ratio is its sequence's; (B, T, 1) each.

    GSPO-token (arXiv:2507.18071, section 4.3): a token's ratio has the value of the geometric mean
    of the ratios of its sequence's tokens, and the gradient of its own log-prob. It equals PPO with
    this `old`.
    """
    gaps = torch.where(in_ratio > 0, logprobs - old, 0.0)
    mean = gaps.sum(1, keepdim=True) / in_ratio.sum(1, keepdim=True)
    return logprobs - mean


def untied(base: PreTrainedModel) -> PreTrainedModel:
    """A copy that shares all weight tensors except that of a tied output layer."""
    shared = [*base.parameters(), *base.buffers()]
    model: PreTrainedModel = copy.deepcopy(base, {id(tensor): tensor for tensor in shared})
    head, embedding = _head(model), _embedding(model)
    if head is not None and head.weight is embedding.weight:
        head.weight = torch.nn.Parameter(head.weight.detach().clone())
    model.config.tie_word_embeddings = False
    return model


def merged_weights(
    model: PreTrainedModel, weights: Mapping[str, Tensor], rank: int
) -> dict[str, Tensor]:
    """The state of `model` (untied) with trained `weights`: W + alpha/rank B A for LoRA."""
    state = {name: tensor.detach() for name, tensor in model.state_dict().items()}
    if not rank:
        full = {name: tensor.to(model.device) for name, tensor in weights.items()}
        head, embedding = (_weight_name(model, one(model)) for one in (_head, _embedding))
        if head not in full:  # only the first name of tied weights was trained
            full[head] = full[embedding]
        return {**state, **full}
    for name, a in weights.items():
        if not name.endswith(".lora_A.weight"):
            continue
        b = weights[name.replace(".lora_A.", ".lora_B.")]
        plain = name.removeprefix("base_model.model.").replace(".lora_A.weight", ".weight")
        delta = (b.float() @ a.float()) * (LORA_ALPHA / rank)
        state[plain] = state[plain] + delta.to(state[plain])
    return state


def _with_lora(model: PreTrainedModel, tuning: Tuning) -> torch.nn.Module:
    from peft import LoraConfig, get_peft_model

    head = _head(model)
    targets = [
        name
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
        if (tuning.unembed if module is head else tuning.attention if "att" in name else tuning.mlp)
    ]
    if not targets:
        raise invalid("this model trains nothing; enable at least one kind of layer")
    # peft uses a name that transformers deprecates; it would fail where warnings are errors.
    warnings.filterwarnings("ignore", "`is_gradient_checkpointing`", FutureWarning)
    config = LoraConfig(r=tuning.rank, lora_alpha=LORA_ALPHA, target_modules=targets, bias="none")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(tuning.seed)
        adapted: torch.nn.Module = get_peft_model(model, config)
    return adapted


def _head(model: PreTrainedModel) -> Any:  # a Linear, or None; transformers leaves it untyped
    return model.get_output_embeddings()  # type: ignore[no-untyped-call]  # the same


def _embedding(model: PreTrainedModel) -> Any:  # an Embedding; transformers types it as any Module
    return model.get_input_embeddings()


def _weight_name(model: PreTrainedModel, module: Any) -> str:  # one of the two above
    return next(f"{name}.weight" for name, one in model.named_modules() if one is module)
