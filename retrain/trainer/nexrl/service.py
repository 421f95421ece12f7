"""An adapter that blocking code can call: what NexRL's trainers train through.

`TrainingService` opens the adapter of a RunConfig on an event loop in a thread of its own, when it
is first needed. Inside a run of the pipe it is attached to the adapter and event loop of that run,
and the pipe publishes the weights.

Every call has the deadline of the run (DeadlineError). A call from the event loop's own thread
raises AdapterError, since it would block the loop that has to answer it.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import threading
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from itertools import count
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from retrain.adapters.base import Adapter, AdapterOptions, AdapterState
from retrain.algorithms.batching import batch_of
from retrain.assembly import adapter_of, chat_template, target_of, tool_format
from retrain.chat import Chat
from retrain.config import RunConfig
from retrain.config.paths import find_model
from retrain.config.problems import problems_of
from retrain.engine.models import load_tokenizer
from retrain.errors import AdapterError, CheckpointError, ConfigError
from retrain.sampler import SamplingParams, Tokenizer
from retrain.supervision.boundary import adapter_call
from retrain.trainer.nexrl.datums import nothing_to_train
from retrain.trainer.nexrl.trajectory import Trajectory
from retrain.types import Message, Metrics, Sample

T = TypeVar("T")
STATE = "state.json"


class TrainingService:
    """The adapter of `run`, for code without an event loop."""

    def __init__(self, run: RunConfig) -> None:
        """Opens nothing. Raises ConfigError when the backend doesn't support what `run` needs."""
        self.use(run)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._adapter: Adapter | None = None
        self._closing = asyncio.Event()
        self._thread: threading.Thread | None = None
        self._closed = False
        self._lock = threading.Lock()
        self._groups = count()

    def use(self, run: RunConfig) -> None:
        """Set the config, before the first use."""
        self.run = run
        self._options = _options(run)
        self._chat: Chat | None = None
        self._tokenizer: Tokenizer | None = None

    @property
    def used(self) -> bool:
        return self._closed or self._adapter is not None

    def open(self) -> None:
        """Load or connect. Does nothing when it is open.

        Raises ConfigError or AdapterError. It can't be opened again after `close`: AdapterError.
        """
        with self._lock:
            if self._adapter is not None:
                return
            if self._closed:
                raise AdapterError(
                    "the training service is closed, and its weights are gone: create a new "
                    "trainer, and load the old one's checkpoint with load_checkpoint()"
                )
            started: Future[None] = Future()
            self._thread = threading.Thread(
                target=lambda: asyncio.run(self._serve(started)), name="retrain-nexrl", daemon=True
            )
            self._thread.start()
            started.result()
            atexit.register(self.close)

    def attach(self, adapter: Adapter, loop: asyncio.AbstractEventLoop) -> None:
        """Use the adapter of a run that is under way on `loop`."""
        self._adapter, self._loop = adapter, loop

    def close(self) -> None:
        """Close the adapter; the adapter of a run is left to the run."""
        with self._lock:
            thread, self._thread = self._thread, None
            if thread is not None and self._loop is not None:
                self._loop.call_soon_threadsafe(self._closing.set)
                thread.join()
                atexit.unregister(self.close)
            self._closed = self.used
            self._adapter = self._loop = self._chat = None

    # --- training

    def update(self, samples: Sequence[Sample], **changes: Any) -> Metrics:
        """Take one optimizer step over the samples and serve the new weights.

        `changes` replace the run's `loss`, `loss_config` or `normalisation`. When every advantage
        is 0, trains nothing and returns `training/skipped`: 1.
        """
        if not any(any(sample.advantages) for sample in samples):
            return {"training/skipped": 1.0}
        own = self.run.algorithm
        keys = {name: getattr(own, name) for name in ("loss", "loss_config", "normalisation")}
        batch = batch_of(samples, **{**keys, **changes})
        metrics = self._call("update", lambda adapter: adapter.update(batch))
        if self._thread is not None:  # in a run of the pipe, the pipe publishes
            self._call("publish", lambda adapter: adapter.publish())
        return metrics

    def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """See `Adapter.logprobs`."""
        return self._call(
            "update", lambda adapter: adapter.logprobs(sequences, reference=reference)
        )

    def adjust(self, options: Mapping[str, Any]) -> None:
        """Change options of the optimizer from the next update on, on backends that support it.

        Raises ConfigError for a value that the options don't allow.
        """
        changed = _checked(type(self._options), {**self._options.model_dump(), **options})
        if changed != self._options:
            self.open()
            self._options = changed
            self._adapter.options = changed  # type: ignore[union-attr]  # open; both remote adapters read it at each step

    def save(self, folder: Path) -> None:
        """Write a checkpoint of weights and optimizer to `folder`. Raises AdapterError."""
        folder.mkdir(parents=True, exist_ok=True)
        state = self._call("checkpoint", lambda adapter: adapter.save(folder))
        (folder / STATE).write_text(json.dumps(dict(state.data)), encoding="utf-8")

    def load(self, folder: Path) -> None:
        """Continue from a checkpoint, before the first update. Raises CheckpointError."""
        try:
            data = json.loads((folder / STATE).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise CheckpointError(f"no complete checkpoint in {folder}: {error}") from error
        state = AdapterState(folder, data)
        self._call("checkpoint", lambda adapter: adapter.load(state))

    # --- strings and rollouts

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the model, which is not loaded for it."""
        if self._adapter is not None:
            return self._adapter.tokenizer
        if self._tokenizer is None:
            name = getattr(self._options, "tokenizer", None) or self.run.model
            folder = find_model(name, self.run.base_dir)
            self._tokenizer = cast(Tokenizer, load_tokenizer(folder))
        return self._tokenizer

    @property
    def pad_token_id(self) -> int:
        """The tokenizer's padding token, else its end-of-sequence token, else 0."""
        tokenizer = self.tokenizer  # pad_token_id is not part of our Tokenizer protocol
        found = getattr(tokenizer, "pad_token_id", None)
        return int((tokenizer.eos_token_id if found is None else found) or 0)

    def encode(self, trajectory: Mapping[str, Any]) -> dict[str, list[int]]:
        """`tokens` and `loss_mask` of a trajectory of strings; empty if it has them.

        Prompt and response are rendered in the model's chat template. The end of the turn is
        included, unless `finish_reason` is `length`. Raises ValueError when a string is missing.
        """
        if trajectory.get("tokens") is not None and trajectory.get("loss_mask") is not None:
            return {}
        prompt, response = trajectory.get("prompt"), trajectory.get("response")
        if prompt is None or not isinstance(response, str):
            raise nothing_to_train(trajectory)
        conversation = self.chat.begin(_messages(prompt))
        reply: Message = {"role": "assistant", "content": response}
        ids = conversation.spell(reply)
        if trajectory.get("finish_reason") == "length" and ids[-1] in self.chat.stop_token_ids:
            ids = ids[:-1]
        given = list(conversation.prompt_ids)
        return {"tokens": [*given, *ids], "loss_mask": [0] * len(given) + [1] * len(ids)}

    def sample(
        self,
        prompt: str | Sequence[Message],
        n: int = 1,
        **parameters: Any,  # SamplingParams' own
    ) -> list[Trajectory]:
        """Sample a group of `n` rollouts of one prompt with the served weights, without rewards.

        `parameters` (max_tokens, temperature, top_p, top_k, stop, seed) override `sampling`.
        """
        self.open()
        ids = list(self.chat.begin(_messages(prompt)).prompt_ids)
        room = self._opened().context_length - len(ids)
        wanted = {**dict(self.run.sampling), **parameters}
        wanted["max_tokens"] = min(wanted["max_tokens"], room)
        params = SamplingParams(**wanted, stop_token_ids=self.chat.stop_token_ids)
        found = self._call("sample", lambda adapter: adapter.sampler.sample(ids, params, n))
        group, given = f"group_{next(self._groups)}", len(ids)
        return [
            Trajectory(
                prompt=prompt,
                response=completion.text,
                tokens=[*ids, *completion.token_ids],
                loss_mask=[0] * given + [1] * len(completion.token_ids),
                logprobs=[0.0] * given + list(completion.logprobs),
                versions=[-1] * given + [completion.version] * len(completion.token_ids),
                group_id=group,
                run_id=index,
                finish_reason=completion.stop_reason,
                is_truncated=completion.stop_reason != "stop",
            )
            for index, completion in enumerate(found)
        ]

    @property
    def chat(self) -> Chat:
        """Converts messages to token ids."""
        if self._chat is None:
            template, arguments = chat_template(self.run), self.run.chat.arguments
            tools = tool_format(self.run)
            self._chat = Chat(self.tokenizer, template=template, arguments=arguments, tools=tools)
        return self._chat

    # --- the event loop

    def _call(self, stage: str, call: Callable[[Adapter], Coroutine[Any, Any, T]]) -> T:
        self.open()
        adapter, loop = self._opened(), self._loop
        assert loop is not None
        if asyncio._get_running_loop() is loop:
            raise AdapterError(
                "a trainer was called on the event loop of its backend, which would deadlock: "
                "call it in a thread (asyncio.to_thread)"
            )
        seconds = getattr(self.run.deadlines, stage)
        bounded = adapter_call(f"the adapter's {stage}", call(adapter), seconds, stage)
        return asyncio.run_coroutine_threadsafe(bounded, loop).result()

    def _opened(self) -> Adapter:
        if self._adapter is None:
            raise AdapterError("the training service is closed")
        return self._adapter

    async def _serve(self, started: Future[None]) -> None:
        """Open the adapter, and keep it open until `close`."""
        try:
            async with adapter_of(self._options, self.run) as opened:
                self.attach(opened, asyncio.get_running_loop())
                started.set_result(None)
                await self._closing.wait()
        except (Exception, SystemExit) as error:
            if started.done():
                raise
            started.set_exception(error)


def _options(run: RunConfig) -> AdapterOptions:
    kind: type[AdapterOptions] = target_of("backend", run.backend, "backend", run)
    made = _checked(kind, run.backend.arguments)
    problems = made.problems(run)
    loss, able = run.algorithm.loss or "", made.capabilities()
    if loss not in able.losses and ":" not in loss:
        problems.append(
            f"trainer.train_service.config.loss_fn: backend {run.backend.type} has no loss "
            f"{loss!r}; expected one of {', '.join(sorted(able.losses))}"
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
