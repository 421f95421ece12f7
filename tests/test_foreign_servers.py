"""Servers that train something else than a sum over tokens: each is refused, or right."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from retrain.adapters.remote.adapter import RemoteAdapter
from retrain.adapters.remote.datums import Datum
from retrain.adapters.remote.measure import UnfitError, check_sum
from retrain.adapters.remote.places import unlikely_text
from retrain.assembly import assemble
from retrain.config import RunConfig, parse_config
from retrain.engine.models import load_model
from retrain.engine.tiny import tiny_folder, tiny_tokenizer
from retrain.errors import AdapterError
from retrain.losses import FLOATS, LOSSES, native_to, settings
from retrain.pipeline import train
from retrain.protocols.training import AdamParams
from retrain.service import bodies
from retrain.service.app import ServiceApp
from retrain.service.bodies import TINKER_LOSSES
from retrain.service.core import Service
from retrain.service.errors import invalid
from retrain.service.protocol import Protocol
from retrain.service.trainable import Tuning
from retrain.service.trainer import Row, Trainer
from retrain.types import Batch, Denominators, Sample
from tests.backends_kit import FULL, LORA, run_of
from tests.service_kit import on_a_port

Factor = Callable[[Row, Sequence[Row], str], float]
HONEST = Trainer.forward_backward


def weights_of(row: Row, rows: Sequence[Row], loss: str) -> float:
    """skyrl-tx 0.3.0: each row by its weights, which are ones for the losses of rewards."""
    total = sum(row.advantages) if loss == "cross_entropy" else float(len(row.tokens))
    return 1 / max(total, 1e-9) / len(rows)


FOREIGN: dict[str, Factor] = {
    "row weights": lambda row, rows, loss: 1 / max(sum(row.advantages), 1e-9),
    "clamped row weights": lambda row, rows, loss: 1 / max(sum(row.advantages), 1.0),
    "skyrl": weights_of,
    "row tokens": lambda row, rows, loss: 1 / len(row.tokens),
    "rows": lambda row, rows, loss: 1 / len(rows),
    "tokens": lambda row, rows, loss: 1 / sum(len(one.tokens) for one in rows),
    "trained tokens": lambda row, rows, loss: (
        1 / max(1, sum(bool(a) for one in rows for a in one.advantages))
    ),
    "trained tokens of a row": lambda row, rows, loss: 1 / max(1, sum(map(bool, row.advantages))),
    "size of weights": lambda row, rows, loss: 1 / max(sum(map(abs, row.advantages)), 1e-9),
    "all weights": lambda row, rows, loss: 1 / max(sum(sum(r.advantages) for r in rows), 1e-9),
    "size of weights of a request": lambda row, rows, loss: (
        1 / max(abs(a) for one in rows for a in one.advantages)
    ),
    "nothing": lambda row, rows, loss: 0.0,
}


def reweighed(factor: Factor) -> Callable[..., Any]:
    """The pass of a server that multiplies the weights of each row by a factor."""

    def forward_backward(self: Trainer, rows: Sequence[Row], loss: str, config: Any) -> Any:
        changed = [
            row._replace(advantages=[a * factor(row, rows, loss) for a in row.advantages])
            for row in rows
        ]
        return HONEST(self, changed, loss, config)

    return forward_backward


def forgets_requests(self: Trainer, rows: Sequence[Row], loss: str, config: Any) -> Any:
    """The pass of a server that keeps the gradients of a step's last request only."""
    self._optimizer.zero_grad()
    return HONEST(self, rows, loss, config)


def forgets_log_probs(self: Trainer, rows: Sequence[Row], loss: str, config: Any) -> Any:
    """The pass of a server that takes its own log-probs for the sampler's."""
    now = self.forward(rows, "cross_entropy", {}).logprobs
    fresh = [row._replace(logprobs=list(own)) for row, own in zip(rows, now, strict=True)]
    return HONEST(self, fresh, loss, config)


# The measurement by itself


class Direct:
    """A trainee without a wire."""

    def __init__(self, rank: int, loss: str, noise: float = 0.0, seed: int = 0) -> None:
        base = load_model(str(tiny_folder()), "cpu").requires_grad_(False)
        self.trainer, self.loss, self.noise = Trainer(base, Tuning(rank=rank)), loss, noise
        self.random = random.Random(seed)

    async def forward(self, datums: Sequence[Datum]) -> list[list[float]]:
        found = self.trainer.forward(self._rows(datums), "cross_entropy", {}).logprobs
        return [[lp + self.random.gauss(0, self.noise) for lp in row] for row in found]

    async def step(self, datums: Sequence[Datum], adam: AdamParams, *, apart: bool = False) -> None:
        rows = self._rows(datums)
        for request in [[row] for row in rows] if apart else [rows]:
            self.trainer.forward_backward(request, self.loss, {})
        self.trainer.optim_step(adam)

    def _rows(self, datums: Sequence[Datum]) -> list[Row]:
        return [
            Row(d.inputs, d.targets, d.advantages, d.logprobs, [1.0] * len(d.targets))
            for d in datums
        ]


