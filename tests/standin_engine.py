"""The engine of the stand-in for a vLLM server: weights that change while requests are in flight.

It decodes with the local sampler's own batches, in the event loop: one pass, then other tasks. All
that changes weights therefore happens between two passes. What the real server does with requests
that a pause holds, with a tied head and after a failed reload was measured; this does the same.
"""

from __future__ import annotations

import asyncio
import copy
import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from retrain.engine.decoder import Decoder, QueuedRequest, SamplerStats
from retrain.engine.models import load_model, load_tokenizer
from retrain.engine.stopping import Stopping
from retrain.sampler import SamplingParams
from retrain.vllm.transfer import Bucket, broadcast, join

HEAD = "lm_head.weight"
BASE = ""
"""The name of the model without an adapter."""


class EngineDead(RuntimeError):
    """What the real server's engine raises for all that it can't answer any more."""

    def __init__(self) -> None:
        super().__init__(
            "EngineCore encountered an issue. See stack trace (above) for the root cause."
        )


@dataclass(eq=False)
class Choice:
    """One completion: what is banked from earlier batches, and the labels of its tokens."""

    spans: list[tuple[int, str]]
    ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[Any] = field(default_factory=list)
    finish: str | None = None

    def add(self, ids: Sequence[int], logprobs: Sequence[float], tops: Sequence[Any]) -> None:
        self.ids += ids
        self.logprobs += logprobs
        self.tops += tops

    def relabel(self, label: str, count: int) -> None:
        """Tokens from `count` on have this label."""
        if self.spans[-1][0] == count:
            self.spans.pop()
        self.spans.append((count, label))

    def versions(self) -> list[dict[str, Any]]:
        ends = [start for start, _ in self.spans[1:]] + [len(self.ids)]
        return [
            {"version": label, "start": start, "end": end}
            for (start, label), end in zip(self.spans, ends, strict=True)
            if end > start
        ]


@dataclass(eq=False)
class Job:
    """One request of a client."""

    prompt: list[int]
    params: SamplingParams
    stopping: Stopping
    adapter: str
    top: int
    asked: bool
    """For the log-probs of the sampled tokens."""
    score: int | None
    """How many of the likeliest tokens to report with the prompt's log-probs; -1: all."""
    choices: list[Choice]
    done: asyncio.Future[None]
    scores: list[dict[int, float]] | None = None
    """Of each token of the prompt but the first, and of the likeliest ones."""


class Continued:
    """The rule of a completion whose first tokens are part of the prompt by now."""

    def __init__(self, stopping: Stopping, before: Sequence[int]) -> None:
        self.params, self._stopping, self._before = stopping.params, stopping, list(before)

    def reason(self, token_ids: Sequence[int]) -> str | None:
        return self._stopping.reason([*self._before, *token_ids] if self._before else token_ids)


