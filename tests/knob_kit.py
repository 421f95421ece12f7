"""What a short run tells its backend, and what comes of it: the trace that a knob must change.

The run is a real one: on TRL, or on the local service behind a transport that writes down every
request. Times, addresses of memory, folders and ids are left out; numbers are rounded, since a
sampler's last bits depend on who shares its batch.
"""

from __future__ import annotations

import copy
import json
import os
import re
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import fields
from pathlib import Path
from typing import Any

import httpx

from benchmarks.mock_engine import MockAdapter
from retrain.adapters.base import Adapter
from retrain.adapters.remote.adapter import RemoteAdapter
from retrain.adapters.remote.local import in_process
from retrain.adapters.tinker.options import TinkerOptions
from retrain.adapters.trl.options import TrlOptions
from retrain.adapters.weaver.options import WeaverOptions
from retrain.assembly import Parts, assemble
from retrain.config import parse_config
from retrain.errors import ConfigError, RetrainError
from retrain.observe.naming import wanted_folder
from retrain.observe.run_dir import read_events
from retrain.pipeline import train
from tests.knob_parts import COUNTS

HERE = Path(__file__).parent
PARTS = "tests.knob_parts"
BASE: dict[str, Any] = {
    "name": "base",
    "model": "tiny",
    "prompts": ["a=", "b=", "c=", "d=", "e=", "f="],
    "environment": {"type": f"{PARTS}:Scene"},
    "rewards": [{"type": f"{PARTS}:Letters"}],
    "algorithm": {"type": "grpo", "group_size": 2},
    "sampling": {"max_tokens": 3},
    "rollout": {"slots": 1},
    "staleness": {"target": 0},
    "train": {
        "total_train_steps": 2,
        "groups_per_step": 1,
        "order": "in_order",
        "check_publish": False,  # `auto` depends on the time
    },
    "checkpoint": {"every": 2, "keep": 1},
    "loggers": [{"type": f"{PARTS}:Notes"}],
}
BACKENDS: dict[str, dict[str, Any]] = {
    "trl": {"type": "trl", "learning_rate": 1e-2, "device": "cpu"},
    "tinker": {"type": "tinker", "learning_rate": 1e-2, "wire": "json", "lora": {"r": 4}},
    "weaver": {"type": "weaver", "learning_rate": 1e-2, "lora": {"r": 4}},
    "mock": {"type": "benchmarks.mock_engine:MockOptions"},
}
"""`mock` has no model: for keys that no backend reads."""
POLLS = re.compile(r"retrieve_future|operations/|heartbeat")
MOMENTS = re.compile(r"time|seconds|started|ended|path|idle|per_second|wait")
IDS = re.compile(r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|(?<=_)[0-9a-f]{8}\b|:train:[0-9]+")
Trace = dict[str, Any]


def merged(mapping: Mapping[str, Any], *changes: Mapping[str, Any]) -> dict[str, Any]:
    """`mapping` with changes laid over it, section by section; None takes a key out."""
    result = copy.deepcopy(dict(mapping))
    for change in changes:
        for key, value in change.items():
            inner = result.get(key)
            if isinstance(value, Mapping) and isinstance(inner, dict) and "type" not in value:
                result[key] = merged(inner, value)
            else:
                result[key] = copy.deepcopy(value)
    return result


async def trace(mapping: Mapping[str, Any], folder: Path, *, lose: str = "") -> Trace:
    """Of one run; `lose` names requests of which the first one's reply is lost."""
    COUNTS.clear()
    sent: list[Any] = []
    result: Trace = {"sent": sent}
    try:
        config = parse_config(mapping, HERE)
        result["place"] = str(wanted_folder(config))
        config = config.model_copy(update={"run_dir": folder})
        await train(config, parts=_watched(assemble(config), sent, lose))
    except* RetrainError as error:
        result["error"] = _plain(", ".join(str(one) for one in _leaves(error)), folder)
        result["refused"] = all(isinstance(one, ConfigError) for one in _leaves(error))
    sent.sort(key=lambda one: json.dumps(one, sort_keys=True, default=str))
    return {**result, **_left(folder), "counts": dict(COUNTS)}


def _leaves(error: BaseException) -> list[BaseException]:
    if isinstance(error, BaseExceptionGroup):
        return [leaf for inner in error.exceptions for leaf in _leaves(inner)]
    return [error]


def _watched(parts: Parts, sent: list[Any], lose: str) -> Parts:
    """The parts with an adapter that writes down what the backend is sent."""

    class Watched(Parts):
        def open_adapter(self) -> Adapter:
            adapter = super().open_adapter()
            if isinstance(adapter, MockAdapter):
                return adapter
            if isinstance(adapter, RemoteAdapter):
                return Remote(adapter, sent, lose)
            return Local(adapter, sent)

    return Watched(**{one.name: getattr(parts, one.name) for one in fields(parts)})


class Around:
    """An adapter around another; what isn't its own is the inner one's."""

    def __init__(self, adapter: Any, sent: list[Any]) -> None:
        self.adapter, self.sent = adapter, sent

    def __getattr__(self, name: str) -> Any:
        return getattr(self.adapter, name)

    async def __aexit__(self, *exception: Any) -> None:
        await self.context.__aexit__(*exception)

    async def __aenter__(self) -> Any:
        self.context = self.open()
        return await self.context.__aenter__()


class Remote(Around):
    """A remote adapter on a service inside this process, whatever its url says."""

    def __init__(self, adapter: RemoteAdapter, sent: list[Any], lose: str) -> None:
        super().__init__(adapter, sent)
        self.lose = lose

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async with in_process(self.adapter.config) as service:
            self.adapter._http = Recorded(service, self.sent, self.lose)
            async with self.adapter:
                yield self


class Recorded(httpx.AsyncBaseTransport):
    def __init__(self, inner: httpx.AsyncBaseTransport, sent: list[Any], lose: str) -> None:
        self.inner, self.sent, self.lose = inner, sent, lose

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        where = str(request.url)
        if not POLLS.search(where):
            body = IDS.sub("ID", request.content.decode(errors="replace"))
            kind = request.headers.get("content-type")
            self.sent.append([request.method, IDS.sub("ID", where), kind, _rounded(body)])
        response = await self.inner.handle_async_request(request)
        if self.lose and self.lose in where:
            self.lose = ""
            raise httpx.ReadError("the connection was lost", request=request)
        return response


class Local(Around):
    """The TRL adapter: its arguments, threads, micro-batches and adapters."""

    @asynccontextmanager
    async def open(self) -> AsyncIterator[Any]:
        async with self.adapter:
            self.adapter._thread.trainer.look = self.look
            await self.adapter._in_thread("look")
            yield self

    def look(self) -> None:
        import torch

        trainer = self.adapter._thread.trainer
        arguments = {k: v for k, v in trainer.args.to_dict().items() if "dir" not in k}
        lora = getattr(trainer.model, "peft_config", {}).get("default")
        self.sent += [
            ["arguments", arguments],
            ["loss", repr(trainer.plan)],
            ["threads", torch.get_num_threads()],
            ["lora", None if lora is None else _without_sets(lora.to_dict())],
            ["model", [list(p.shape) for p in trainer.model.parameters()]],
            ["rows at once", self.adapter.sampler._worker.max_rows],
        ]

    async def update(self, batch: Any) -> Any:
        trainer = self.adapter._thread.trainer
        parts = trainer.cut(batch.samples, paired=batch.loss == "dpo")
        self.sent.append(["micro-batches", list(map(len, parts))])
        return await self.adapter.update(batch)


def _without_sets(mapping: Mapping[str, Any]) -> dict[str, Any]:
    return {k: sorted(v) if isinstance(v, set) else v for k, v in mapping.items()}


def _all_below(folder: Path) -> Iterator[Path]:
    """Folders and files; what a service's thread deletes meanwhile is no error."""
    for parent, folders, files in os.walk(folder):
        yield from (Path(parent, name) for name in (*folders, *files))


def _left(folder: Path) -> Trace:
    """What the run directory holds, without times."""
    if not folder.is_dir():
        return {}
    rollouts, metrics = folder / "rollouts.jsonl", folder / "metrics.jsonl"
    lines = {
        file.name: [json.loads(line) for line in file.read_text().splitlines()]
        for file in (rollouts, metrics)
        if file.exists()
    }
    files = sorted(_plain(str(p.relative_to(folder)), folder) for p in _all_below(folder))
    events = [event for event in read_events(folder) if event["event"] != "end"]
    events.sort(key=lambda event: event["event"] == "checkpoint")  # saved beside the rollouts
    return {
        "events": [_rounded(_timeless(event)) for event in events],
        **{name: [_rounded(_timeless(row)) for row in rows] for name, rows in lines.items()},
        "files": files,
    }


def _timeless(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _timeless(v) for k, v in value.items() if not MOMENTS.search(k)}
    return value


def _rounded(value: Any) -> Any:
    """JSON values, or the text of some, with three digits behind the point."""
    if isinstance(value, str) and value[:1] in "{[":
        try:
            return _rounded(json.loads(value))
        except ValueError:
            return value
    if isinstance(value, float):
        return round(value, 3) if abs(value) >= 1e-2 else float(f"{value:.1e}")
    if isinstance(value, dict):
        return {k: _rounded(v) for k, v in value.items()}
    return [_rounded(one) for one in value] if isinstance(value, list) else value


def _plain(text: str, folder: Path) -> str:
    return IDS.sub("ID", text.replace(str(folder), "RUN"))


OPTIONS = {"trl": TrlOptions, "tinker": TinkerOptions, "weaver": WeaverOptions}
