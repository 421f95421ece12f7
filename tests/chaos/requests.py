"""Random requests to every route of the service, and what must hold whatever they are.

`python -m tests.chaos.requests --requests 10000` sends valid, mutated and broken requests to
a service on loopback and ends with 1 at the first one that breaks a rule:

- no reply and no job is a 5xx, and each reply comes within `SLOWEST` seconds;
- the weights, checkpoints, lists and seeded samples of another session stay as they are;
- the memory does not grow by more than `MOST_MEMORY` bytes.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx

from retrain.service.app import ServiceApp
from tests.chaos.bodies import bombs, garbage, mutated, protobuf, written
from tests.service_kit import TOKENS, datum, on_a_port
from tests.weights_kit import digest

SLOWEST = 10.0
MOST_MEMORY = 1536 * 2**20
BETWEEN_CHECKS = 100
SETTINGS: Mapping[str, Any] = {
    "max_body": 4 * 2**20,
    "max_values": 2**18,
    "max_samples": 8,
    "gap_timeout": 0.5,
    "long_poll": 0.2,
}
"""Small limits, so that reaching them is quick."""
PROTOBUF = {"Content-Type": "application/x-protobuf"}
HEADERS = [PROTOBUF, {"Content-Type": "text/plain"}, {"Content-Encoding": "gzip"}]
HEADERS += [{"X-Big": "x" * 100_000}, {"Accept": "\xff" * 100}]
RATIO = {
    "target_tokens": (TOKENS[1:], "int64"),
    "logprobs": ([-1.0] * 5,),
    "advantages": ([1.0] * 5,),
}
TRAINING = [
    *("POST forward_backward", "POST optim_step", "POST save_weights", "POST asample"),
    *("POST save_weights_for_sampler", "POST models/{model_id}/forward-backward-passes"),
    *("POST models/{model_id}/optimizer-steps", "POST sampling-sessions/{sampler_id}/samples"),
]
"""The routes that get more requests than the others."""


class BrokenRule(AssertionError):
    """A request that broke a rule."""


@dataclass(slots=True)
class Sender:
    """The sessions, models and samplers that the requests name; none is the victim's."""

    http: httpx.Client
    random: random.Random
    ids: dict[str, str] = field(default_factory=dict)
    numbers: Iterator[int] = field(default_factory=lambda: iter(range(1, 10**9)))

    def renew(self) -> None:
        """New sessions with a model and a sampler each, for both protocols."""
        post = self.http.post
        for name in ("session", "weaver_session"):
            if name in self.ids:
                post(f"sessions/{self.ids['session']}/finish", json={})
        session = post("create_session", json={}).json()["session_id"]
        body = {"session_id": session, "base_model": "tiny", "lora_config": {"rank": 2}}
        model = post("create_model", json={**body, "model_seq_id": 0}).json()["model_id"]
        body = {"session_id": session, "base_model": "tiny", "sampling_session_seq_id": 0}
        sampler = post("create_sampling_session", json=body).json()["sampling_session_id"]
        other = post("sessions", json={}).json()["id"]
        body = {"base_model": "tiny", "lora_config": {"rank": 2}, "model_seq_id": 1}
        weaver_model = post(f"sessions/{other}/models", json=body).json()["id"]
        body = {"base_model": "tiny", "sampling_session_seq_id": 1}
        weaver_sampler = post(f"sessions/{other}/sampling-sessions", json=body).json()["id"]
        self.ids |= {"session": session, "model": model, "sampler": sampler}
        self.ids |= {"weaver_session": other, "weaver_model": weaver_model}
        self.ids |= {"weaver_sampler": weaver_sampler, "job": str(uuid.uuid4())}
        self.numbers = iter(range(1, 10**9))


