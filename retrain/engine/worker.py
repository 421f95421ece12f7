"""The thread that decodes: it owns the weights, and only it runs the model.

Requests wait in order until their rows fit within `max_rows`, and join between two passes. New
weights start a new generation at once: later requests use it, while running rows finish on the
generation that they began with, whose buffers are then reused. A failure fails all waiting and
all later requests.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import copy
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from retrain.engine.decoder import Decoder, QueuedRequest, SamplerStats
from retrain.engine.fused import FusedStep, fused_step
from retrain.engine.kv_cache import shares_rows
from retrain.engine.weights import check_weights, copy_weights
from retrain.errors import AdapterError
from retrain.sampler import Tokenizer


@dataclass(slots=True, eq=False)
class WorkerCall:
    """A function to run between two passes, such as a change of weights."""

    run: Callable[[], Any]  # returns the result of the future
    future: asyncio.Future[Any]


@dataclass(slots=True)
class Generation:
    """One version's weights and the batches that decode on them."""

    model: PreTrainedModel
    version: int
    decoders: list[Decoder] = field(default_factory=list)
    fused: FusedStep | None = field(init=False)

    def __post_init__(self) -> None:
        self.fused = fused_step(self.model)

    @property
    def rows(self) -> int:
        return sum(len(decoder.rows) for decoder in self.decoders)

    def step(self, keep_empty: bool) -> list[QueuedRequest]:
        """One pass of every batch; without `keep_empty`, drops the batches that it finishes."""
        done = [request for decoder in self.decoders for request in decoder.step()]
        self.decoders = [one for one in self.decoders if keep_empty or one.rows]
        return done


