"""Servers that do not sum over tokens: an average is undone, and everything else is refused."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from string import printable
from typing import Any

import pytest

from retrain.adapters.remote.adapter import RemoteAdapter
from retrain.adapters.remote.datums import SUM, Average, Shifted
from retrain.adapters.remote.options import RemoteOptions
from retrain.adapters.remote.probe import RATIO, average_of
from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.weaver.options import WeaverOptions
from retrain.assembly import assemble
from retrain.config import RunConfig, parse_config
from retrain.engine.models import load_model
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.errors import AdapterError
from retrain.losses import FLOATS, LOSSES, native_to, settings
from retrain.pipeline import train
from retrain.service.app import ServiceApp
from retrain.service.core import Service
from retrain.service.errors import ServiceError, invalid
from retrain.service.passes import TargetRow
from retrain.service.protocol import ServiceProtocol
from retrain.service.trainer import Trainer
from retrain.service.training_fields import TINKER_LOSSES
from retrain.service.tuning import BaseModel, Tuning
from retrain.types import Batch, Denominators, Sample
from retrain.wire.training import AdamParams
from tests.service_kit import on_a_port

Factor = Callable[[TargetRow, Sequence[TargetRow], str], float]
HONEST = Trainer.forward_backward


# The measurement by itself


UNFIT: dict[str, Callable[[Shifted, Sequence[Shifted], Sequence[Shifted]], float]] = {
    "divides a row by its weights": lambda row, part, step: 1 / max(sum(row.advantages), 1e-9),
    "averages over advantages that are not 0": lambda row, part, step: (
        1 / sum(map(bool, row.advantages))
    ),
    "divides by the largest weight of a request": lambda row, part, step: (
        1 / max(abs(a) for one in part for a in one.advantages)
    ),
    "averages over padded tokens": lambda row, part, step: (
        1 / len(part) / max(len(one.targets) for one in part)
    ),
    "keeps the last request only": lambda row, part, step: float(part[-1] is step[-1]),
    "trains nothing": lambda row, part, step: 0.0,
}


class Direct:
    """A server without a wire, which multiplies the weights of each row by a factor."""

    def __init__(self, rank: int, loss: str, factor: Any = None, noise: float = 0.0) -> None:
        base = BaseModel(load_model(str(tiny_folder()), "cpu").requires_grad_(False))
        self.trainer, self.loss, self.noise = Trainer(base, Tuning(rank=rank)), loss, noise
        self.factor = factor or (lambda row, part, step: 1.0)
        self.random = random.Random(0)
        self.updates = 0

    async def train(
        self, look: Shifted, rows: Sequence[Shifted], adam: AdamParams, apart: bool
    ) -> list[float]:
        parts = [[row] for row in rows] if apart else [list(rows)]
        for part in parts if rows else []:
            sent = [
                replace(row, advantages=[a * self.factor(row, part, rows) for a in row.advantages])
                for row in part
            ]
            self.trainer.forward_backward(self._rows(sent), self.loss, {})
        if rows:
            self.trainer.optim_step(adam)
            self.updates += 1
        [found] = self.trainer.forward(self._rows([look]), "cross_entropy", {}).logprobs
        return [lp + self.random.gauss(0, self.noise) for lp in found]

    def _rows(self, datums: Sequence[Shifted]) -> list[TargetRow]:
        return [
            TargetRow(d.inputs, d.targets, d.advantages, d.logprobs, [1.0] * len(d.targets))
            for d in datums
        ]


async def measured(server: Direct) -> Average:
    ratio = RATIO if server.loss != "cross_entropy" else 1.0
    unlikely = sorted(tiny_tokenizer().encode(printable), reverse=True)
    return await average_of(server.train, unlikely, ratio)


@pytest.mark.parametrize(
    ("loss", "rank", "noise"),
    [("ppo", 1, 0.0), ("importance_sampling", 0, 0.0), ("cispo", 8, 0.01)],
)
async def test_a_sum_is_found_to_be_one(loss: str, rank: int, noise: float) -> None:
    server = Direct(rank, loss, None, noise)
    assert await measured(server) == SUM
    assert noise or server.updates <= 12


@pytest.mark.parametrize(
    "average",
    [
        Average("tokens"),
        Average("", "rows", "step"),
        Average("tokens", "rows", "step"),  # skyrl-tx 0.3.0
        Average("", "tokens", "request"),
        Average("", "trained", "step"),
    ],
)
async def test_an_average_is_found_and_undone(average: Average) -> None:
    def factor(row: Shifted, part: Sequence[Shifted], step: Sequence[Shifted]) -> float:
        pool = list(step if average.of == "step" else part)
        plain = [replace(one, advantages=[1.0]) for one in pool]
        [place] = [i for i, one in enumerate(pool) if one is row]
        return 1 / average.undone([plain])[place].advantages[0]

    assert await measured(Direct(8, "importance_sampling", factor)) == average


@pytest.mark.parametrize("name", UNFIT)
async def test_nothing_else_is_taken_for_a_sum_or_an_average(name: str) -> None:
    with pytest.raises((AdapterError, ServiceError)):
        await measured(Direct(8, "cross_entropy", UNFIT[name]))


@pytest.mark.parametrize("fault", ["ignores log-probs", "ignores eps", "clips gradients"])
async def test_no_server_with_a_fault_is_taken_for_a_sum(fault: str) -> None:
    server = Direct(8, "ppo")
    honest, step = server.trainer.forward_backward, server.trainer.optim_step

    def forgetful(rows: Sequence[TargetRow], loss: str, config: Any) -> Any:
        now = server.trainer.forward(rows, "cross_entropy", {}).logprobs
        fresh = [row._replace(logprobs=list(own)) for row, own in zip(rows, now, strict=True)]
        return honest(fresh, loss, config)

    if fault == "ignores log-probs":
        server.trainer.forward_backward = forgetful  # type: ignore[method-assign]
    else:
        changed = {"eps": 1e-8} if fault == "ignores eps" else {"grad_clip_norm": 1e-3}
        server.trainer.optim_step = lambda adam: step(replace(adam, **changed))  # type: ignore[method-assign]
    with pytest.raises(AdapterError):
        await measured(server)


def row(tokens: int, trained: int) -> Shifted:
    mask = [0.0] * (tokens - trained) + [1.0] * trained
    return Shifted([0] * tokens, [0] * tokens, mask, [0.0] * tokens, [2.0 * kept for kept in mask])


@pytest.mark.parametrize(
    ("average", "factors"),
    [
        (SUM, [1, 1, 1]),
        (Average("tokens"), [3, 4, 8]),
        (Average("trained", "rows", "step"), [6, 3, 15]),
        (Average("", "tokens", "request"), [7, 7, 8]),
        (Average("", "trained", "step"), [8, 8, 8]),
    ],
)
def test_advantages_are_multiplied_by_what_the_server_divides_by(
    average: Average, factors: list[int]
) -> None:
    undone = average.undone([[row(3, 2), row(4, 1)], [row(8, 5)]])
    assert [one.advantages[-1] for one in undone] == [2.0 * factor for factor in factors]


# Over loopback


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    apps: list[ServiceApp] = []

    def keep(app: ServiceApp) -> ServiceApp:
        apps.append(app)
        return app

    with on_a_port(tmp_path_factory.mktemp("service"), keep) as url:
        yield url, apps[0].service


def run(folder: Path, backend: str, url: str, loss: str, **options: Any) -> RunConfig:
    return parse_config(
        {
            "model": "tiny",
            "prompts": [{"prompt": "a=", "answer": "ab"}],
            "rewards": ["slot_match"],
            "algorithm": {"type": "reinforce", "loss": loss},
            "backend": {"type": backend, "url": url, "lora": {"rank": 8}, **options},
            "sampling": {"max_tokens": 2},
            "train": {"total_train_steps": 1, "groups_per_step": 1, "no_signal": "keep"},
            "run_dir": str(folder),
        }
    )


def reweighed(factor: Factor) -> Callable[..., Any]:
    """The pass of a server that multiplies the weights of each row by a factor."""

    def forward_backward(self: Trainer, rows: Sequence[TargetRow], loss: str, config: Any) -> Any:
        changed = [
            row._replace(advantages=[a * factor(row, rows, loss) for a in row.advantages])
            for row in rows
        ]
        return HONEST(self, changed, loss, config)

    return forward_backward


def skyrl(row: TargetRow, rows: Sequence[TargetRow], loss: str) -> float:
    """skyrl-tx 0.3.0: each row by its weights, which are ones for the losses of rewards."""
    total = sum(row.advantages) if loss == "cross_entropy" else float(len(row.tokens))
    return 1 / max(total, 1e-9) / len(rows)


def weight_sums(row: TargetRow, rows: Sequence[TargetRow], loss: str) -> float:
    return 1 / max(sum(row.advantages), 1e-9)


PAIRS = pytest.mark.parametrize(
    ("backend", "loss"), [("tinker", "importance_sampling"), ("weaver", "dro")]
)


async def place(config: RunConfig, service: Service) -> tuple[bool, Average]:
    async with assemble(config).open_adapter() as adapter:
        assert isinstance(adapter, RemoteAdapter)
        assert len(service.models) == 1, "the throw-away models are gone"
        [found] = adapter._places.values()
    return found


@PAIRS
async def test_our_own_service_sums(
    backend: str, loss: str, server: tuple[str, Service], tmp_path: Path
) -> None:
    url, service = server
    found = await place(run(tmp_path, backend, url, loss), service)
    assert found == (loss == "importance_sampling", SUM)


@PAIRS
async def test_a_server_that_averages_takes_the_step_of_one_that_sums(
    backend: str,
    loss: str,
    server: tuple[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = Batch([sampled(4, 1.0), sampled(9, -2.0)], loss, {}, Denominators(3, 1))
    after = []
    for name, passing in {
        "sum": HONEST,
        "average": reweighed(lambda row, rows, loss: 1 / len(row.tokens) / len(rows)),
    }.items():
        monkeypatch.setattr(Trainer, "forward_backward", passing)
        # With a large eps, the size of gradients counts too.
        config = run(tmp_path / name, backend, server[0], loss, eps=1.0, learning_rate=0.5)
        async with assemble(config).open_adapter() as adapter:
            await adapter.update(batch)
            await adapter.publish()
            after.append(await adapter.logprobs([one.token_ids for one in batch.samples]))
    for honest, averaging in zip(*after, strict=True):
        assert averaging == pytest.approx(honest, abs=1e-4)


@pytest.mark.parametrize(
    ("backend", "factor"), [("tinker", weight_sums), ("weaver", lambda row, rows, loss: 0.0)]
)
async def test_a_run_on_a_server_that_trains_something_else_is_refused(
    backend: str,
    factor: Factor,
    server: tuple[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trainer, "forward_backward", reweighed(factor))
    with pytest.raises(AdapterError, match=r"backend\.assume_sum"):
        await train(run(tmp_path, backend, server[0], "importance_sampling"))


async def test_only_the_wrong_way_of_a_half_right_server_is_refused(
    server: tuple[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, service = server
    own = reweighed(lambda *given: 1.0 if given[2] == "cross_entropy" else weight_sums(*given))
    monkeypatch.setattr(Trainer, "forward_backward", own)
    found = await place(run(tmp_path / "1", "tinker", url, "importance_sampling"), service)
    assert found == (False, SUM), "it is computed here"
    assert "importance_sampling" in caplog.text
    monkeypatch.setattr(Trainer, "forward_backward", reweighed(skyrl))
    found = await place(run(tmp_path / "2", "tinker", url, "importance_sampling"), service)
    assert found == (True, Average("tokens", "rows", "request"))
    with pytest.raises(AdapterError, match=r"backend\.assume_sum"):
        await place(run(tmp_path / "3", "tinker", url, "dro"), service)


async def test_a_server_that_lacks_a_loss_trains_it_through_its_gradient(
    server: tuple[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delitem(TINKER_LOSSES, "cispo")  # type: ignore[arg-type]  # a dict
    result = await train(run(tmp_path / "a", "tinker", server[0], "cispo"))
    assert len(result.history) == 1
    assert "cispo is computed here" in caplog.text
    trusting = run(tmp_path / "b", "tinker", server[0], "cispo", assume_sum=True)
    async with assemble(trusting).open_adapter() as adapter:
        with pytest.raises(AdapterError, match=r"cispo.*backend\.native_losses"):
            await adapter.update(Batch([flat(-2.0)], "cispo", {}, Denominators(3, 1)))


@pytest.mark.parametrize("backend", ["tinker", "weaver"])
async def test_without_a_second_model_nothing_can_be_measured(
    backend: str, server: tuple[str, Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = ServiceProtocol.create_model

    def one(self: ServiceProtocol, call: Any, session: Any, *rest: Any) -> Any:
        if any(model.session is session for model in server[1].models.values()):
            raise invalid("one model per session")
        return create(self, call, session, *rest)

    monkeypatch.setattr(ServiceProtocol, "create_model", one)
    with pytest.raises(AdapterError, match=r"session.*assume_sum"):
        await train(run(tmp_path / "1", backend, server[0], "importance_sampling"))
    await train(run(tmp_path / "2", backend, server[0], "dro", assume_sum=True))


@pytest.mark.parametrize("backend", [TinkerOptions, WeaverOptions])
def test_the_vendors_own_service_is_never_measured(backend: type[RemoteOptions]) -> None:
    vendor = backend.vendor.url
    for url in ("local", "hosted", vendor, f"{vendor}/v2"):
        assert backend(url=url).sums
    other = backend(url="https://example.org")
    assert not other.sums
    assert other.model_copy(update={"assume_sum": True}).sums


@pytest.mark.parametrize("backend", ["tinker", "weaver"])
async def test_a_cancelled_measurement_leaves_no_model(
    backend: str, server: tuple[str, Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, service = server
    began = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("retrain.adapters.remote.probe.average_of", hang)
    terminated: list[str] = []
    drop = Service.drop_model
    monkeypatch.setattr(
        Service, "drop_model", lambda self, model: (terminated.append(model.id), drop(self, model))
    )
    opening = asyncio.create_task(place(run(tmp_path, backend, url, "dro"), service))
    await began.wait()
    assert len(service.models) == 2
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert not service.models
    assert len(terminated) >= 2


# Zeros in the place of a mask


@pytest.mark.parametrize("service", ["tinker", "weaver"])
def test_no_native_loss_has_a_term_that_is_left_without_advantages(service: str) -> None:
    for name in native_to(service):
        formula = LOSSES[name].formula
        assert formula is not None
        for lp, old in [(-1.0, -1.0), (-1.0, -3.0), (-3.0, -1.0), (-2.0, 0.0)]:
            ratio = math.exp(lp - old)
            value, slope, _ = formula(FLOATS, settings(name, {}), lp, old, ratio, 0.0)
            assert value == slope == 0, name


def sampled(length: int, advantage: float) -> Sample:
    mask = [0, *[1] * (length - 1)]
    return Sample(
        list(range(70, 70 + length)),
        mask,
        [-4.6 * kept for kept in mask],
        [advantage * kept for kept in mask],
        [kept - 1 for kept in mask],
    )


def flat(old: float) -> Sample:
    """Four tokens of prompt, and three sampled ones without credit."""
    mask = [0, 0, 0, 0, 1, 1, 1]
    return Sample(
        [70, 71, 72, 73, 74, 75, 76],
        mask,
        [old * kept for kept in mask],
        [0.0] * 7,
        [kept - 1 for kept in mask],
    )
