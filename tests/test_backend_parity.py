"""The same rows on the same weights: every backend trains what plain torch trains.

trl in its importance_sampling (and ppo) form, and the local service by Tinker's and by Weaver's
protocol, in fp32. Tinker's protocol has LoRA alone, so that there all four train the same matrices;
with full weights it's trl, Weaver and plain torch. All are held to 1e-4: the log-probs before, the
loss, the gradient's norm, the change of every weight, and the log-probs after, over two steps (in
the first one LoRA's B is 0, and so is the gradient of A).
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import log_softmax

from retrain.adapters.base import Adapter
from retrain.adapters.trl.adapter import TrlAdapter
from retrain.assembly import assemble
from retrain.engine.models import load_model
from retrain.engine.tiny import tiny_folder
from retrain.service.store import Store
from retrain.types import Batch, Denominators, Sample
from tests.backends_kit import run_of

RANK, ALPHA = 4, 32  # the services have no alpha on the wire; this is theirs
STEPS = 2
TOLERANCE = 1e-4
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class Optimizer:
    learning_rate: float
    eps: float
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    beta1: float = 0.8
    beta2: float = 0.97


ADAM = Optimizer(3e-3, 1e-8, weight_decay=0.1, max_grad_norm=0.5)
GRADIENT = Optimizer(0.1, 1.0)
"""With so large an eps a weight moves by about 0.1 x its gradient: what differs would show."""


@dataclass(frozen=True)
class Outcome:
    """What two steps on one batch came to."""

    before: list[list[float]]
    losses: list[float]
    norms: list[float]
    moved: Weights
    after: list[list[float]]


def rows(count: int = 6) -> list[Sample]:
    """Of different lengths, their log-probs and advantages spread around a fresh model's."""
    rng = random.Random(3)
    made = []
    for row in range(count):
        length = 4 + 3 * row
        mask = [0, 0, *(int(rng.random() > 0.25) for _ in range(length - 3)), 1]
        made.append(
            Sample(
                token_ids=[rng.randrange(7, 100) for _ in mask],
                loss_mask=mask,
                logprobs=[rng.gauss(-4.6, 0.3) * on for on in mask],
                advantages=[rng.gauss(0.0, 0.3) * on for on in mask],
                versions=[0 if on else -1 for on in mask],
                group_id=f"0.{row // 2}.0",
            )
        )
    return made


def batch(loss: str) -> Batch:
    samples = rows()
    counts = [sum(sample.loss_mask) for sample in samples]
    return Batch(samples, loss, {}, Denominators(sum(counts), len(counts)))


def sections(backend: str, tuning: str, adam: Optimizer) -> dict[str, Any]:
    common = {
        "learning_rate": adam.learning_rate,
        "weight_decay": adam.weight_decay,
        "max_grad_norm": adam.max_grad_norm,
    }
    if backend == "trl":
        betas = {"adam_beta1": adam.beta1, "adam_beta2": adam.beta2, "adam_epsilon": adam.eps}
        lora = {"lora": {"r": RANK, "alpha": ALPHA}} if tuning == "lora" else {}
        return {"type": "trl", **common, **lora, "device": "cpu", "args": betas}
    betas = {"beta1": adam.beta1, "beta2": adam.beta2, "eps": adam.eps}
    lora = {"lora": {"rank": RANK, "train_unembed": False, "seed": 7}}  # TRL has none on lm_head
    full = {"training_mode": "full_ft"}
    return {"type": backend, **common, **betas, **(lora if tuning == "lora" else full)}


async def outcome(
    folder: Path, backend: str, tuning: str, adam: Optimizer, loss: str, start: Weights | None
) -> Outcome:
    """Of a run of its own; trl's LoRA matrices are drawn otherwise, so they are set to `start`."""
    algorithm = {"type": "grpo", "loss": loss}
    run = run_of(folder, sections(backend, tuning, adam), algorithm=algorithm, prompts=["a"],
                 rewards=["exact_match"])  # fmt: skip
    trained = batch(loss)
    ids = [list(sample.token_ids) for sample in trained.samples]
    async with assemble(run).open_adapter() as adapter:
        if isinstance(adapter, TrlAdapter) and start is not None:
            await adapter._in_thread(lambda: put(adapter, start))
            await adapter.publish()
        first = await weights_of(adapter, folder)
        before = await adapter.logprobs(ids)
        metrics = [await adapter.update(trained) for _ in range(STEPS)]
        await adapter.publish()
        last = await weights_of(adapter, folder)
        after = await adapter.logprobs(ids)
    return Outcome(
        before,
        [one["loss"] for one in metrics],
        [one["grad_norm"] for one in metrics],
        {name: last[name] - first[name] for name in first},
        after,
    )


def trained_parameters(adapter: TrlAdapter) -> Weights:
    named = adapter._thread.trainer.model.named_parameters()
    return {n.replace(".default.", "."): p for n, p in named if p.requires_grad}


def put(adapter: TrlAdapter, start: Weights) -> None:
    parameters = trained_parameters(adapter)
    assert parameters.keys() == start.keys()
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(start[name])


