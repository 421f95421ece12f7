"""A network that loses, cuts, delays and refuses: whole runs over loopback, on both protocols.

The service computes what it is asked for; what goes wrong happens to requests and replies on their
way, for one in eight of them. A run must end as without faults, with the same losses, or end with
an error that names the cause; it must never train something else.

    python -m tests.chaos.network
"""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import yaml
from starlette.types import Message, Receive, Scope, Send

from retrain.observe.journal import read_lines
from tests.chaos.kills import BASE, RATE
from tests.chaos.processes import beside
from tests.service_kit import on_a_port
from tests.test_service_faults import hang_up, lost, refuse

FAULTS = (
    "none", "429", "503", "500", "html", "lost request", "lost reply", "cut reply", "slow", "empty",
    "all",
)  # fmt: skip
RESULT = ("loss", "grad_norm", "reward/mean")
PART = 0.12


class Flaky:
    """Spoils some requests in the way that `fault` names; `all` draws one for each."""

    def __init__(self, app: Any, fault: str, seed: int = 0) -> None:
        self.app, self.fault = app, fault
        self.draw = random.Random(f"{seed}/{fault}")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or self.draw.random() > PART:
            await self.app(scope, receive, send)
            return
        fault = self.fault if self.fault != "all" else self.draw.choice(FAULTS[1:-1])
        if fault in ("429", "503", "500"):
            await refuse(send, int(fault), ["0.05"] if fault != "500" else [])
        elif fault == "html":
            await _reply(send, b"<html>Bad gateway</html>", 502)
        elif fault == "empty":
            await _reply(send, b"")
        elif fault == "lost request":
            hang_up(send)
        elif fault == "lost reply":
            await self.app(scope, receive, lost)
            hang_up(send)
        elif fault == "cut reply":
            await self.app(scope, receive, partial(_half, send))
            hang_up(send)
        else:
            await asyncio.sleep(0.2 if fault == "slow" else 0.0)
            await self.app(scope, receive, send)


async def _reply(send: Send, body: bytes, status: int = 200) -> None:
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


async def _half(send: Send, message: Message) -> None:
    """Pass on the head of a reply and half of its body."""
    if message["type"] == "http.response.start":
        headers = [h for h in message["headers"] if h[0].lower() != b"content-length"]
        await send({**message, "headers": [*headers, (b"content-length", b"100000")]})
    else:
        body = message.get("body", b"")
        await send({**message, "body": body[: len(body) // 2], "more_body": True})


def play(backend: str, fault: str, folder: Path) -> tuple[int, list[Any], str]:
    """The exit code of a run over a flaky network, its rows, and its last words."""
    home = folder / f"{backend}_{fault.replace(' ', '_')}"
    home.mkdir()
    with on_a_port(home / "service", partial(Flaky, fault=fault)) as url:
        # a run asks such a server to be sent again what was lost: `retrain serve` recognises it
        options = {"resend": True} if backend == "weaver" else {}
        sections = {**BASE, "backend": {"type": backend, "url": url, **RATE, **options}}
        (home / "run.yaml").write_text(yaml.safe_dump(sections))
        command = [sys.executable, "-m", "retrain.run", str(home / "run.yaml")]
        command += ["--run-dir", str(home / "run")]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=240)
    file = home / "run" / "metrics.jsonl"
    rows = [[row[key] for key in RESULT] for row in read_lines(file) if "loss" in row]
    return done.returncode, rows, done.stderr[-500:]


def judge(result: tuple[int, list[Any], str], clean: tuple[int, list[Any], str]) -> list[str]:
    code, rows, said = result
    if code:
        return [f"exit code {code}: {said[-300:]}"]
    pairs = zip(rows, clean[1], strict=False)
    off = [abs(a - b) for ours, theirs in pairs for a, b in zip(ours, theirs, strict=True)]
    if len(rows) != len(clean[1]) or max(off, default=1.0) > 1e-3:
        return [f"another result: {rows}, without faults {clean[1]}"]
    return []


def main() -> int:
    started = time.monotonic()
    cases = [(backend, fault) for backend in ("tinker", "weaver") for fault in FAULTS]
    with tempfile.TemporaryDirectory() as folder:
        jobs = [partial(play, backend, fault, Path(folder)) for backend, fault in cases]
        results = dict(zip(cases, beside(jobs, Path(folder), os.cpu_count() or 1), strict=True))
    wrong = {case: judge(results[case], results[case[0], "none"]) for case in cases}
    for (backend, fault), found in wrong.items():
        if found:
            print(f"{backend}, {fault}: " + "; ".join(found))
    held = sum(not found for found in wrong.values())
    print(f"{held} of {len(cases)} networks survived, in {time.monotonic() - started:.0f} s")
    return held < len(cases)


if __name__ == "__main__":
    sys.exit(main())
