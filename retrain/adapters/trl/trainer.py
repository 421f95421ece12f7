"""TRL's GRPOTrainer with the pipe's batches: TRL keeps optimizer, schedule, clipping, checkpoint.

It overrides `training_step` (waits for a batch and iterates over its micro-batches),
`_prepare_inputs` (returns a micro-batch, so that TRL neither generates nor shuffles),
`_compute_loss` (`super` computes TRL's own losses, `engine.losses` the others), and methods that
would write to the terminal, the network or the run's folder.

Invariants:
- Micro-batches add up: loss and gradients are those of the whole batch, however it is split. TRL
  averages over a micro-batch; `native.py` makes it a share of the whole batch (`Loss.trl_mean`).
- A NaN is found before the optimizer changes a weight: `_whole_batch` checks the loss,
  `_get_grad_norm` the gradients.
- Dropout depends only on (seed, step, rank), so that a resumed run repeats it.
- With several ranks each trains its share of every micro-batch (`shares.py`), and all raise before
  the optimizer if one found a NaN. What the adapter calls between two steps runs on all ranks.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, Protocol

import torch
from accelerate.utils.constants import FSDP_MODEL_NAME, OPTIMIZER_NAME
from peft import PeftModel, set_peft_model_state_dict
from torch import Tensor
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR
from transformers import TrainerCallback
from transformers.trainer import SCHEDULER_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from retrain.adapters.trl.handover import Handover
from retrain.adapters.trl.native import WholeBatchLoss
from retrain.adapters.trl.plan import LossPlan
from retrain.adapters.trl.ranks.group import ALONE, OutOfStepError, Ranks, lost_peer
from retrain.adapters.trl.record import SEQUENCE, StepRecord
from retrain.adapters.trl.rows import STREAM, Rows, collate, group_ids, with_shares
from retrain.adapters.trl.shares import Part, Share, divide
from retrain.adapters.trl.worker import CutBatch
from retrain.engine.losses import mismatch_weights, shared_loss
from retrain.errors import CheckpointError, ConfigError, NonFiniteError
from retrain.losses import row_of
from retrain.types import Batch, Metrics, Sample


class Feed(Protocol):
    """Where a trainer's batches come from: `TrainerThread`, or rank 0 for a follower."""

    def next_share(self, cut: CutBatch) -> Share: ...

    def check_stop(self) -> None: ...

    def finish_step(self, metrics: Metrics) -> None: ...