class Engine:
    """The model, its adapters, and the requests in flight.

    With `stale_head`, each reload forgets the head: a fault that a server doesn't report.
    """

    def __init__(self, folder: Path, dtype: torch.dtype, context: int, max_rows: int) -> None:
        self.folder, self.context, self._max_rows = folder, context, max_rows
        self.tokenizer = load_tokenizer(folder)
        self._origin = load_model(folder, dtype=dtype).requires_grad_(False)
        self.tied = bool(self._origin.config.tie_word_embeddings)
        if self.tied:  # the real one decodes with a packed copy of the head, on a CPU
            self._origin.lm_head.weight = nn.Parameter(
                self._origin.lm_head.weight.clone(), requires_grad=False
            )
        self.vocabulary: int = self._origin.config.vocab_size
        self.stale_head = False
        self.slow = 0.0
        self._changed, self._drained = asyncio.Event(), asyncio.Event()
        self.restart()

    def restart(self) -> None:
        """What a new process has: the folder's weights, no adapter, the label `default`."""
        self.base = copy.deepcopy(self._origin)
        self.adapters: dict[str, Path] = {}
        self._lora: dict[str, tuple[dict[str, Any], dict[str, Tensor]]] = {}
        self.label = "default"
        self.paused: str | None = None
        self.dead = self.broken = self.updating = False
        self._models: dict[str, nn.Module] = {BASE: self.base}
        self._decoders: dict[str, Decoder] = {}
        self._waiting: list[tuple[Job, list[Choice]]] = []
        self._running: dict[QueuedRequest, tuple[Job, list[Choice]]] = {}
        self._stats = SamplerStats()
        self._group: Any = None
        self._changed.set()  # `run` looks again

    # --- requests

    async def generate(self, job: Job) -> None:
        """Returns when the job's choices are finished; cancelling aborts it."""
        if self.broken or self.updating:
            self.fail()
        if self.dead:
            raise EngineDead
        self._waiting.append((job, job.choices))
        self._changed.set()
        try:
            await job.done
        finally:
            self._forget(job)

    def counts(self) -> tuple[int, int]:
        """Completions that run, and that wait."""
        return sum(len(d.rows) for d in self._decoders.values()), sum(
            len(choices) for _, choices in self._waiting
        )

    @property
    def made(self) -> int:
        """Tokens since the start."""
        return self._stats.tokens

    async def run(self) -> None:
        """Decode for ever."""
        while True:
            self._changed.clear()
            if self.paused != "keep" and not self.dead:
                try:
                    busy = self._turn()
                except Exception:  # noqa: BLE001 - as the real one: any fault ends the engine
                    self.fail()
                    busy = False
                if not busy:
                    self._drained.set()
                else:
                    await asyncio.sleep(self.slow)
                    continue
            await self._changed.wait()

    @torch.inference_mode()
    def _turn(self) -> bool:
        """Admit what waits, and one pass of each batch."""
        if self.paused is None:
            self._admit()
        for decoder in self._decoders.values():
            self._collect(decoder.step())
        return bool(self._running)

    def _admit(self) -> None:
        """All that waits; choices that have tokens already continue as requests of their own."""
        waiting, self._waiting = self._waiting, []
        for adapter in {job.adapter: None for job, _ in waiting}:
            if adapter not in self._models:
                raise EngineDead
            decoder = self._decoders.get(adapter)
            if decoder is None:
                model = self._models[adapter]
                decoder = Decoder(model, self.tokenizer, 0, self._stats, self._max_rows)
                self._decoders[adapter] = decoder
            jobs = [(job, choices) for job, choices in waiting if job.adapter == adapter]
            self._collect(decoder.admit([r for one in jobs for r in self._requests(*one)]))

    def _requests(self, job: Job, choices: list[Choice]) -> Iterator[QueuedRequest]:
        if job.score is not None and job.scores is None:
            job.scores = self._score(job)
        fresh = [choice for choice in choices if not choice.ids]
        for part in [fresh] * bool(fresh) + [[choice] for choice in choices if choice.ids]:
            before = part[0].ids
            request = QueuedRequest(
                [*job.prompt, *before],
                Continued(job.stopping, before),  # type: ignore[arg-type]
                [random.getrandbits(64) for _ in part],
                job.done,  # type: ignore[arg-type]
                job.top,
            )
            self._running[request] = job, part
            yield request

    def _score(self, job: Job) -> list[dict[int, float]]:
        ids = torch.tensor([job.prompt])
        logprobs = self._models[job.adapter](ids).logits[0, :-1].float().log_softmax(-1)
        count = self.vocabulary if job.score == -1 else job.score
        return [
            {token: row[token].item()}
            | dict(zip(*(part.tolist() for part in (likely.indices, likely.values)), strict=True))
            for token, row in zip(job.prompt[1:], logprobs, strict=True)
            for likely in [row.topk(count)]
        ]

    def _collect(self, requests: Sequence[QueuedRequest]) -> None:
        for request in requests:
            if request in self._running:
                job, choices = self._running.pop(request)
                self._bank(request, choices)
                self._settle(job)

    def _bank(self, request: QueuedRequest, choices: list[Choice]) -> None:
        """Take over the completions that are complete."""
        for choice, completion, tops in zip(
            choices, request.completions, request.tops, strict=True
        ):
            if completion is not None:
                choice.add(completion.token_ids, completion.logprobs, tops)
                choice.finish = "stop" if completion.stop_reason == "stop" else "length"

    def _settle(self, job: Job) -> None:
        if all(choice.finish for choice in job.choices) and not job.done.done():
            job.done.set_result(None)

    def _forget(self, job: Job) -> None:
        self._waiting = [(other, left) for other, left in self._waiting if other is not job]
        for request in [r for r, (other, _) in self._running.items() if other is job]:
            request.cancelled = True
            del self._running[request]
            self._changed.set()

    def _rows(self) -> Iterator[tuple[Choice, Any]]:
        """Unfinished choices that are being decoded, with their rows."""
        for decoder in self._decoders.values():
            for row in decoder.rows:
                if row.request in self._running:
                    yield self._running[row.request][1][row.index], row

    def fail(self) -> None:
        """The worker is dead: every request gets an error, now and later."""
        self.dead = True
        for job in self._drop():
            if not job.done.done():
                job.done.set_exception(EngineDead())

    def _drop(self) -> list[Job]:
        jobs = [job for job, _ in (*self._waiting, *self._running.values())]
        self._waiting, self._running, self._decoders = [], {}, {}
        self._drained.set()
        return jobs

    # --- pauses and labels

    async def pause(self, mode: str, clear_cache: bool) -> None:
        self.paused = mode
        if mode == "abort":
            self._preempt()
            for job in self._drop():
                for choice in job.choices:
                    choice.finish = choice.finish or "abort"
                self._settle(job)
        elif mode == "keep" and clear_cache:
            self._preempt()
        elif mode == "wait":
            self._drained.clear()
            if self._running:
                await self._drained.wait()

    def _preempt(self) -> None:
        """Drop the batches: what is in flight starts again from its own tokens."""
        for choice, row in list(self._rows()):
            tops = row.request.tops[row.index]
            choice.add(row.token_ids, row.logprobs, tops)
        for request, (job, choices) in self._running.items():
            self._bank(request, choices)
            left = [choice for choice in choices if choice.finish is None]
            self._waiting.insert(0, (job, left))
        self._running, self._decoders = {}, {}

    def resume(self) -> None:
        self.paused = None
        self._changed.set()

    def relabel(self, label: str) -> None:
        self.label = label
        for choice, row in self._rows():
            choice.relabel(label, len(choice.ids) + len(row.token_ids))
        for _, choices in self._waiting:
            for choice in choices:
                choice.relabel(label, len(choice.ids))

    # --- weights

    @torch.inference_mode()
    def reload(self, folder: Path, *, repack: bool = False) -> None:
        """The files of a folder, as `reload_weights`; a fault leaves an engine that can't serve.

        A tied head keeps its old values if the files have none, unless our worker packs it again.
        """
        self.broken = True
        files = sorted(folder.glob("*.safetensors"))
        if not files:
            raise ValueError(
                "Repo id must be in the form 'repo_name' or 'namespace/repo_name': '<path>'. Use "
                "`repo_type` argument if needed."
            )
        self._load({name: t for file in files for name, t in load_file(file).items()})
        if repack:
            self._repack()
        self.broken = False

    def _load(self, weights: Mapping[str, Tensor]) -> None:
        """Missing tensors stay as they were."""
        targets = self.base.state_dict()
        for name, tensor in weights.items():
            if name == HEAD and self.stale_head:
                continue
            if name not in targets:
                raise ValueError(f"There is no module or parameter named {name!r}")
            targets[name].copy_(tensor)
        self._adapt()

    def _repack(self) -> None:
        if self.tied and not self.stale_head:
            self.base.lm_head.weight.copy_(self.base.model.embed_tokens.weight)
            self._adapt()

    def _adapt(self) -> None:
        """Make the adapters' models of the present base."""
        for name in self.adapters:
            self._models[name] = self._adapted(*self._lora[name])

    def join(
        self, host: str, port: int, first: int, world_size: int, backend: str, seconds: float
    ) -> None:
        """Join the trainer's group; blocks."""
        self._group = join(host, port, first, world_size, backend, seconds)

    def receive(self, bucket: Bucket) -> dict[str, Tensor]:
        """The bucket that the trainer sends; blocks."""
        packed = torch.empty(bucket.size, dtype=torch.uint8)
        broadcast(self._group, packed)
        return dict(bucket.unpack(packed))

    @torch.inference_mode()
    def take(self, weights: Mapping[str, Tensor], *, begin: bool, end: bool) -> None:
        """Load a bucket; our worker packs a tied head again."""
        self.updating = self.updating or begin
        self._load(weights)
        if end:
            self._repack()
            self.updating = self.broken = False

    def leave(self) -> None:
        self._group = None

    # --- adapters

    def load_adapter(self, name: str, folder: Path) -> None:
        config = json.loads((folder / "adapter_config.json").read_text())
        self._lora[name] = config, load_file(folder / "adapter_model.safetensors")
        self._models[name] = self._adapted(*self._lora[name])
        self.adapters[name] = folder

    def unload_adapter(self, name: str) -> None:
        """Requests in flight end on it."""
        del self.adapters[name]

    @torch.no_grad()
    def _adapted(self, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> nn.Module:
        """The base with W + scale B A."""
        rank = config["r"]
        scale = config["lora_alpha"] / (rank**0.5 if config.get("use_rslora") else rank)
        model = copy.deepcopy(self.base)
        weights = model.state_dict()
        for name, down in tensors.items():
            if ".lora_A." in name:
                up = tensors[name.replace(".lora_A.", ".lora_B.")]
                plain = name.removeprefix("base_model.model.").replace(".lora_A.", ".")
                weights[plain] += (scale * (up.float() @ down.float())).to(weights[plain].dtype)
        return model