def requests(ids: Mapping[str, str], number: int, seq_id: int = 1) -> dict[str, tuple[str, Any]]:
    """A valid request to every route: by "METHOD route", its path and its JSON body.

    `seq_id` is the next one of the Tinker model; `number` is new.
    """
    model = {"model_id": ids["model"], "seq_id": seq_id}
    loss = {"data": [datum(**RATIO)], "loss_fn": "ppo", "loss_fn_config": {}}
    plain = {"data": [datum()], "loss_fn": "cross_entropy"}
    sample = {
        "num_samples": 2,
        "prompt": datum()["model_input"],
        "sampling_params": {
            **{"max_tokens": 4, "temperature": 1.0, "top_p": 0.9, "top_k": 5, "seed": 3},
            "stop": ["x"],
        },
        "prompt_logprobs": True,
        "topk_prompt_logprobs": 2,
    }
    target = {"data": [1, 2, 3, -1], "dtype": "int64", "shape": [4, 1]}
    more = {"topk_sample_logprobs": 2, "target_prompt_logprobs": target}
    adam = {"learning_rate": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    lora = {"rank": 2, "seed": 1, "train_attn": True, "train_mlp": True, "train_unembed": True}
    create = {"base_model": "tiny", "lora_config": lora, "user_metadata": {"a": [1, {"b": "c"}]}}
    saved = f"{ids['model']}/weights/n{number % 7}"
    checkpoint = f"training_runs/{ids['model']}/checkpoints/weights/n{number % 5}"
    one, other = f"sessions/{ids['weaver_session']}", f"models/{ids['weaver_model']}"
    drawn = f"sampling-sessions/{ids['weaver_sampler']}"
    payload = {"model_id": ids["weaver_model"], "seq_id": number}
    path = f"weaver://{ids['weaver_model']}/checkpoints/n{number % 7}"
    run, place = "training_runs/{model_id}", "checkpoints/{kind}/{name}"
    return {
        "GET healthz": ("healthz", None),
        "GET get_server_capabilities": ("get_server_capabilities", None),
        "POST client/config": ("client/config", {"sdk_version": "1"}),
        "POST client/dynamic_config": ("client/dynamic_config", {}),
        "POST telemetry": ("telemetry", {"events": []}),
        "POST create_session": ("create_session", {"tags": ["a"], "user_metadata": {}}),
        "POST session_heartbeat": ("session_heartbeat", {"session_id": ids["session"]}),
        "POST sessions/{session_id}/finish": (f"sessions/{uuid.uuid4()}/finish", {}),
        "POST create_model": (
            "create_model",
            {**create, "session_id": ids["session"], "model_seq_id": number % 5},
        ),
        "POST load_weights": (
            "load_weights",
            {**model, "path": f"tinker://{saved}", "optimizer": True},
        ),
        "POST get_info": ("get_info", {"model_id": ids["model"]}),
        "POST unload_model": ("unload_model", {"model_id": f"{ids['session']}:train:3"}),
        "POST forward_backward": ("forward_backward", {**model, "forward_backward_input": loss}),
        "POST forward": ("forward", {**model, "forward_input": plain}),
        "POST optim_step": ("optim_step", {**model, "adam_params": adam}),
        "POST save_weights": (
            "save_weights",
            {
                **model,
                "path": f"n{number % 7}",
                "ttl_seconds": 60,
                "user_metadata": {"a": "b"},
                "overwrite": True,
            },
        ),
        "POST save_weights_for_sampler": (
            "save_weights_for_sampler",
            {**model, "sampling_session_seq_id": number, "kind": "snapshot"},
        ),
        "POST weights_info": ("weights_info", {"tinker_path": f"tinker://{saved}"}),
        "POST create_sampling_session": (
            "create_sampling_session",
            {**create, "session_id": ids["session"], "sampling_session_seq_id": number % 5},
        ),
        "GET samplers/{sampler_id}": (f"samplers/{ids['sampler']}", None),
        "POST asample": (
            "asample",
            {**sample, **more, "sampling_session_id": ids["sampler"], "seq_id": number},
        ),
        "POST retrieve_future": ("retrieve_future", {"request_id": ids["job"]}),
        "POST cancel_future": ("cancel_future", {"request_id": ids["job"]}),
        "GET training_runs": ("training_runs?limit=3&offset=1", None),
        f"GET {run}": (f"training_runs/{ids['model']}", None),
        f"GET {run}/checkpoints": (f"training_runs/{ids['model']}/checkpoints", None),
        "GET checkpoints": ("checkpoints?limit=2", None),
        f"DELETE {run}/{place}": (checkpoint, None),
        f"PUT {run}/{place}/ttl": (f"{checkpoint}/ttl", {"ttl_seconds": 60}),
        "POST sessions": ("sessions", {"tags": ["a"], "user_metadata": {"a": 1}}),
        "GET sessions/{session_id}": (one, None),
        "POST sessions/{session_id}/heartbeat": (f"{one}/heartbeat", None),
        "POST sessions/{session_id}/metrics": (f"{one}/metrics", {"metrics": []}),
        "POST sessions/{session_id}/models": (
            f"{one}/models",
            {**create, "model_seq_id": number % 5 + 1, "training_mode": "lora"},
        ),
        "POST sessions/{session_id}/sampling-sessions": (
            f"{one}/sampling-sessions",
            {"sampling_session_seq_id": number % 5, "base_model": "tiny", "model_path": None},
        ),
        "GET supported-models": ("supported-models?limit=100", None),
        "GET operations/{job_id}": (f"operations/{ids['job']}", None),
        "GET models/{model_id}": (other, None),
        "POST models/{model_id}/terminate": (f"models/{uuid.uuid4()}/terminate", {}),
        "POST models/{model_id}/forward-backward-passes": (
            f"{other}/forward-backward-passes",
            {"payload": {**payload, "forward_backward_input": plain}},
        ),
        "POST models/{model_id}/forward-passes": (
            f"{other}/forward-passes",
            {"payload": {**payload, "forward_input": {**plain, "loss_fn": "forward_logprob"}}},
        ),
        "POST models/{model_id}/optimizer-steps": (
            f"{other}/optimizer-steps",
            {"payload": {**payload, "adam_params": adam}},
        ),
        "POST models/{model_id}/export-sampler": (
            f"{other}/export-sampler",
            {"seq_id": number, "path": f"e{number}", "ttl_seconds": 60},
        ),
        "POST models/{model_id}/checkpoints": (
            f"{other}/checkpoints",
            {"type": "weight_and_optimizer", "name": f"n{number % 7}", "ttl_seconds": 60},
        ),
        "GET models/{model_id}/checkpoints": (f"{other}/checkpoints", None),
        "PATCH models/{model_id}/checkpoints/ttl": (
            f"{other}/checkpoints/ttl",
            {"path": path, "ttl_seconds": 60},
        ),
        "POST models/{model_id}/load": (f"{other}/load", {"path": path, "include_optimizer": True}),
        "GET sampling-sessions/{sampler_id}": (drawn, None),
        "DELETE sampling-sessions/{sampler_id}": (f"sampling-sessions/{uuid.uuid4()}", None),
        "POST sampling-sessions/{sampler_id}/samples": (f"{drawn}/samples", sample),
        "POST sampling-sessions/{sampler_id}/logprobs": (
            f"{drawn}/logprobs",
            {"prompt": datum()["model_input"]},
        ),
    }


class Fuzz:
    """Sends requests, and checks the rules."""

    def __init__(self, url: str, app: ServiceApp, seed: int) -> None:
        self.app, self.url = app, url
        self.random = random.Random(seed)
        self.http = httpx.Client(base_url=f"{url}/api/v1/", timeout=60, trust_env=False)
        self.sender = Sender(self.http, self.random)
        self.statuses: Counter[str] = Counter()
        self.victim = self._make_victim()
        self.before = self._victims_state()
        self.memory = resident()

    def run(self, count: int) -> None:
        for index in range(count):
            if index % BETWEEN_CHECKS == 0:
                self.sender.renew()
                self.check()
            self.request()
        self.check()

    def request(self) -> None:
        number = next(self.sender.numbers)
        valid = requests(self.sender.ids, number, self._next_seq_id())
        route = self.random.choice([*valid, *(TRAINING * 3)])
        method, (path, body) = route.split()[0], valid[route]
        content, headers = b"" if body is None else written(body), {}
        kind = self.random.random()
        if kind < 0.3:
            pass  # valid as it is
        elif kind < 0.7 and body is not None:
            content = written(mutated(body, self.random))
        elif kind < 0.75:
            path = self._bent(path)
        elif kind < 0.8:
            content = garbage(self.random)
        elif kind < 0.83:
            content, headers = self.random.choice(bombs()), {"Content-Encoding": "zstd"}
        elif kind < 0.86:
            headers = self.random.choice(HEADERS)
        elif kind < 0.93:
            path, method = "forward_backward", "POST"
            content, headers = protobuf(self.sender.ids, self._next_seq_id(), self.random), PROTOBUF
            route = "POST forward_backward (protobuf)"
        elif kind < 0.94:
            self._raw(self.random)
            return
        self._send(route, method, path, content, headers)

    def _send(
        self, route: str, method: str, path: str, content: bytes, headers: Mapping[str, str]
    ) -> None:
        start = time.monotonic()
        try:
            raw = [(name.encode(), value.encode("latin-1")) for name, value in headers.items()]
            reply = self.http.request(method, path, content=content, headers=raw)
        except httpx.RemoteProtocolError:  # it hung up on what is no HTTP
            self.statuses["closed"] += 1
            return
        seconds = time.monotonic() - start
        self.statuses[str(reply.status_code)] += 1
        if reply.status_code >= 500 or seconds > SLOWEST:
            raise BrokenRule(
                f"{route}: {reply.status_code} after {seconds:.1f} s: {reply.text[:300]}\n"
                f"{method} {path[:200]} {dict(headers)}\n{content[:2000]!r}"
            )
        self._remember(reply)

    def _next_seq_id(self) -> int:
        """The number that the Tinker model waits for, so that its requests run."""
        if (model := self.app.service.models.get(self.sender.ids["model"])) is None:
            return 1
        lane, number = model.lane, model.lane._next
        while number in lane._known or number in lane._rejected:
            number += 1
        return number

    def _remember(self, reply: httpx.Response) -> None:
        """Use a job that was started in later requests."""
        if reply.headers.get("content-type", "").startswith("application/json"):
            found = reply.json()
            job = found.get("request_id") or (found.get("id") if "status" in found else None)
            if isinstance(job, str):
                self.sender.ids["job"] = job

    def _bent(self, path: str) -> str:
        """A path with a strange part or query."""
        strange = ["..", "%2e%2e", "\x00", "x" * 3000, "é", "a b", "9" * 5000, "-1", "+", "%ff"]
        part = quote(self.random.choice(strange), safe="%")
        pieces = path.split("?")[0].split("/")
        if self.random.random() < 0.4:
            return f"{pieces[0]}?limit={part}&offset={quote(self.random.choice(strange))}"
        pieces[self.random.randrange(len(pieces))] = part
        return "/".join(pieces)

    def _raw(self, draw: random.Random) -> None:
        """Bytes that may be no HTTP at all."""
        host, port = self.url.removeprefix("http://").split(":")
        lines = [
            draw.randbytes(200),
            b"GET / HTTP/9.9\r\n\r\n",
            b"POST /api/v1/asample HTTP/1.1\r\nContent-Length: -5\r\n\r\n",
            b"POST /api/v1/asample HTTP/1.1\r\nHost: a\r\nContent-Length: 99999999\r\n\r\n{",
            b"POST /api/v1/asample HTTP/1.1\r\nHost: a\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            b"GET /api/v1/" + b"a" * 70_000 + b" HTTP/1.1\r\n\r\n",
        ]
        with socket.create_connection((host, int(port)), timeout=SLOWEST) as connection:
            connection.sendall(draw.choice(lines))
        self.statuses["raw"] += 1

    # The rules

    def check(self) -> None:
        """Raise BrokenRule unless the victim is unharmed, and no job has failed by our fault."""
        if (now := self._victims_state()) != self.before:
            raise BrokenRule(f"the victim was changed:\n{self.before}\n{now}")
        for job in list(self.app.service.jobs._finished.values()):
            if job.error is not None and job.error.status >= 500 and job.error.status != 503:
                raise BrokenRule(f"{job.kind} {job.id} failed: {job.error}")
        for path in ("checkpoints?limit=5", "training_runs?limit=5", "supported-models"):
            self._send(path, "GET", path, b"", {})
        if (grown := resident() - self.memory) > MOST_MEMORY:
            raise BrokenRule(f"the memory grew by {grown / 2**20:.0f} MiB")

    def _make_victim(self) -> Mapping[str, str]:
        """A session with a trained model, a checkpoint and a sampler."""
        session = self._post("create_session")["session_id"]
        body = {"session_id": session, "base_model": "tiny", "lora_config": {"rank": 4}}
        model = self._result(self._post("create_model", **body, model_seq_id=0))["model_id"]
        mine = {"model_id": model}
        given = {"data": [datum()], "loss_fn": "cross_entropy"}
        self._post("forward_backward", **mine, seq_id=1, forward_backward_input=given)
        self._post("optim_step", **mine, seq_id=2, adam_params={"learning_rate": 1e-2})
        self._result(self._post("save_weights", **mine, seq_id=3, path="kept"))
        snapshot = {"sampling_session_seq_id": 0}
        saved = self._result(self._post("save_weights_for_sampler", **mine, seq_id=4, **snapshot))
        return {"model": model, "sampler": saved["sampling_session_id"], "session": session}

    def _victims_state(self) -> object:
        """Everything of the victim that others could change."""
        victim, run = self.victim, f"training_runs/{self.victim['model']}"
        self._post("session_heartbeat", session_id=victim["session"])
        body = {
            "sampling_session_id": victim["sampler"],
            "seq_id": time.monotonic_ns(),
            "num_samples": 2,
            "prompt": datum()["model_input"],
            "sampling_params": {"max_tokens": 5, "seed": 1},
        }
        drawn = self._result(self._post("asample", **body))["sequences"]
        trainer = self.app.service.models[victim["model"]].trainer
        assert trainer is not None
        lists = [self.http.get(path).json() for path in (run, f"{run}/checkpoints")]
        return [one["tokens"] for one in drawn], digest(trainer.weights()), lists

    def _post(self, path: str, /, **body: Any) -> Any:
        reply = self.http.post(path, json=body)
        if reply.status_code != 200:
            raise BrokenRule(f"the victim's {path} failed: {reply.status_code} {reply.text[:300]}")
        return reply.json()

    def _result(self, future: Any) -> Any:
        end = time.monotonic() + 60
        while time.monotonic() < end:
            found = self._post("retrieve_future", request_id=future["request_id"])
            if "error" in found:
                raise BrokenRule(f"a request of the victim failed: {found['error']}")
            if found.get("type") != "try_again":
                return found
        raise BrokenRule("a request of the victim took more than 60 s")


def resident() -> int:
    """Bytes of this process in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def fuzz(folder: Path, count: int, seed: int) -> Counter[str]:
    """Send `count` requests; returns the replies by status, raises BrokenRule."""
    made: list[ServiceApp] = []
    with on_a_port(folder, lambda app: made.append(app) or app, **SETTINGS) as url:
        run = Fuzz(url, made[0], seed)
        try:
            run.run(count)
        finally:
            run.http.close()
        run.statuses["MiB"] = (resident() - run.memory) // 2**20
    return run.statuses


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos.requests")
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            statuses = fuzz(Path(folder), arguments.requests, arguments.seed)
        except BrokenRule as error:
            sys.stdout.write(f"{error}\na rule was broken, with seed {arguments.seed}\n")
            return 1
    replies = ", ".join(f"{status}: {count}" for status, count in sorted(statuses.items()))
    sys.stdout.write(
        f"{arguments.requests} requests, {time.monotonic() - start:.0f} s; {replies}\n"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
