"""The local backend: TRL's GRPOTrainer in a worker thread, and a sampler with its own weights.

`update` passes a batch to the thread and waits for its optimizer step. `publish` copies the weights
between two steps and gives them to the sampler. `save` and `load` use TRL's own checkpoints, so a
resumed run equals the uninterrupted one bit by bit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, AsyncExitStack
from pathlib import Path
from typing import Any, Self, cast

from retrain.adapters.base import Adapter, AdapterState
from retrain.adapters.trl.build import build_trainer, hush, place_model
from retrain.adapters.trl.options import TrlOptions
from retrain.adapters.trl.plan import run_plan
from retrain.adapters.trl.ranks.contract import Place, launched
from retrain.adapters.trl.ranks.crew import STOP_SECONDS, Crew
from retrain.adapters.trl.ranks.group import Ranks, lost_peer
from retrain.adapters.trl.rows import check_samples
from retrain.adapters.trl.together import together
from retrain.adapters.trl.worker import TrainerJob, TrainerThread
from retrain.config import RunConfig
from retrain.engine.models import load_model, load_tokenizer, resolve_model
from retrain.engine.sampler import LocalSampler
from retrain.errors import AdapterError, CheckpointError, ConfigError, RetrainError
from retrain.observe.upkeep import scratch
from retrain.sampler import Tokenizer
from retrain.supervision.starting import announced
from retrain.types import Batch, Metrics
from retrain.vllm.checks import PROBE, check_logprobs, probe_of
from retrain.vllm.client import AdapterSlots
from retrain.vllm.opening import Opening, open_vllm
from retrain.vllm.options import VllmOptions
from retrain.vllm.sampler import VllmSampler

CLOSE_SECONDS = 60.0
RANKS_SECONDS = 5.0
"""How long the trainer of several processes may take to end by itself."""


class TrlAdapter(Adapter):
    """Trains `config.model` on this machine, on CUDA if available."""

    sampler: LocalSampler | VllmSampler

    def __init__(self, options: TrlOptions, config: RunConfig) -> None:
        self.options = options
        self.config = config
        self.capabilities = options.capabilities()
        self.plan = run_plan(config)
        self._version = 0
        self._place: Place | None = None
        self._crew: Crew | None = None
        self._reference: LocalSampler | None = None
        self._reference_turn = asyncio.Lock()

    async def __aenter__(self) -> Self:
        """Load the model in the trainer's thread: to train and, for the local sampler, to sample.

        vLLM servers start beside it. Raises ConfigError when the model, the device, an argument or
        a server can't be used.
        """
        self._folder = resolve_model(self.config.model, self.config.base_dir)
        self._scratch = scratch(self.config.run_dir)
        loop = asyncio.get_running_loop()
        self._thread = TrainerThread(
            self._build,
            alive=lambda: not loop.is_closed(),
            threads=self.options.threads,
            meet=self._meet,
        )
        async with AsyncExitStack() as failed:
            failed.push_async_callback(self._end_thread)
            await self._start_ranks()
            self._thread.start()
            ranks = range(1, self._crew.place.size) if self._crew else ()
            what = f"starting {len(ranks) + 1} processes" if ranks else "loading the model"
            logs = [self._crew.log(rank) for rank in ranks] if self._crew else []
            async with announced(what, logs):
                await self._answer(self._thread.started)
            await self._open_sampler()
            failed.pop_all()
        return self

    async def _start_ranks(self) -> None:
        """Find this process's place: the launcher's, or that of the leader of a crew."""
        self._place = launched()
        if self._place is not None and self._place.rank > 0:
            raise ConfigError(
                f"rank {self._place.rank} of the launcher can't run the training loop; only rank "
                "0 does. Start the run as `torchrun --nproc_per_node N -m retrain.run "
                "config.yaml`"
            )
        if self._place is not None or self.options.processes == 1:
            return
        self._crew = await Crew.start(
            self.options.processes,
            self.options.follower,
            (self.options, self.config),
            folder=Path(self._scratch.name),
            lost=self._thread.fail,
        )
        self._place = self._crew.place

    async def _open_sampler(self) -> None:
        """Create `self.sampler`, which serves the initial weights as version 0."""
        if isinstance(self.options.sampler, VllmOptions):
            await self._open_vllm(self.options.sampler)
            return
        self.sampler = await LocalSampler(
            self._plain_model,
            self.tokenizer,
            max_rows=self.options.max_rows,
            isolate=self.config.train.order == "in_order",
            threads=self.options.threads,
        ).__aenter__()
        del self._plain_model  # the sampler has its own copy

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
        metrics: Metrics = await self._submit(TrainerJob(batch=batch))
        return metrics

    async def publish(self) -> int:
        await self._push(self._version + 1)
        self._version += 1
        return self._version

    def pinned(self) -> AbstractContextManager[VllmSampler] | None:
        """Only adapters on vLLM servers have names; other weights replace those before them."""
        if isinstance(self.sampler, VllmSampler) and self.sampler.wants_lora:
            return self.sampler.pinned()
        return None

    async def _push(self, version: int) -> None:
        """Make the sampler serve the trainer's weights as `version`."""
        wanted = "lora_weights" if self.sampler.wants_lora else "weights"
        await self.sampler.load_weights(await self._in_thread(wanted), version)

    async def save(self, folder: Path) -> AdapterState:
        """Write TRL's checkpoint to a separate folder below `folder`."""
        name = await self._in_thread("save_to", folder, needs_optimizer=True)
        return AdapterState(
            folder,
            {"checkpoint": name, "version": self._version, "sharding": self.options.sharding},
        )

    async def load(self, state: AdapterState) -> None:
        """Continue from `state`; only before the first update.

        Raises CheckpointError if it was saved without `sharding`, and this run shards.
        """
        checkpoint = state.folder / str(state.data["checkpoint"])
        if not checkpoint.is_dir():
            raise AdapterError(f"no checkpoint in {checkpoint}; use an older one")
        if (state.data.get("sharding", "none"), self.options.sharding) == ("none", "full"):
            raise CheckpointError(
                f"the checkpoint in {checkpoint} was saved with backend.sharding: none, but the "
                "run has full; set it to none, or start a new run from an exported model"
            )
        await self._submit(TrainerJob(checkpoint=checkpoint))
        self._version = int(state.data["version"])
        await self._push(self._version)

    async def _open_vllm(self, options: VllmOptions) -> None:
        """Open the servers, publish version 0, and compare log-probs with the trainer's."""
        config, lora, scratch = self.config, self.options.lora, Path(self._scratch.name)
        versions = config.staleness.bound + 2 + (config.eval is not None)  # in use at the same time
        opening = Opening(
            self._folder,
            self._thread.trainer.model,
            self.tokenizer,
            dtype=place_model(self.options).frozen_dtype,
            scratch=scratch,
            logs=config.run_dir if config.run_dir and config.run_dir.is_dir() else scratch,
            base_dir=config.base_dir,
            lora=AdapterSlots(lora.r, versions) if lora else None,
            tokens=config.rollout.max_sequence_length or 2,
            outage_seconds=config.deadlines.outage,
            publish_seconds=config.deadlines.publish,
        )
        sampler: VllmSampler = await open_vllm(options, opening)
        self.sampler = sampler
        async with AsyncExitStack() as failed:
            failed.push_async_callback(sampler.close)
            assert sampler.context_length is not None
            self.context_length = sampler.context_length
            await self._push(self._version)
            probe = probe_of(self.tokenizer.encode(PROBE), sampler.vocabulary)
            [expected] = await self.own_logprobs([probe])
            await check_logprobs(sampler, probe, expected, options.check)
            failed.pop_all()

    async def logprobs(
        self, sequences: Sequence[Sequence[int]], *, reference: bool = False
    ) -> list[list[float]]:
        """The reference is the model in its folder, loaded here at the first call that needs it,
        whatever samples."""
        scorer = await self._start() if reference else self.sampler
        return await scorer.logprobs_of(sequences)

    async def own_logprobs(self, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
        return [await self._in_thread("scores", token_ids) for token_ids in sequences]

    async def _start(self) -> LocalSampler:
        async with self._reference_turn:
            if self._reference is None:
                placement = place_model(self.options, self._place)
                model = await asyncio.to_thread(
                    load_model,
                    self._folder,
                    placement.device,
                    placement.frozen_dtype,
                    self.options.attention,
                )
                self._reference = await LocalSampler(
                    model, self.tokenizer, threads=self.options.threads
                ).__aenter__()
        return self._reference

    def stop_retrying(self) -> None:
        """Stop waiting for vLLM servers that are down."""
        if isinstance(self.sampler, VllmSampler):
            self.sampler.fleet.stop_waiting()

    def watch(self, report: Callable[..., None]) -> None:
        """Report what happens to vLLM servers."""
        if isinstance(self.sampler, VllmSampler):
            self.sampler.fleet.report = report

    async def export(self, folder: Path) -> Path:
        """Write a Hugging Face folder with the tokenizer; only LoRA's, unless merge_lora is set."""
        lora, sharded = self.options.lora is not None, self.options.sharding == "full"
        plain = self.config.checkpoint.merge_lora if lora else sharded
        await self._in_thread("export_to", folder, self._folder if plain else None)
        return folder

    # --- in the thread

    def _build(self, thread: TrainerThread) -> Any:  # a PipeTrainer; mypy sees no TRL types
        hush()
        placement = place_model(self.options, self._place)
        self.exact = not placement.autocast
        self.tokenizer = cast(Tokenizer, load_tokenizer(self._folder))
        if self.options.sampler.type == "local":
            self._plain_model = load_model(
                self._folder, placement.device, placement.frozen_dtype, self.options.attention
            )
        trainer = build_trainer(
            self.options,
            self.config,
            self.plan,
            folder=self._folder,
            tokenizer=self.tokenizer,
            scratch=Path(self._scratch.name),
            feed=thread,
            ranks=thread.ranks,
        )
        self.model_loss = self.plan.native and trainer.aux_loss_enabled
        text = trainer.model.config.get_text_config()
        self.context_length = int(text.max_position_embeddings)
        return trainer

    def _meet(self, thread: TrainerThread) -> AbstractContextManager[Ranks]:
        placement = place_model(self.options, self._place)
        return together(
            self._place,
            self._crew.store if self._crew else None,
            cuda=placement.device.type == "cuda",
            waiting=thread.check_stop,
        )

    # --- from the event loop to the thread

    async def _in_thread(self, method: str, *args: Any, needs_optimizer: bool = False) -> Any:
        """Call a method of the trainer on all ranks; the result is rank 0's."""
        return await self._submit(TrainerJob(method, args, needs_optimizer=needs_optimizer))

    async def _submit(self, job: TrainerJob) -> Any:
        return await self._answer(self._thread.submit(job))

    async def _answer(self, future: Future[Any]) -> Any:
        """The result; where a connection to another rank broke, the error names that rank."""
        try:
            return await asyncio.wrap_future(future)
        except asyncio.CancelledError:
            raise
        except Exception as error:
            if lost_peer(error):
                loss = await self._crew.loss() if self._crew else None
                raise loss or AdapterError(
                    "another process of the run has ended or can't be reached; see its output for "
                    "the cause"
                ) from error
            if isinstance(error, RetrainError):
                raise
            raise AdapterError(f"the trainer failed: {type(error).__name__}: {error}") from error

    async def _end_thread(self) -> None:
        self._thread.stop()
        try:
            if self._place is not None and not await self._thread_ended(RANKS_SECONDS):
                await self._end_crew(0.0)  # the thread may hang in a collective, which then fails
            if not await self._thread_ended(CLOSE_SECONDS):
                raise AdapterError(
                    f"the trainer's thread is still in a forward pass after {CLOSE_SECONDS:.0f} s"
                )
            self._thread.join()
        finally:
            await self._end_crew(0.0 if self._thread.failed else STOP_SECONDS)
            self._scratch.cleanup()

    async def _thread_ended(self, seconds: float) -> bool:
        if not self._thread.began:
            return True
        ended = asyncio.wrap_future(self._thread.ended)
        return bool((await asyncio.wait([ended], timeout=seconds))[0])

    async def _end_crew(self, grace: float) -> None:
        crew, self._crew = self._crew, None
        if crew is not None:
            await crew.end(grace)