@pytest.mark.parametrize(
    ("loss", "rank", "noise"),
    [
        ("ppo", 1, 0.0),
        ("importance_sampling", 32, 0.0),
        ("ppo", 0, 0.0),
        ("cispo", 8, 0.01),
    ],
)
async def test_a_sum_is_found_to_be_one(loss: str, rank: int, noise: float) -> None:
    await check_sum(Direct(rank, loss, noise), unlikely_text(tiny_tokenizer()), ratio=True)


@pytest.mark.parametrize("seed", [4, 8, 14])
async def test_no_noise_is_taken_for_an_average(seed: int) -> None:
    tokens = unlikely_text(tiny_tokenizer())
    random.Random(seed).shuffle(tokens)
    measuring = check_sum(Direct(8, "ppo", 0.05, seed), tokens, ratio=True)
    [found] = await asyncio.gather(measuring, return_exceptions=True)
    assert not isinstance(found, UnfitError), "at most it is too imprecise"


@pytest.mark.parametrize("name", FOREIGN)
async def test_no_average_is_taken_for_a_sum(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Trainer, "forward_backward", reweighed(FOREIGN[name]))
    with pytest.raises(UnfitError):
        await check_sum(Direct(8, "cross_entropy"), unlikely_text(tiny_tokenizer()))


@pytest.mark.parametrize(
    ("passing", "message"),
    [
        (forgets_requests, "probably does not add up the gradients of several requests"),
        (forgets_log_probs, "probably ignores the sampler's log-probs"),
    ],
)
async def test_no_forgetful_server_is_taken_for_a_sum(
    passing: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Trainer, "forward_backward", passing)
    with pytest.raises(UnfitError, match=message):
        await check_sum(Direct(8, "ppo"), unlikely_text(tiny_tokenizer()), ratio=True)


async def test_log_probs_that_are_too_noisy_measure_nothing() -> None:
    with pytest.raises(AdapterError, match="too imprecise") as raised:
        await check_sum(Direct(8, "ppo", 3.0), unlikely_text(tiny_tokenizer()))
    assert not isinstance(raised.value, UnfitError)


async def test_an_optimizer_that_ignores_eps_measures_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step = Trainer.optim_step
    monkeypatch.setattr(
        Trainer, "optim_step", lambda self, adam: step(self, replace(adam, eps=1e-8))
    )
    with pytest.raises(AdapterError, match="ignores eps") as raised:
        await check_sum(Direct(8, "ppo"), unlikely_text(tiny_tokenizer()))
    assert not isinstance(raised.value, UnfitError)


# Over loopback


@contextmanager
def serving(folder: Path) -> Iterator[tuple[str, Service]]:
    apps: list[ServiceApp] = []

    def keep(app: ServiceApp) -> ServiceApp:
        apps.append(app)
        return app

    with on_a_port(folder, keep) as url:
        yield url, apps[0].service


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Service]]:
    with serving(tmp_path_factory.mktemp("service")) as found:
        yield found


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


async def opened(config: RunConfig, service: Service) -> RemoteAdapter:
    async with assemble(config).open_adapter() as adapter:
        assert isinstance(adapter, RemoteAdapter)
        assert len(service.models) == 1, "the throw-away models are gone"
    return adapter


@pytest.mark.parametrize("backend", ["tinker", "weaver"])
@pytest.mark.parametrize("loss", ["importance_sampling", "dro"])
async def test_our_own_service_sums(
    backend: str, loss: str, server: tuple[str, Service], tmp_path: Path
) -> None:
    url, service = server
    adapter = await opened(run(tmp_path, backend, url, loss), service)
    assert await adapter._places.native(loss) == (loss == "importance_sampling")


