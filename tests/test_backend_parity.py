"""The same rows on the same weights: every backend trains what plain torch trains.

trl, and the local service by Tinker's and by Weaver's protocol, in fp32, for the losses of `CASES`.
Tinker's protocol has LoRA alone, so that there all four train the same matrices; with full weights
it's trl, Weaver and plain torch. All are held to 1e-4: the log-probs before, the loss, the
gradient's norm, the change of every weight, and the log-probs after, over two steps (in the first
one LoRA's B is 0, and so is the gradient of A).
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
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
from retrain.algorithms.batching import batch_of
from retrain.assembly import assemble
from retrain.engine.models import load_model
from retrain.engine.tiny import tiny_folder
from retrain.service.store import CheckpointStore
from retrain.types import Sample
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


CASES: dict[str, dict[str, Any]] = {
    "importance_sampling": {},
    "ppo": {},
    "reinforce": {},
    "tis": {"loss": "ppo", "mismatch": {"low": 0.9, "high": 1.2}},
    "mask": {"loss": "importance_sampling", "mismatch": {"type": "mask", "low": 0.8, "high": 1.3}},
    "sequence": {"loss": "grpo", "mismatch": {"level": "sequence", "low": 0.9, "high": 1.05}},
    "masked sequence": {
        "loss": "reinforce",
        "mismatch": {"type": "mask", "level": "sequence", "low": 0.9, "high": 1.05},
    },
}
"""What `algorithm` holds; without `loss` it's the name's."""


@dataclass(frozen=True)
class Outcome:
    """What two steps on one batch came to."""

    before: list[list[float]]
    losses: list[float]
    clipped: list[float | None]
    norms: list[float]
    moved: Weights
    after: list[list[float]]


def rows(count: int = 6) -> list[Sample]:
    """Of different lengths, their log-probs and advantages spread around a fresh model's.

    The last two are of one rollout.
    """
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
                run_id="forked" if row >= count - 2 else "",
            )
        )
    return made


def sections(backend: str, tuning: str, adam: Optimizer) -> dict[str, Any]:
    common = {
        "learning_rate": adam.learning_rate,
        "weight_decay": adam.weight_decay,
        "max_grad_norm": adam.max_grad_norm,
        **{"beta1": adam.beta1, "beta2": adam.beta2, "eps": adam.eps},
    }
    if backend == "trl":
        lora = {"lora": {"r": RANK, "alpha": ALPHA}} if tuning == "lora" else {}
        return {"type": "trl", **common, **lora, "device": "cpu"}
    lora = {"lora": {"rank": RANK, "train_unembed": False, "seed": 7}}  # TRL has none on lm_head
    full = {"training_mode": "full_ft"}
    return {"type": backend, **common, **(lora if tuning == "lora" else full)}


async def outcome(
    folder: Path, backend: str, tuning: str, adam: Optimizer, case: str, start: Weights | None
) -> Outcome:
    """Of a run of its own; trl's LoRA matrices are drawn otherwise, so they are set to `start`."""
    algorithm = {"type": "grpo", "loss": case, **CASES[case]}
    run = run_of(folder, sections(backend, tuning, adam), algorithm=algorithm, prompts=["a"],
                 rewards=["exact_match"])  # fmt: skip
    trained = batch_of(rows(), loss=algorithm["loss"], loss_config={})
    ids = [list(sample.token_ids) for sample in trained.samples]
    async with assemble(run).open_adapter() as adapter:
        if isinstance(adapter, TrlAdapter) and start is not None:
            put(adapter, start)
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
        [one.get("mismatch/clipped") for one in metrics],
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
        found = trained_parameters(adapter)
        return {name: parameter.detach().clone() for name, parameter in found.items()}
    await adapter.save(folder / "saved")
    store = CheckpointStore(folder / "service")
    newest = next(saved for saved in store.list() if saved.place.kind == "weights")
    return store.load(newest.place)[0]


