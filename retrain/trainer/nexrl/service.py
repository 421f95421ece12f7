"""An adapter with a synchronous face: what NexRL's blocking trainers call.

`TrainingService` opens the adapter of a RunConfig on an event loop in a thread of its own, when it
is first needed, and runs one coroutine at a time there for each caller. Inside a pipe's run it is
`attached` to the adapter and loop of that run instead, which then publishes by itself.

Every call has the run's deadline (DeadlineError), and none may come from the loop's own thread,
where it would wait for itself.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any, Self, TypeVar, cast

from pydantic import ValidationError

from retrain.adapters.base import Adapter, AdapterOptions, AdapterState
from retrain.assembly import adapter_of, chat_template, target_of
from retrain.chat import Chat
from retrain.config import RunConfig
from retrain.config.paths import find_model
from retrain.config.problems import problems_of
from retrain.engine.models import load_tokenizer
from retrain.errors import AdapterError, CheckpointError, ConfigError, DeadlineError
from retrain.sampler import SamplingParams, Tokenizer
from retrain.trainer.nexrl.trajectory import Trajectory
from retrain.types import Batch, Completion, Message, Metrics

T = TypeVar("T")
STATE = "state.json"


class TrainingService:
    """The adapter of `run`, for code without an event loop; a context manager that closes it."""

    def __init__(self, run: RunConfig) -> None:
        """Opens nothing yet. Raises ConfigError when the backend can't do what `run` asks for."""
        self.run = run
        self._options = _options(run)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._loop_thread: int | None = None
        self._adapter: Adapter | None = None
        self._chat: Chat | None = None
        self._tokenizer: Tokenizer | None = None
        self._closing: asyncio.Event | None = None
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._groups = count()

    @property
    def opened(self) -> bool:
        return self._adapter is not None

    def open(self) -> None:
        """Load or connect; a second call does nothing.

        Raises ConfigError or AdapterError; after `close`, which let the weights go, AdapterError.
        """
        with self._lock:
            if self._adapter is not None:
                return
            if self._closed:
                raise AdapterError(
                    "the training service is closed, and its weights are gone: make a new trainer, "
                    "and load_checkpoint() what the old one saved"
                )
            started: Future[None] = Future()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._serve(started)), name="retrain-nexrl", daemon=True
            )
            self._thread.start()
            started.result()
            atexit.register(self.close)

    def attach(self, adapter: Adapter, loop: asyncio.AbstractEventLoop) -> None:
        """Use the adapter of a run that is under way on `loop`; called there."""
        self._adapter, self._loop, self._loop_thread = adapter, loop, threading.get_ident()

    def close(self) -> None:
        """Free the backend; a run's own adapter is only let go of."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None and self._loop is not None and self._closing is not None:
                self._loop.call_soon_threadsafe(self._closing.set)
                thread.join()
                atexit.unregister(self.close)
            self._closed = self._closed or self._adapter is not None
            self._adapter = self._loop = self._loop_thread = self._chat = None

    def __enter__(self) -> Self:
        self.open()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- training

    def update(self, batch: Batch) -> Metrics:
        """One optimizer step; the samples come from the new weights after `publish`."""
        return self._call("update", lambda adapter: adapter.update(batch))

    def publish(self) -> None:
        """Let the sampler serve the present weights; in a pipe's run, the pipe does."""
        if self._thread is not None:
            self._call("publish", lambda adapter: adapter.publish())

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """See `Adapter.logprobs`."""
        return self._call(
            "update", lambda adapter: adapter.logprobs(sequences, reference=reference)
        )

    def adjust(self, options: Mapping[str, Any]) -> None:
        """Use other optimizer settings from the next update on, where the backend reads them then.

        Raises ConfigError when a value is none of its options.
        """
        changed = _checked(type(self._options), {**self._options.model_dump(), **options})
        if changed != self._options:
            self.open()
            self._options = changed
            self._adapter.options = changed  # type: ignore[union-attr]  # open; both remote adapters read it at each step

    def save(self, folder: Path) -> None:
        """A checkpoint of weights and optimizer in `folder`; raises AdapterError."""
        folder.mkdir(parents=True, exist_ok=True)
        state = self._call("checkpoint", lambda adapter: adapter.save(folder))
        (folder / STATE).write_text(json.dumps(dict(state.data)), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, before the first update; raises CheckpointError."""
        try:
            data = json.loads((folder / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"there is no whole checkpoint in {folder}: {error}") from error
        state = AdapterState(folder, data)
        self._call("checkpoint", lambda adapter: adapter.load(state))

    # --- texts and samples

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's; loads no model."""
        if self._adapter is not None:
            return self._adapter.tokenizer
        if self._tokenizer is None:
            name = getattr(self._options, "tokenizer", None) or self.run.model
            folder = find_model(name, self.run.base_dir)
            self._tokenizer = cast(Tokenizer, load_tokenizer(folder))
        return self._tokenizer

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding, else its end of sequence, else 0."""
        tokenizer: Any = self.tokenizer  # the padding is outside our Tokenizer's face
        found = getattr(tokenizer, "pad_token_id", None)
        found = tokenizer.eos_token_id if found is None else found
        return 0 if found is None else int(found)

    def encode(self, trajectory: Mapping[str, Any]) -> tuple[list[int], list[int]]:
        """The ids and the loss mask of a text trajectory: its prompt, then its response.

        Both in the model's chat template, the end of the turn included unless `finish_reason` is
        `length`. Raises ValueError when one of the texts is missing.
        """
        prompt, response = trajectory.get("prompt"), trajectory.get("response")
        if prompt is None or not isinstance(response, str):
            raise ValueError(
                "a trajectory has neither `tokens` and `loss_mask` nor the texts `prompt` and "
                f"`response`; it has {', '.join(trajectory) or 'nothing'}"
            )
        conversation = self.chat.begin(_messages(prompt))
        reply: Message = {"role": "assistant", "content": response}
        ids = conversation.spell(reply)
        if trajectory.get("finish_reason") == "length" and ids[-1] in self.chat.stop_token_ids:
            ids = ids[:-1]
        given = list(conversation.prompt_ids)
        return given + list(ids), [0] * len(given) + [1] * len(ids)

    def sample(
        self,
        prompt: str | Sequence[Message],
        n: int = 1,
        *,
        seed: int | None = None,
        **parameters: Any,  # SamplingParams' own
    ) -> list[Trajectory]:
        """A group of `n` rollouts of one prompt by the published weights, not yet rewarded.

        `parameters` (max_tokens, temperature, top_p, top_k, stop) override the run's `sampling`.
        """
        self.open()
        ids = self.chat.begin(_messages(prompt)).prompt_ids
        wanted = self.run.sampling
        room = self._opened().context_length - len(ids)
        params = SamplingParams(
            wanted.max_tokens, wanted.temperature, wanted.top_p, wanted.top_k, wanted.stop
        )
        params = replace(params, **parameters)
        params = replace(
            params,
            max_tokens=min(params.max_tokens, room),
            stop_token_ids=self.chat.stop_token_ids,
            seed=seed,
        )
        found = self._call("sample", lambda adapter: adapter.sampler.sample(ids, params, n))
        group = f"group_{next(self._groups)}"
        return [
            _sampled(prompt, ids, completion, group, index)
            for index, completion in enumerate(found)
        ]

    @property
    def chat(self) -> Chat:
        """The model's way from messages to ids."""
        if self._chat is None:
            self._chat = Chat(
                self.tokenizer,
                template=chat_template(self.run),
                arguments=self.run.chat.arguments,
            )
        return self._chat

    # --- the loop

    def _call(self, stage: str, call: Callable[[Adapter], Coroutine[Any, Any, T]]) -> T:
        self.open()
        adapter, loop = self._opened(), self._loop
        assert loop is not None
        if threading.get_ident() == self._loop_thread:
            raise AdapterError(
                "a trainer was called on the event loop that its backend runs on, where it would "
                "wait for itself: call it in a thread (asyncio.to_thread)"
            )
        future = asyncio.run_coroutine_threadsafe(self._within(stage, call(adapter)), loop)
        return future.result()

    async def _within(self, stage: str, call: Coroutine[Any, Any, T]) -> T:
        seconds: float = getattr(self.run.deadlines, stage)
        try:
            async with asyncio.timeout(seconds):
                return await call
        except TimeoutError as error:
            if isinstance(error, DeadlineError):
                raise
            raise DeadlineError(f"the {stage} took longer than {seconds} s") from error

    def _opened(self) -> Adapter:
        if self._adapter is None:
            raise AdapterError("the training service is closed")
        return self._adapter

    async def _serve(self, started: Future[None]) -> None:
        """Open the adapter, tell so, and keep it until `close`."""
        try:
            async with adapter_of(self._options, self.run) as opened:
                self._loop, self._closing = asyncio.get_running_loop(), asyncio.Event()
                self._adapter, self._loop_thread = opened, threading.get_ident()
                started.set_result(None)
                await self._closing.wait()
        except BaseException as error:
            if started.done():
                raise
            started.set_exception(error)


def _options(run: RunConfig) -> AdapterOptions:
    kind: type[AdapterOptions] = target_of("backend", run.backend, "backend", run)
    made = _checked(kind, run.backend.arguments)
    problems = made.problems(run)
    loss, able = run.algorithm.loss or "", made.capabilities()
    if loss not in able.losses | able.surrogate_losses and ":" not in loss:
        problems.append(
            f"trainer.train_service.config.loss_fn: the {run.backend.type} backend has no loss "
            f"{loss!r}: it has {', '.join(sorted(able.losses | able.surrogate_losses))}"
        )
    if problems:
        raise ConfigError(*problems)
    return made


def _checked(kind: type[AdapterOptions], keys: Mapping[str, Any]) -> AdapterOptions:
    try:
        return kind.model_validate(keys)
    except ValidationError as error:
        where = "trainer.train_service.config"
        raise ConfigError(*problems_of(error, kind, prefix=where)) from None


def _messages(prompt: str | Sequence[Message]) -> Sequence[Message]:
    return [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt


def _sampled(
    prompt: str | Sequence[Message],
    prompt_ids: Sequence[int],
    completion: Completion,
    group: str,
    index: int,
) -> Trajectory:
    given, made = len(prompt_ids), len(completion.token_ids)
    return Trajectory(
        prompt=prompt,
        response=completion.text,
        tokens=[*prompt_ids, *completion.token_ids],
        loss_mask=[0] * given + [1] * made,
        logprobs=[0.0] * given + list(completion.logprobs),
        versions=[-1] * given + [completion.version] * made,
        group_id=group,
        run_id=index,
        finish_reason=completion.stop_reason,
        is_truncated=completion.stop_reason != "stop",
    )