@pytest.mark.parametrize("backend", ["tinker", "weaver"])
@pytest.mark.parametrize(
    "passing", [reweighed(FOREIGN["skyrl"]), reweighed(FOREIGN["nothing"]), forgets_requests]
)
async def test_a_run_on_a_server_that_trains_something_else_is_refused(
    backend: str,
    passing: Any,
    server: tuple[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(Trainer, "forward_backward", passing)
    with pytest.raises(AdapterError, match=r"backend\.assume_sum: true"):
        await train(run(tmp_path, backend, server[0], "importance_sampling"))


@pytest.mark.parametrize("backend", ["tinker", "weaver"])
async def test_only_the_wrong_way_of_a_half_right_server_is_refused(
    backend: str,
    server: tuple[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    url, service = server
    half: dict[str, Factor] = {
        "own": lambda row, rows, loss: 1.0 if loss == "cross_entropy" else 1 / len(row.tokens),
        "ours": lambda row, rows, loss: (
            1 / max(sum(row.advantages), 1e-9) if loss == "cross_entropy" else 1.0
        ),
    }
    monkeypatch.setattr(Trainer, "forward_backward", reweighed(half["own"]))
    adapter = await opened(run(tmp_path / "1", backend, url, "importance_sampling"), service)
    assert not await adapter._places.native("importance_sampling"), "it is computed here"
    assert "averages over the tokens of each row" in caplog.text
    monkeypatch.setattr(Trainer, "forward_backward", reweighed(half["ours"]))
    adapter = await opened(run(tmp_path / "2", backend, url, "importance_sampling"), service)
    assert await adapter._places.native("importance_sampling")
    with pytest.raises(AdapterError, match=r"dro can't be computed here, .* divides each row"):
        await opened(run(tmp_path / "3", backend, url, "dro"), service)


async def test_a_server_that_lacks_a_loss_trains_it_through_its_gradient(
    server: tuple[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.delitem(TINKER_LOSSES, "cispo")  # type: ignore[arg-type]  # a dict
    result = await train(run(tmp_path / "a", "tinker", server[0], "cispo"))
    assert len(result.history) == 1
    assert "backend.native_losses: [cross_entropy, importance_sampling, ppo]" in caplog.text
    trusting = run(tmp_path / "b", "tinker", server[0], "cispo", assume_sum=True)
    async with assemble(trusting).open_adapter() as adapter:
        with pytest.raises(AdapterError, match=r"remove cispo from backend\.native_losses"):
            await adapter.update(Batch([flat(-2.0)], "cispo", {}, Denominators(3, 1)))


@pytest.mark.parametrize("backend", ["tinker", "weaver"])
async def test_without_a_second_model_nothing_can_be_measured(
    backend: str,
    server: tuple[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    create = Protocol.create_model

    def one(self: Protocol, call: Any, session: Any, *rest: Any) -> Any:
        if any(model.session is session for model in server[1].models.values()):
            raise invalid("one model per session")
        return create(self, call, session, *rest)

    monkeypatch.setattr(Protocol, "create_model", one)
    await train(run(tmp_path / "1", backend, server[0], "importance_sampling"))
    assert "Can't check whether the service sums importance_sampling" in caplog.text
    with pytest.raises(AdapterError, match=r"one model per session.*assume_sum: true"):
        await train(run(tmp_path / "2", backend, server[0], "dro"))
    await train(run(tmp_path / "3", backend, server[0], "dro", assume_sum=True))


async def test_a_server_that_accepts_no_large_eps_is_not_refused(
    server: tuple[str, Service],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    read = bodies.adam_params

    def strict(body: Any) -> AdamParams:
        if (adam := read(body)).eps > 1:
            raise invalid("adam_params.eps: got 1000, expected at most 1")
        return adam

    monkeypatch.setattr(bodies, "adam_params", strict)
    await opened(run(tmp_path, "tinker", server[0], "importance_sampling"), server[1])
    assert "adam_params.eps: got 1000" in caplog.text


@pytest.mark.parametrize("backend", ["tinker", "weaver"])
async def test_a_cancelled_measurement_leaves_no_model(
    backend: str, server: tuple[str, Service], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, service = server
    began = asyncio.Event()

    async def hang(*_: Any, **__: Any) -> None:
        began.set()
        await asyncio.Event().wait()

    monkeypatch.setattr("retrain.adapters.remote.places.check_sum", hang)
    terminated: list[str] = []
    drop = Service.drop_model
    monkeypatch.setattr(
        Service, "drop_model", lambda self, model: (terminated.append(model.id), drop(self, model))
    )
    opening = asyncio.create_task(opened(run(tmp_path, backend, url, "dro"), service))
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


BACKENDS = {"trl": FULL["trl"], "tinker": LORA["tinker"], "weaver": LORA["weaver"]}


@pytest.mark.parametrize("backend", BACKENDS)
async def test_without_credit_nothing_is_trained(backend: str, tmp_path: Path) -> None:
    sections = {"prompts": ["a="], "rewards": ["slot_match"], "algorithm": "reinforce"}
    losses = ["importance_sampling", "ppo", "cispo", "cross_entropy", "dro"]
    for loss in losses if backend != "trl" else losses[-1:]:
        sections["algorithm"] = {"type": "reinforce", "loss": loss}
        config = run_of(tmp_path / loss, BACKENDS[backend], **sections)
        async with assemble(config).open_adapter() as adapter:
            ids = flat(0.0).token_ids
            current = (await adapter.logprobs([ids]))[0]
            exact = [lp * kept for lp, kept in zip(current, flat(0.0).loss_mask, strict=True)]
            for logprobs in (exact, flat(-2.0).logprobs):
                if loss == "dro" and logprobs is not exact:
                    continue  # its second term is of the sampled tokens
                one = Sample(ids, flat(0.0).loss_mask, logprobs, [0.0] * 7, flat(0.0).versions)
                metrics = await adapter.update(Batch([one], loss, {}, Denominators(3, 1)))
                assert metrics["grad_norm"] == pytest.approx(0.0, abs=1e-5), (loss, logprobs)