def plain(start: Weights, adam: Optimizer, case: str) -> Outcome:
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
    losses, norms, clips = [], [], []
    for _ in range(STEPS):
        optimizer.zero_grad()
        value, clipped = batch_loss([logprobs(model, leaves, s) for s in samples], samples, case)
        clips.append(clipped)
        value.backward()
        limit = adam.max_grad_norm or float("inf")
        norms.append(float(torch.nn.utils.clip_grad_norm_(leaves.values(), limit)))
        losses.append(value.item())
        optimizer.step()
    moved = {name: leaf.detach() - start[name] for name, leaf in leaves.items()}
    after = [scored(model, leaves, sample) for sample in samples]
    return Outcome(
        [row.tolist() for row in before],
        losses,
        clips,
        norms,
        moved,
        [row.tolist() for row in after],
    )


def batch_loss(
    scored: Sequence[Tensor], samples: Sequence[Sample], case: str
) -> tuple[Tensor, float | None]:
    """The loss, and the share of tokens or sequences that mismatch clips."""
    loss, rule = CASES[case].get("loss", case), CASES[case].get("mismatch")
    kept = [torch.tensor(sample.loss_mask) > 0 for sample in samples]
    lps = [row[mask] for row, mask in zip(scored, kept, strict=True)]
    olds = [torch.tensor(s.logprobs)[mask] for s, mask in zip(samples, kept, strict=True)]
    credits = [torch.tensor(s.advantages)[mask] for s, mask in zip(samples, kept, strict=True)]
    runs = [sample.run_id or str(row) for row, sample in enumerate(samples)]
    clipped = None
    if rule is not None:
        low, high = rule["low"], rule["high"]
        ratios = [(lp.detach() - old).exp() for lp, old in zip(lps, olds, strict=True)]
        judged = torch.cat(ratios)
        if rule.get("level") == "sequence":
            means = {
                run: torch.cat([r.log() for r, its in zip(ratios, runs, strict=True) if its == run])
                .mean()
                .exp()
                for run in runs
            }
            judged = torch.stack(list(means.values()))
            ratios = [means[run] * torch.ones_like(lp) for run, lp in zip(runs, lps, strict=True)]
        clipped = float(((judged < low) | (judged > high)).float().mean())
        assert 0 < clipped < 1
        if rule.get("type") == "mask":
            weights = [torch.where((r >= low) & (r <= high), r, 0.0) for r in ratios]
        else:
            weights = [r.clamp(low, high) for r in ratios]
        credits = [a * w for a, w in zip(credits, weights, strict=True)]
        olds = [lp.detach() for lp in lps]
    total = torch.zeros(())
    for run, lp, old, a in zip(runs, lps, olds, credits, strict=True):
        ratio = (lp - old).exp()
        values = {
            "importance_sampling": -ratio * a,
            "ppo": -torch.minimum(ratio * a, ratio.clamp(0.8, 1.2) * a),
            "reinforce": -lp * a,
        }
        own = values.get(loss, values["ppo"]).sum()
        if loss == "grpo":  # the mean over rollouts of the mean over each one's tokens
            length = sum(len(row) for row, its in zip(lps, runs, strict=True) if its == run)
            own = own / length / len(set(runs))
        total = total + own
    return total, clipped


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
    for what in ("losses", "norms", "clipped"):
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


@pytest.mark.parametrize(
    ("tuning", "adam", "case"),
    [
        *(("lora", ADAM, "ppo"), ("lora", GRADIENT, "importance_sampling")),
        *(("full", ADAM, "importance_sampling"), ("full", GRADIENT, "ppo")),
        *(("lora", GRADIENT, case) for case in ("reinforce", "tis", "masked sequence")),
        *(("full", GRADIENT, case) for case in ("mask", "sequence")),
    ],
)
async def test_every_backend_trains_what_plain_torch_trains(tuning, adam, case, tmp_path):
    start = await start_of(tmp_path / "start", tuning)
    wanted = plain(start, adam, case)
    assert any(float(moved.abs().max()) > 10 * TOLERANCE for moved in wanted.moved.values())
    for backend in BACKENDS[tuning]:
        got = await outcome(tmp_path / backend, backend, tuning, adam, case, start)
        assert_equal(backend, got, wanted)
        assert_moved_alike(backend, got.moved, wanted.moved)


async def start_of(folder: Path, tuning: str) -> Weights:
    """The weights that a service's model starts with."""
    run = run_of(folder, sections("weaver", tuning, ADAM), prompts=["a"], rewards=["exact_match"])
    async with assemble(run).open_adapter() as adapter:
        return await weights_of(adapter, folder)
