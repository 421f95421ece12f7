"""The `backend:` keys of `type: trl`, and what this backend supports. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, field_serializer, field_validator

from retrain.adapters.base import Capabilities, Forecast, OptimizerOptions
from retrain.adapters.trl.keys import refusal
from retrain.adapters.trl.memory import forecast
from retrain.adapters.trl.plan import run_plan
from retrain.adapters.trl.ranks.contract import launched
from retrain.config import RunConfig
from retrain.config.paths import find_model
from retrain.engine.available import cuda_devices, too_few_devices
from retrain.engine.models import Attention, attention_problem, local_tokenizer
from retrain.errors import ConfigError
from retrain.losses import LOSSES
from retrain.sampler import Tokenizer
from retrain.vllm.options import HEATS, LocalSamplerOptions, VllmOptions
from retrain.wire.training import RANK

Schedule = Literal[
    "constant",
    "constant_with_warmup",
    "linear",
    "cosine",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
]
"""The schedules of transformers that need only the number of the step."""


class LoraOptions(BaseModel):
    """Low-rank adapters (arXiv:2106.09685), using peft; without this key, the full weights are
    trained."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, allow_inf_nan=False, use_attribute_docstrings=True
    )
    r: Annotated[int, Field(ge=1, validation_alias=RANK)] = 16
    """The rank of the adapters; `rank` is another name of this key."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The adapters' output is scaled by alpha / r."""
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """The probability of dropout before the adapters."""
    target_modules: str | tuple[str, ...] = "all-linear"
    """Names of the modules with an adapter; `all-linear`: every linear layer except the output
    head."""

    @field_validator("target_modules")
    @classmethod
    def _no_head(cls, value: str | tuple[str, ...]) -> str | tuple[str, ...]:
        if "lm_head" in value:  # in the string form it is a regular expression that names the head
            raise ValueError(
                "TRL does not support LoRA on lm_head: it multiplies by the head's own weight, so "
                "an adapter there would never be trained; remove lm_head"
            )
        return value


