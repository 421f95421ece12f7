"""The local backend: TRL's GRPOTrainer in a worker thread, and a sampler with its own weights.

`update` passes a batch to the thread and waits for its optimizer step. `publish` copies the weights
between two steps and gives them to the sampler. `save` and `load` use TRL's own checkpoints, so a
resumed run equals the uninterrupted one bit by bit.
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any, Self

from retrain.adapters.base import Adapter, AdapterState
from retrain.adapters.trl.build import build_trainer, hush, place
from retrain.adapters.trl.options import TrlOptions
from retrain.adapters.trl.plan import run_plan
from retrain.adapters.trl.rows import check_samples
from retrain.adapters.trl.worker import Job, TrainerThread
from retrain.config import RunConfig
from retrain.engine.models import load_model, load_tokenizer, resolve_model
from retrain.engine.sampler import LocalSampler
from retrain.engine.weights import snapshot
from retrain.errors import AdapterError, CheckpointError, RetrainError
from retrain.observe.upkeep import scratch
from retrain.types import Batch, Metrics

CLOSE_SECONDS = 60.0


class TrlAdapter(Adapter):
    """Trains `config.model` on this machine, on CUDA if available."""

    sampler: LocalSampler

    def __init__(self, options: TrlOptions, config: RunConfig) -> None:
        self.options = options
        self.config = config
        self.capabilities = options.capabilities()
        self.plan = run_plan(config)
        self._version = 0
        self._reference: LocalSampler | None = None
        self._reference_turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Load the model twice, to train and to sample, in the trainer's thread.

        Raises ConfigError when the model, the device or an argument can't be used.
        """
        loop = asyncio.get_running_loop()
        self._folder = resolve_model(self.config.model, self.config.base_dir)
        self._scratch = scratch(self.config.run_dir)
        self._thread = TrainerThread(
            self._build, alive=lambda: not loop.is_closed(), threads=self.options.threads
        )
        self._thread.start()
        try:
            await asyncio.wrap_future(self._thread.started)
            self.sampler = await LocalSampler(
                self._plain_model,
                self.tokenizer,
                max_rows=self.options.max_rows,
                isolate=self.config.train.order == "in_order",
                threads=self.options.threads,
            ).__aenter__()
            del self._plain_model  # the sampler has its own copy
        except BaseException:
            await self._end_thread()
            raise
        return self

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        try:
            if self._reference is not None:
                await self._reference.close()
            await self.sampler.close()
        finally:
            await self._end_thread()

    async def update(self, batch: Batch) -> Metrics:
        """One optimizer step over the whole batch, micro-batch by micro-batch.

        Raises ValueError when there is no token to train or the loss is not the run's, and
        NonFiniteError when a loss or gradient is NaN or infinite (the weights are then unchanged).
        """
        if batch.loss != self.plan.name:
            raise ValueError(
                f"the batch's loss is {batch.loss!r}, but the run's is {self.plan.name!r}"
            )
        check_samples(batch.samples)
        metrics: Metrics = await self._submit(Job(batch=batch))
        return metrics

    async def publish(self) -> int:
        weights = await self._in_thread(lambda: snapshot(self._thread.trainer.model))
        self._version += 1
        await self.sampler.load_weights(weights, self._version)
        return self._version

    async def save(self, folder: Path) -> AdapterState:
        """Write TRL's checkpoint to a separate folder below `folder`."""
        name = await self._in_thread(lambda: self._save(folder), needs_optimizer=True)
        return AdapterState(folder, {"checkpoint": name, "version": self._version})

    async def load(self, state: AdapterState) -> None:
        """Continue from `state`; only before the first update."""
        checkpoint = state.folder / str(state.data["checkpoint"])
        if not checkpoint.is_dir():
            raise AdapterError(f"no checkpoint in {checkpoint}; use an older one")
        await self._submit(Job(checkpoint=checkpoint))
        weights = await self._in_thread(lambda: snapshot(self._thread.trainer.model))
        self._version = int(state.data["version"])
        await self.sampler.load_weights(weights, self._version)

    async def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """The reference is the model in its folder, loaded at the first call that needs it."""
        scorer = await self._start() if reference else self.sampler
        return await scorer.logprobs_of(sequences)

    async def _start(self) -> LocalSampler:
        async with self._reference_turn:
            if self._reference is None:
                placement = place(self.options)
                model = await asyncio.to_thread(
                    load_model, self._folder, placement.device, placement.frozen_dtype
                )
                self._reference = await LocalSampler(
                    model, self.tokenizer, threads=self.options.threads
                ).__aenter__()
        return self._reference

    async def export(self, folder: Path) -> Path:
        """Write a Hugging Face folder with the tokenizer; only LoRA's, unless merge_lora is set."""
        await self._in_thread(lambda: self._export(folder))
        return folder

    # --- in the thread

    def _build(self, thread: TrainerThread) -> Any:  # a PipeTrainer; mypy sees no TRL types
        hush()
        placement = place(self.options)
        self.tokenizer = load_tokenizer(self._folder)
        self._plain_model = load_model(self._folder, placement.device, placement.frozen_dtype)
        text = self._plain_model.config.get_text_config()
        self.context_length = int(text.max_position_embeddings)
        return build_trainer(
            self.options,
            self.config,
            self.plan,
            folder=self._folder,
            tokenizer=self.tokenizer,
            scratch=Path(self._scratch.name),
            feed=thread,
        )

    def _save(self, folder: Path) -> str:
        """Raises CheckpointError, since torch's own error does not say that the disk is full."""
        try:
            return str(self._thread.trainer.save_to(folder))
        except RuntimeError as error:
            free = shutil.disk_usage(folder).free / 1e6
            raise CheckpointError(
                f"could not write the checkpoint: {error}. {free:,.1f} MB are free on the disk of "
                f"{folder}; free some space, then continue with --resume"
            ) from error

    def _export(self, folder: Path) -> None:
        model = self._thread.trainer.model
        if self.options.lora is not None and self.config.checkpoint.merge_lora:
            merged = load_model(self._folder, "cpu", place(self.options).frozen_dtype)
            merged.load_state_dict(snapshot(model))
            model = merged
        for pattern in ("*.safetensors*", "config.json", "adapter_config.json"):
            for old in folder.glob(pattern):  # LoRA weights beside a model would be loaded onto it
                old.unlink()
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)

    # --- from the event loop to the thread

    async def _in_thread(self, call: Callable[[], Any], *, needs_optimizer: bool = False) -> Any:
        return await self._submit(Job(call=call, needs_optimizer=needs_optimizer))

    async def _submit(self, job: Job) -> Any:
        future: Future[Any] = self._thread.submit(job)
        try:
            return await asyncio.wrap_future(future)
        except (RetrainError, asyncio.CancelledError):
            raise
        except Exception as error:
            raise AdapterError(f"the trainer failed: {type(error).__name__}: {error}") from error

    async def _end_thread(self) -> None:
        self._thread.stop()
        try:
            async with asyncio.timeout(CLOSE_SECONDS):
                await asyncio.wrap_future(self._thread.ended)
            self._thread.join()
        except TimeoutError as error:
            raise AdapterError(
                f"the trainer's thread is still in a forward pass after {CLOSE_SECONDS:.0f} s"
            ) from error
        finally:
            self._scratch.cleanup()