class PipeTrainer(WholeBatchLoss, Handover):
    """A GRPOTrainer whose batches come from `feed`."""

    optimizer: Any  # as accelerate wraps it; None before training
    lr_scheduler: Any  # the same

    def __init__(
        self,
        *args: Any,  # GRPOTrainer's own
        plan: LossPlan,
        cut: Callable[..., list[list[Sample]]],  # `micro_batches` with its limits
        feed: Feed,
        ranks: Ranks = ALONE,
        sharded: bool = False,
        **kwargs: Any,
    ) -> None:
        """Raises ConfigError if accelerate can't shard here."""
        super().__init__(*args, **kwargs)
        if sharded and not self.is_fsdp_enabled:
            raise ConfigError(
                f"backend.sharding: got full, but accelerate does not shard on {self.args.device}; "
                "train on GPUs, or set it to none"
            )
        self.plan = plan
        self.cut = cut
        self.feed = feed
        self.ranks = ranks
        self.sharded = sharded
        self._idle = False
        """The present part is a copy of another rank's."""
        self.add_callback(_StepEnd(self))
        self._to_correct: Rows | None = None

    # --- one optimizer step

    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Wait for the pipe's batch; accumulate the gradients of all its micro-batches.

        The data loader can't wait for it: accelerate's loader fetches one batch ahead, which would
        add a version of staleness, and a deadlock at staleness 0.
        """
        share = self.feed.next_share(self._shares)
        self.record = StepRecord(share.batch)
        with self._own_randomness():
            loss = self._whole_batch(model, share.parts)
        self.record.loss = loss.item() / self.ranks.size
        return loss

    def _shares(self, batch: Batch) -> list[Share]:
        row, rule, samples = row_of(batch.loss), self.plan.mismatch, batch.samples
        if row.trl_mean == "row_means":
            samples = with_shares(samples)
        together = {
            "paired": row.reads == "pairs",
            "rollouts": rule is not None and rule.level == "sequence",
        }
        parts = self.cut(samples, **together)
        return divide(batch, parts, self.ranks.size, **together, even=self.plan.native)

    def _whole_batch(self, model: Any, parts: Sequence[Part]) -> Tensor:
        total = torch.zeros((), device=self.args.device)
        pad = self._tokenizer.pad_token_id
        rows = self.ranks.together(lambda: [collate(p.samples, pad, p.void) for p in parts])
        found: list[str] = []
        for number, part in enumerate(parts):
            self.feed.check_stop()
            self._idle = part.idle
            loss = self._pass(model, rows[number], last=number == len(parts) - 1)
            if not math.isfinite(loss.item()):
                found.append(f"groups {group_ids(part.samples)} is {loss.item()}")
            total += loss
        if everywhere := [text for texts in self.ranks.gather(found) for text in texts]:
            raise NonFiniteError(
                f"the loss of {', of '.join(everywhere)}; the weights are unchanged; check these "
                "groups' log-probs and advantages"
            )
        return total

    def _pass(self, model: Any, rows: Rows, *, last: bool) -> Tensor:
        """Forward and backward; gradients are averaged over ranks in the last pass, or sharded."""
        self.accelerator.gradient_state._set_sync_gradients(last)
        alone = self.ranks.size == 1 or self.sharded
        with nullcontext() if last or alone else self.accelerator.no_sync(model):
            loss: Tensor = super().training_step(model, rows, None)
        return loss

    def _prepare_inputs(self, rows: Rows) -> Rows:
        return {name: tensor.to(self.args.device) for name, tensor in rows.items()}

    @contextmanager
    def _own_randomness(self) -> Iterator[None]:
        cards = [torch.cuda.current_device()] if self.args.device.type == "cuda" else []
        with torch.random.fork_rng(devices=cards):
            seed = self.args.seed * 1_000_003 + self.state.global_step
            torch.manual_seed((seed * self.ranks.size + self.ranks.rank) % 2**63)
            yield

    # --- the loss of one micro-batch

    def _compute_loss(self, model: Any, rows: Rows) -> Tensor:
        if self.plan.reference:
            rows["ref_per_token_logps"] = self._reference_logprobs(model, rows)
        self._mask, old = rows["tool_mask"], rows["old_per_token_logps"]
        self._to_correct = rows if self.plan.mismatch else None
        loss = (
            self._native_loss(model, rows) if self.plan.native else self._shared_loss(model, rows)
        )
        if self._idle:
            return loss * 0.0
        logprobs, entropies, _ = self._scored
        reference = rows.get("ref_per_token_logps", rows.get(STREAM + "reference_logprobs"))
        if row_of(self.plan.name).reads == "pairs":
            reference = None  # the answers are not samples of the trainer's
        self.record.measure(logprobs, entropies, old, self._mask, reference)
        return loss

    def _correct(self, rows: Rows, logprobs: Tensor) -> None:
        """Apply `algorithm.mismatch`: weigh the advantages, compare with the present weights."""
        rule, old = self.plan.mismatch, rows["old_per_token_logps"]
        assert rule is not None, "`_compute_loss` asks for it"
        weights, outside = mismatch_weights(rule, logprobs - old, self._mask, rows["rollouts"])
        rows["advantages"] = rows["advantages"] * weights
        rows["old_per_token_logps"] = logprobs
        if self._idle:
            return
        prefix = SEQUENCE if rule.level == "sequence" else ""
        self.record.add({f"{prefix}mismatch/clipped": outside})

    def _shared_loss(self, model: Any, rows: Rows) -> Tensor:
        batch = self.record.batch
        logprobs, _, _ = self._score(model, rows, entropy=True)
        streams = {
            name.removeprefix(STREAM): values
            for name, values in rows.items()
            if name.startswith(STREAM)
        }
        if "ref_per_token_logps" in rows:
            streams["reference_logprobs"] = rows["ref_per_token_logps"]
        loss, sums = shared_loss(
            self.plan.custom or batch.loss,
            batch.loss_config,
            logprobs,
            rows["old_per_token_logps"],
            rows["advantages"],
            rows["tool_mask"],
            streams,
        )
        if not self._idle:
            self.record.add(sums)
        return loss * self.ranks.size

    # --- log-probs

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        self._scored = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        rows, self._to_correct = self._to_correct, None
        if rows is not None:  # TRL reads the rows' advantages and old log-probs after this call
            self._correct(rows, self._scored[0].detach())
        return self._scored

    def _score(self, model: Any, rows: Rows, *, entropy: bool) -> Any:
        return self._get_per_token_logps_and_entropies(
            model,
            torch.cat([rows["prompt_ids"], rows["completion_ids"]], dim=1),
            torch.cat([rows["prompt_mask"], rows["completion_mask"]], dim=1),
            rows["completion_ids"].size(1),
            compute_entropy=entropy,
        )

    def _reference_logprobs(self, model: Any, rows: Rows) -> Tensor:
        """The frozen initial model's: the batch's own stream, or a forward without gradients."""
        given = rows.get(STREAM + "reference_logprobs")
        if given is not None:
            return given
        with torch.no_grad():
            if self.ref_model is not None:
                return self._score(self.ref_model, rows, entropy=False)[0]
            with self.model.disable_adapter():
                return self._score(model, rows, entropy=False)[0]

    # --- the end of a step

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> Any:
        """Checks the gradients: TRL calls this after clipping and before the optimizer."""
        norm = super()._get_grad_norm(model, grad_norm=grad_norm)
        self.record.grad_norm = float(norm)
        self.record.learning_rate = float(self._get_learning_rate())
        if not math.isfinite(self.record.grad_norm):
            raise NonFiniteError(
                f"the gradient norm is {self.record.grad_norm} over groups "
                f"{group_ids(self.record.batch.samples)}; the weights are unchanged; try a lower "
                "learning_rate, or dtype float32"
            )
        return norm

    # --- checkpoints

    def _was_sharded(self, checkpoint: str) -> bool:
        """Whether a sharded model wrote the checkpoint, and this one is whole."""
        return not self.sharded and (Path(checkpoint) / f"{FSDP_MODEL_NAME}.bin").is_file()

    def _load_from_checkpoint(self, checkpoint: str, model: Any = None) -> None:
        """Also what a sharded model wrote: its files hold all parts, under their names."""
        if self._was_sharded(checkpoint):
            weights = _loaded(checkpoint, f"{FSDP_MODEL_NAME}.bin")
            if isinstance(self.model, PeftModel):
                set_peft_model_state_dict(self.model, weights)
            else:
                self.model.load_state_dict(weights)
        else:
            super()._load_from_checkpoint(checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads the optimizer's moments and the step count; rates and schedule are this run's."""
        ours = [
            {name: value for name, value in group.items() if name != "params"}
            for group in self.optimizer.param_groups
        ]
        if checkpoint is not None and self._was_sharded(checkpoint):
            moments = _loaded(checkpoint, f"{OPTIMIZER_NAME}.bin")
            options = StateDictOptions(full_state_dict=True)
            set_optimizer_state_dict(self.model, self.optimizer.optimizer, moments, options=options)
            self.lr_scheduler.load_state_dict(_loaded(checkpoint, SCHEDULER_NAME))
        else:
            super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._keep_rates(ours)

    def _keep_rates(self, ours: Sequence[Mapping[str, Any]]) -> None:
        """Give the optimizer's groups their options `ours` again, and the schedule its rates."""
        for group, own in zip(self.optimizer.param_groups, ours, strict=True):
            group.update(own)
        schedule = self.lr_scheduler
        schedule = getattr(schedule, "scheduler", schedule)  # as accelerate wraps it
        if isinstance(schedule, LambdaLR):
            schedule.base_lrs = [own["initial_lr"] for own in ours]
            schedule._last_lr = [
                base * factor(schedule.last_epoch)
                for base, factor in zip(schedule.base_lrs, schedule.lr_lambdas, strict=True)
            ]
            for group, rate in zip(self.optimizer.param_groups, schedule._last_lr, strict=True):
                group["lr"] = rate

    def save_to(self, folder: Path) -> str:
        """Write TRL's checkpoint below `folder`; returns its name there.

        Raises CheckpointError, since torch's own error does not say that the disk is full. If the
        model is sharded, the ranks gather its parts between two writes, in which the others wait
        for one that failed: that one raises OutOfStepError.
        """
        before, self.args.output_dir = self.args.output_dir, str(folder)
        try:
            self._save_checkpoint(self.model, trial=None)
        except Exception as error:
            if lost_peer(error):
                raise
            free = shutil.disk_usage(folder).free / 1e6
            problem = CheckpointError(
                f"could not write the checkpoint: {error}. {free:,.1f} MB are free on the disk of "
                f"{folder}; free some space, then continue with --resume"
            )
            problem.__cause__ = error
            if self.sharded:
                raise OutOfStepError(str(problem)) from problem
            raise problem  # noqa: B904 - its cause is set
        finally:
            self.args.output_dir = before
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        if self.ranks.rank == 0:
            (folder / name / TRAINING_ARGS_NAME).unlink()  # a pickle with this machine's paths
        return name

    # --- no output of TRL's own: the pipe reports, and writes the run's folder

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Does nothing: `StepRecord` holds the metrics."""

    def _send_telemetry(self) -> None:
        """Does nothing: no data leaves this machine."""

    def create_model_card(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: a checkpoint needs no README."""


def _loaded(checkpoint: str, name: str) -> Any:  # a state of torch's
    return torch.load(Path(checkpoint) / name, map_location="cpu", weights_only=True)


class _StepEnd(TrainerCallback):
    """Reports a step after the optimizer, the schedule and the step count have changed."""

    def __init__(self, trainer: PipeTrainer) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self._trainer
        trainer.record.add_ranks(trainer.ranks)
        trainer.feed.finish_step(trainer.record.metrics())