class TrlOptions(OptimizerOptions):
    """`backend: {type: trl, ...}`: TRL's GRPOTrainer updates the weights on this machine."""

    extra: ClassVar[str] = "trl"
    adapter: ClassVar[str] = "retrain.adapters.trl.adapter:TrlAdapter"
    follower: ClassVar[str] = "retrain.adapters.trl.follow:follow"

    lr_scheduler: Schedule = "constant"
    """The schedule of the learning rate over train.total_train_steps;
    `backend.args.lr_scheduler_kwargs` sets its parameters."""
    lora: LoraOptions | None = None
    """Train low-rank adapters; by default the full weights are trained."""
    micro_batch_rows: Annotated[int, Field(ge=1)] | None = None
    """The maximum number of sequences per forward pass; null: as many as `micro_batch_tokens`
    allows."""
    micro_batch_tokens: Literal["auto"] | Annotated[int, Field(ge=1)] = "auto"
    """The maximum number of tokens per forward pass, including padding; a longer sequence gets its
    own pass. `auto`: 16,384 on CUDA; on the CPU, as many as need about 1 GB of activations, from
    256 to 2,048."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where the model is trained and sampled; `auto`: CUDA if available, otherwise the CPU."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """The data type of the computation; `auto`: float32 on the CPU, bfloat16 on CUDA. Trained
    weights stay in float32."""
    attention: Attention = "auto"
    """How attention is computed, in the trainer, the reference model and the sampler: a value of
    transformers' `attn_implementation`. `auto`: sdpa where the model supports it, else eager.
    `flash_attention_*` needs CUDA, bfloat16 and its own package."""
    gradient_checkpointing: Literal["auto"] | bool = "auto"
    """Recompute activations in the backward pass to save memory; `auto`: only on CUDA."""
    threads: Annotated[int, Field(ge=1)] = 1
    """The number of OpenMP threads of the trainer, and of the sampler. More threads can be up to 20
    times slower on a busy machine (measured)."""
    sampler: Annotated[LocalSamplerOptions | VllmOptions, Field(discriminator="type")] = (
        LocalSamplerOptions()
    )
    """The sampler: this process (`local`), or vLLM servers ([vllm.md](vllm.md))."""
    processes: Annotated[int, Field(ge=1)] = 1
    """The number of processes that train together, each on its own GPU. The run starts them on this
    machine, unless a launcher such as torchrun has started them; then WORLD_SIZE takes
    precedence."""
    sharding: Literal["none", "full"] = "none"
    """`none`: each process holds the whole model and averages the gradients (DDP). `full`: weights,
    gradients and optimizer state are divided among the processes (FSDP2), which needs less memory
    per GPU and more communication."""
    max_rows: Annotated[int, Field(ge=1)] = 256
    """The maximum number of sequences that the local sampler decodes at the same time."""
    args: dict[str, Any] = Field(default_factory=dict)  # values of whatever type TRL gives a key
    """Further keys of TRL's GRPOConfig, such as `optim` or `lr_scheduler_kwargs`."""

    @field_validator("sampler", mode="before")
    @classmethod
    def _short_form(cls, value: Any) -> Any:  # of any type: not validated yet
        return {"type": value} if isinstance(value, str) else value

    @field_validator("args")
    @classmethod
    def _passed_only(cls, value: dict[str, Any]) -> dict[str, Any]:
        refused = [why for why in map(refusal, value) if why]
        if refused:
            raise ValueError("; ".join(refused))
        return value

    @field_serializer("processes")
    def _launched_processes(self, value: int) -> int:
        """The config of a run has those that a launcher started."""
        place = launched()
        return place.size if place else value

    def local_tokenizer(self, config: RunConfig) -> Tokenizer | None:
        return local_tokenizer(find_model(config.model, config.base_dir))

    def layout(self) -> str:
        place, parts = launched(), []
        if (size := place.size if place else self.processes) > 1:
            parts.append(f"{size} processes, sharding {self.sharding}")
        if self.sampler.type == "vllm":
            parts.append(f"sampler vllm: {self.sampler.layout(lora=self.lora is not None)}")
        return "; ".join(parts)

    def needs(self) -> Mapping[str, Sequence[str]]:
        """All of them, whatever the options; a vLLM server is reached over HTTP."""
        needed = {"trl": ("torch", "trl", "transformers", "datasets", "accelerate", "peft")}
        return needed if self.sampler.type == "local" else needed | {"remote": ("aiohttp", "httpx")}

    def needed_by(self, extra: str) -> str | None:
        return f"backend.sampler: {self.sampler.type}" if extra == "remote" else None

    def capabilities(self) -> Capabilities:
        """Every loss: TRL computes its own, the engine the others."""
        return Capabilities(
            losses=frozenset(LOSSES),
            custom_losses=True,
            scores=True,
            checks="free",
            mismatch=True,
            scored_as_sampled=frozenset({"temperature"}),
        )

    def problems(self, config: RunConfig) -> list[str]:
        """An attention that can't work, wrong keys of the loss and the sampler, a wrong number of
        processes, and CUDA devices that are not there.

        `check_compatible` reports an unknown loss.
        """
        attention = attention_problem(self.attention, self.device, self.dtype)
        found = [*([attention] if attention else []), *self._sampler_problems(config)]
        found += self._wrong_processes()
        found += self._missing_devices()
        loss = config.algorithm.loss
        if loss and ":" not in loss and loss not in self.capabilities().losses:
            return found
        try:
            run_plan(config)
        except ConfigError as error:
            found += error.problems
        return found

    def forecast(self, config: RunConfig) -> Forecast:
        return forecast(self, config)

    def warnings(self, config: RunConfig) -> list[str]:
        """An order that promises more than the servers do, and devices that may be missing."""
        if self.sampler.type == "local":
            return []
        found = [f"backend.sampler.{warning}" for warning in self.sampler.warnings()]
        if config.train.order == "in_order":
            found.append(
                "train.order is in_order, but vLLM batches requests as they arrive: log-probs "
                "differ in their last digits between runs, so a run is not bit-reproducible; "
                "with the local sampler it is"
            )
        return found

    def _sampler_problems(self, config: RunConfig) -> Iterator[str]:
        if self.sampler.type == "local":
            return
        lora = self.lora is not None
        for problem in self.sampler.problems(config.base_dir, lora=lora):
            yield f"backend.sampler.{problem}"
        place = launched()
        if place is None or place.rank == 0:  # whose machine has the servers
            for problem in self.sampler.missing(config.base_dir):
                yield f"backend.sampler.{problem}"
        heat, (coldest, hottest) = config.sampling.temperature, HEATS
        if heat and not coldest <= heat <= hottest:
            yield (
                f"sampling.temperature: got {heat:g}, but vLLM samples at 0, or from {coldest:g} "
                f"to {hottest:g}; set it to one of these, or sample with the local sampler"
            )
        if self.max_rows != type(self).model_fields["max_rows"].default:
            yield (
                f"backend.max_rows: got {self.max_rows}, but vLLM samples; remove it, and set "
                "sampler.args.max_num_seqs"
            )

    def _missing_devices(self) -> Iterator[str]:
        """Where CUDA is asked for, or may be chosen for several processes."""
        place = launched()
        processes = place.local_size if place else self.processes
        if self.device == "cpu" or (self.device == "auto" and processes == 1):
            return
        if cuda_devices():
            if problem := too_few_devices("backend.processes", processes):
                yield problem
        elif self.device == "cuda":
            yield (
                "backend.device: got cuda, but torch finds no CUDA device; set it to cpu or auto, "
                "or install a CUDA build of torch"
            )

    def _wrong_processes(self) -> Iterator[str]:
        place = launched()
        if place and "processes" in self.model_fields_set and self.processes != place.size:
            found = f"got {self.processes}, but the launcher started {place.size} (WORLD_SIZE)"
            yield f"backend.processes: {found}; remove the key, or start as many"
        elif self.sharding == "full" and (place.size if place else self.processes) == 1:
            advice = "set backend.processes to the number of devices, or sharding to none"
            yield f"backend.sharding: got full, but there is 1 process; {advice}"
        elif self.sharding == "full" and self.device == "cpu":
            advice = "train on GPUs, or set it to none"
            yield f"backend.sharding: got full, but accelerate does not shard on a CPU; {advice}"
