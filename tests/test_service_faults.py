"""Lost requests and lost replies over real loopback: nothing is trained twice, nothing is lost.

The proof is the service's own: its count of optimizer steps, and a digest of its weights beside
those of a run without faults.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from starlette.types import Message, Receive, Scope, Send

from retrain.adapters.tinker import AdamParams, LoraConfig, TinkerClient
from retrain.adapters.weaver import TrainingRow, WeaverClient
from retrain.service.app import ServiceApp
from retrain.wire.retries import RetryPolicy
from retrain.wire.tinker.values import Datum, Tensor
from tests.service_kit import CROSS_ENTROPY, TOKENS, on_a_port
from tests.weights_kit import digest

STEPS = 3
QUICK = RetryPolicy(first=0.01, cap=0.05)
IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f-]+(:train:[0-9]+)?")


class Faulty:
    """Spoils the first request of every kind, by `fault`, and lets what comes again pass."""

    def __init__(self, app: ServiceApp, fault: str) -> None:
        self.app, self.fault = app, fault
        self.seen: Counter[str] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":
            await self.app(scope, receive, send)
            return
        kind = IDS.sub("ID", scope["path"])
        self.seen[kind] += 1
        kinds = ("forward_backward", "optim_step", "passes", "steps", "weights", "checkpoints")
        trains = kind.endswith(kinds)
        if not trains or self.seen[kind] > 1 or self.fault == "none":
            await self.app(scope, receive, send)
        elif self.fault == "lost reply":
            await self.app(scope, receive, lost)
            hang_up(send)
        else:
            status, *after = self.fault.split()
            await refuse(send, int(status), after)


async def lost(_: Message) -> None:
    """What the app answers goes nowhere."""


def hang_up(send: Send) -> None:
    """Close the connection under uvicorn's hands."""
    send.__self__.transport.close()  # type: ignore[attr-defined]  # uvicorn's request


async def refuse(send: Send, status: int, after: list[str]) -> None:
    headers = [(b"retry-after", seconds.encode()) for seconds in after]
    body = b'{"error": "busy", "message": "not now", "retryable": true, "detail": "not now"}'
    headers.append((b"content-length", str(len(body)).encode()))
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def train_tinker(url: str) -> None:
    inputs = {
        "target_tokens": Tensor(CROSS_ENTROPY["target_tokens"][0], "int64"),
        "weights": Tensor([float(w) for w in CROSS_ENTROPY["weights"][0]]),
    }
    async with TinkerClient(url, policy=QUICK) as client:
        model = await client.create_model("tiny", LoraConfig(rank=4, seed=1))
        for _ in range(STEPS):
            passed = await model.forward_backward([Datum(TOKENS[:-1], inputs)], "cross_entropy")
            stepped = await model.optim_step(AdamParams(1e-2))
            await passed
            await stepped
        await (await model.save_weights("end")).result()


async def train_weaver(url: str) -> None:
    inputs = {name: value[0] for name, value in CROSS_ENTROPY.items()}
    async with WeaverClient(url, policy=QUICK, resend=True) as client:
        model = await client.create_model("tiny", lora=LoraConfig(rank=4, seed=1))
        for _ in range(STEPS):
            rows = [TrainingRow(TOKENS[:-1], inputs)]
            passed = await model.forward_backward(rows, "cross_entropy")
            stepped = await model.optim_step(AdamParams(1e-2))
            await passed.result()
            await stepped.result()
        await model.save_state("end")


async def outcome(train: Callable[[str], Any], folder: Path, fault: str) -> tuple[int, str, int]:
    """Steps, the weights' digest, and how many requests were spoilt."""
    made: list[Faulty] = []

    def wrap(app: ServiceApp) -> Faulty:
        made.append(Faulty(app, fault))
        return made[0]

    with on_a_port(folder, wrap) as url:
        await train(url)
        store = made[0].app.service.store
        [saved] = store.list()
        spoilt = sum(count - 1 for count in made[0].seen.values() if count > 1)
        return saved.steps, digest(store.load(saved.place)[0]), spoilt


@pytest.mark.slow
@pytest.mark.parametrize("train", [train_tinker, train_weaver])
async def test_faults_change_nothing_of_what_is_trained(train, tmp_path):
    clean = await outcome(train, tmp_path / "clean", "none")
    assert clean[0] == STEPS
    for number, fault in enumerate(["lost reply", "429 0", "503 0", "503"]):
        faulty = await outcome(train, tmp_path / str(number), fault)
        assert faulty[:2] == clean[:2], fault
        assert faulty[2] > clean[2], f"{fault}: nothing was sent again"