async def weights_of(adapter: Adapter, folder: Path) -> Weights:
    """What is trained, by its name in the model; a service's is read from its checkpoint."""
    if isinstance(adapter, TrlAdapter):
        found: Weights = await adapter._in_thread(lambda: trained_parameters(adapter))
        return {name: parameter.detach().clone() for name, parameter in found.items()}
    await adapter.save(folder / "saved")
    store = Store(folder / "service")
    newest = next(saved for saved in store.list() if saved.place.kind == "weights")
    return store.weights(newest.place)


def plain(start: Weights, adam: Optimizer, loss: str) -> Outcome:
    """The same in plain torch, row by row, the formulas written out."""
    model = load_model(tiny_folder()).requires_grad_(False)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in start.items()}
    matrices = [leaf for leaf in leaves.values() if leaf.dim() > 1]
    gains = [leaf for leaf in leaves.values() if leaf.dim() == 1]  # of norms: they don't decay
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": gains, "weight_decay": 0.0}],
        lr=adam.learning_rate,
        betas=(adam.beta1, adam.beta2),
        eps=adam.eps,
        weight_decay=adam.weight_decay,
    )
    samples = rows()
    before = [scored(model, leaves, sample) for sample in samples]
    losses, norms = [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value = torch.stack([row_loss(model, leaves, sample, loss) for sample in samples]).sum()
        value.backward()
        limit = adam.max_grad_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(leaves.values(), limit)))
        losses.append(value.item())
        optimizer.step()
    moved = {name: leaf.detach() - start[name] for name, leaf in leaves.items()}
    after = [scored(model, leaves, sample) for sample in samples]
    return Outcome(
        [row.tolist() for row in before], losses, norms, moved, [row.tolist() for row in after]
    )


def row_loss(model: torch.nn.Module, leaves: Weights, sample: Sample, loss: str) -> Tensor:
    old, advantages, mask = (
        torch.tensor(stream) for stream in (sample.logprobs, sample.advantages, sample.loss_mask)
    )
    ratio = (logprobs(model, leaves, sample) - old).exp()
    value = -ratio * advantages
    if loss == "ppo":
        value = -torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    return (value * mask)[mask > 0].sum()


def logprobs(model: torch.nn.Module, leaves: Weights, sample: Sample) -> Tensor:
    """Of each token given those before it; 0 for the first."""
    ids = torch.tensor([sample.token_ids])
    logits = functional_call(model, merged(model, leaves), (), {"input_ids": ids}).logits[0]
    scores = log_softmax(logits[:-1], -1).gather(1, ids[0, 1:, None])[:, 0]
    return torch.cat([torch.zeros(1), scores])


def scored(model: torch.nn.Module, leaves: Weights, sample: Sample) -> Tensor:
    return logprobs(model, leaves, sample).detach()


def merged(model: torch.nn.Module, leaves: Weights) -> Weights:
    """The model's weights with the trained ones in place: W + alpha / rank B A where it's LoRA."""
    state = dict(model.named_parameters())
    for name, leaf in leaves.items():
        if name.endswith(".lora_A.weight"):
            delta = leaves[name.replace("lora_A", "lora_B")] @ leaf * (ALPHA / RANK)
            own = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
            state[own] = state[own] + delta
        elif ".lora_B." not in name:
            state[name] = leaf
    return state


def assert_equal(name: str, got: Outcome, wanted: Outcome) -> None:
    for what in ("losses", "norms"):
        assert getattr(got, what) == pytest.approx(getattr(wanted, what), abs=TOLERANCE), (
            f"{name}: {what}"
        )
    for what in ("before", "after"):
        for one, other in zip(getattr(got, what), getattr(wanted, what), strict=True):
            assert one == pytest.approx(other, abs=TOLERANCE), f"{name}: log-probs {what}"
    assert got.moved.keys() == wanted.moved.keys()


def assert_moved_alike(name: str, got: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    for weight, tensor in wanted.items():
        gap = float((got[weight] - tensor).abs().max())
        assert gap < TOLERANCE, f"{name}: {weight} moved by {gap} too much or too little"


BACKENDS = {"lora": ("tinker", "weaver", "trl"), "full": ("weaver", "trl")}


@pytest.mark.parametrize("loss", ["importance_sampling", "ppo"])
@pytest.mark.parametrize("adam", [ADAM, GRADIENT], ids=["adam", "gradient"])
@pytest.mark.parametrize("tuning", BACKENDS)
async def test_every_backend_trains_what_plain_torch_trains(tuning, adam, loss, tmp_path):
    start = await start_of(tmp_path / "start", tuning)
    wanted = plain(start, adam, loss)
    assert any(float(moved.abs().max()) > 10 * TOLERANCE for moved in wanted.moved.values())
    for backend in BACKENDS[tuning]:
        got = await outcome(tmp_path / backend, backend, tuning, adam, loss, start)
        assert_equal(backend, got, wanted)
        assert_moved_alike(backend, got.moved, wanted.moved)


async def start_of(folder: Path, tuning: str) -> Weights:
    """The weights that a service's model starts with."""
    run = run_of(folder, sections("weaver", tuning, ADAM), prompts=["a"], rewards=["exact_match"])
    async with assemble(run).open_adapter() as adapter:
        return await weights_of(adapter, folder)