class Worker:
    """Takes requests and calls from any thread; results go to the loops of their futures."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: Tokenizer,
        *,
        max_rows: int,
        isolate: bool,
        threads: int,
    ) -> None:
        self.max_rows = max_rows
        self._tokenizer = tokenizer
        self._alone = isolate or not shares_rows(model.config.get_text_config())
        self.stats = SamplerStats()
        self.current = Generation(model, 0)
        self._draining: list[Generation] = []
        self._spare: Generation | None = None
        self._waiting: deque[QueuedRequest] = deque()
        self._open: weakref.WeakSet[QueuedRequest] = weakref.WeakSet()  # frees cancelled ones
        self._inbox: queue.SimpleQueue[Sequence[QueuedRequest | WorkerCall]] = queue.SimpleQueue()
        self._gate = threading.Lock()  # held by submit and by the end of the thread
        self._failure: AdapterError | None = None
        self._closing = False
        self._farewells: list[asyncio.Future[None]] = []  # of callers that wait for the end
        self._thread = threading.Thread(
            target=self._run, args=(threads,), name="retrain-sampler", daemon=True
        )

    @property
    def started(self) -> bool:
        return self._thread.ident is not None

    @property
    def failed(self) -> bool:
        """The thread ended without `close`."""
        return self._failure is not None and not self._closing

    def start(self) -> None:
        """Start the thread; it ends with `close`, or before the interpreter exits."""
        self._thread.start()
        atexit.register(self._end_before_exit)

    def submit(self, items: Sequence[QueuedRequest | WorkerCall]) -> None:
        """Queue items together; if the worker has ended, their futures get AdapterError."""
        with self._gate:
            if self._failure is None:
                self._inbox.put(items)
                return
        for item in items:
            _resolve(item.future, error=self._repeated())

    async def close(self) -> None:
        """End the thread after the current pass and fail waiting items.

        May be cancelled or called again. No executor thread waits for the end, since it could not
        be abandoned if a pass hangs.
        """
        ended = asyncio.get_running_loop().create_future()
        with self._gate:
            self._closing = True
            if self.started and self._failure is None:
                self._farewells.append(ended)
                self._inbox.put(())
            else:
                ended.set_result(None)
        await ended
        if self.started:
            self._thread.join(1.0)  # it has nothing left to do
        atexit.unregister(self._end_before_exit)

    def _end_before_exit(self) -> None:
        self._closing = True
        self._inbox.put(())
        self._thread.join(2.0)

    def publish(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Serve `weights` from now on; run as a WorkerCall."""
        check_weights(self.current.model, weights)
        target = self.current
        if target.rows:
            target = self._spare or Generation(copy.deepcopy(target.model), version)
        copy_weights(target.model, weights)
        target.version = version
        for decoder in target.decoders:
            decoder.version = version
        if target is not self.current:
            self._spare = None
            self._draining.append(self.current)
            self.current = target

    @torch.inference_mode()
    def _run(self, threads: int) -> None:
        torch.set_num_threads(threads)
        try:
            while not self._closing:
                self._take(wait=not (self._waiting or self.stats.rows))
                self._admit()
                self._step()
            self._end(AdapterError("the sampler was closed"))
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread, nobody may hang
            failure = AdapterError(f"the sampler's worker failed: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._end(failure)

    def _take(self, wait: bool) -> None:
        """Read the inbox: queue requests, run calls."""
        while wait or not self._inbox.empty():
            wait = False
            for item in self._inbox.get():
                if isinstance(item, QueuedRequest):
                    self._waiting.append(item)
                    self._open.add(item)
                else:
                    self._call(item)

    def _call(self, call: WorkerCall) -> None:
        try:
            result = call.run()
        except Exception as error:  # noqa: BLE001 - it belongs to whoever asked
            _resolve(call.future, error=error)
        else:
            _resolve(call.future, result)

    def _admit(self) -> None:
        """Admit requests in order while their rows fit."""
        batch: list[QueuedRequest] = []
        room = self.max_rows - self.stats.rows
        while self._waiting:
            request = self._waiting[0]
            if not request.cancelled:
                if len(request.keys) > room:
                    break
                batch.append(request)
                room -= len(request.keys)
            self._waiting.popleft()
        current, size = self.current, 1 if self._alone else len(batch)
        for first in range(0, len(batch), size or 1):
            if self._alone or not current.decoders:
                decoder = Decoder(
                    current.model,
                    self._tokenizer,
                    current.version,
                    self.stats,
                    self.max_rows,
                    current.fused,
                )
                current.decoders.append(decoder)
            self._finish(current.decoders[-1].admit(batch[first : first + size]))

    def _step(self) -> None:
        """One pass of every batch; keeps one generation without rows as the spare."""
        done: list[QueuedRequest] = []
        for generation in (*self._draining, self.current):
            done += generation.step(keep_empty=not self._alone)
        drained = [generation for generation in self._draining if not generation.rows]
        self._draining = [generation for generation in self._draining if generation.rows]
        self._spare = self._spare or next(iter(drained), None)
        self.stats.rows = sum(g.rows for g in (*self._draining, self.current))
        self._finish(done)

    def _finish(self, requests: Sequence[QueuedRequest]) -> None:
        for request in requests:
            self._open.discard(request)
            _resolve(request.future, request.completions)

    def _end(self, failure: AdapterError) -> None:
        """Fail all waiting items; the gate prevents new ones."""
        with self._gate:
            self._failure = failure
        left: list[QueuedRequest | WorkerCall] = [*self._open]
        while not self._inbox.empty():
            left += self._inbox.get()
        for item in left:
            _resolve(item.future, error=self._repeated())
        for future in self._farewells:
            _resolve(future)

    def _repeated(self) -> AdapterError:
        """A copy of the failure: raising one exception in several places mixes their tracebacks."""
        again = AdapterError(*self._failure.args if self._failure else ())
        again.__cause__ = self._failure and self._failure.__cause__
        return again


def _resolve(
    future: asyncio.Future[Any], result: object = None, error: Exception | None = None
) -> None:
    """Set a future from this thread, unless it is already done."""

    def settle() -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)

    with contextlib.suppress(RuntimeError):  # its loop is closed
        future.get_loop().call_soon_threadsafe(settle)
