"""The `backend:` keys that the remote backends share, and their capabilities.

Imports no httpx and no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from typing import Annotated, Any, ClassVar

from pydantic import Field, field_validator

from retrain.adapters.base import Capabilities, OptimizerOptions
from retrain.adapters.losses import custom_loss, loss_keys, run_loss
from retrain.adapters.remote.schedule import Schedule
from retrain.config import RunConfig
from retrain.config.paths import find_model
from retrain.engine.models import local_tokenizer
from retrain.errors import ConfigError, install_command
from retrain.losses import LOSSES, check_keys, shared_name
from retrain.sampler import Tokenizer
from retrain.wire.training import LoraConfig
from retrain.wire.vendors import Vendor, checked_url

LOCAL_NEEDS = ("starlette", "torch", "transformers", "peft")
"""The libraries that the service inside this process imports."""


class RemoteOptions(OptimizerOptions):
    """The keys of every remote backend."""

    extra: ClassVar[str] = "remote"
    vendor: ClassVar[Vendor]
    """The vendor of the protocol."""

    url: str = "local"
    """`local`: a service inside this process; `hosted`: the vendor's service; or http(s)://host."""
    base_model: str | None = None
    """The service's name for the model, if it isn't `model`."""
    lora: LoraConfig = LoraConfig()
    """The rank of the low-rank adapters, and the layers that get them."""
    learning_rate: Annotated[float, Field(gt=0)] = 1e-4
    """The learning rate, after the warm-up."""
    lr_scheduler: Schedule = "constant"
    """The schedule of the learning rate over train.total_train_steps."""
    native_losses: frozenset[str] = frozenset()
    """Losses that the service computes. The others are computed on this machine and cost another
    forward pass. Remove the losses that your server lacks."""
    assume_sum: bool = False
    """The service sums losses over tokens: don't measure on a throw-away model what it averages.
    `url: local` and the vendor's own service are never measured."""
    context_length: Annotated[int, Field(ge=2)] | None = None
    """The maximum number of tokens of prompt and completion together; by default the limit that the
    service or the tokenizer reports."""
    tokenizer: str | None = None
    """The folder or Hugging Face id of the tokenizer; by default the model's."""

    @field_validator("native_losses")
    @classmethod
    def _served(cls, value: frozenset[str]) -> frozenset[str]:
        served = cls.model_fields["native_losses"].default
        if unknown := sorted(value - served):
            raise ValueError(
                f"got {unknown[0]!r}, expected some of {', '.join(sorted(served))}; all other "
                "losses are computed on this machine"
            )
        return value

    def needs(self) -> Mapping[str, Sequence[str]]:
        """The network's, unless the service is inside this process, and the tokenizer's."""
        network = () if self.url == "local" else ("aiohttp",)
        return {"remote": ("httpx", *network, "jinja2", "transformers")}

    def capabilities(self) -> Capabilities:
        """Every loss that is a function of log-probs: what is not native is computed here."""
        losses = frozenset(name for name, row in LOSSES.items() if row.formula or row.shared)
        return Capabilities(
            losses=losses,
            custom_losses=True,
            scores=True,
            checks="billed" if self.vendor.runs(self.service_url) else "free",
            mismatch=True,
        )

    def local_tokenizer(self, config: RunConfig) -> Tokenizer | None:
        """That of the options, or else the model's."""
        return local_tokenizer(self.tokenizer or find_model(config.model, config.base_dir))

    def problems(self, config: RunConfig) -> list[str]:
        """Keys without an effect, and settings that can't work."""
        found = [*self._service_problems(), *_raised_by(self._check_loss, config)]
        lora = self.lora
        if not (lora.train_unembed or lora.train_mlp or lora.train_attn):
            found.append("backend.lora: every train_* is false, so nothing would be trained")
        if config.checkpoint.merge_lora:
            found.append(
                "checkpoint.merge_lora has no effect: the weights stay on the service, which "
                "exports them itself"
            )
        if self.warmup_steps > config.train.total_train_steps:
            found.append(
                f"backend.warmup_steps {self.warmup_steps} is longer than the run "
                f"(train.total_train_steps {config.train.total_train_steps})"
            )
        return found

    def _check_loss(self, config: RunConfig) -> None:
        loss = run_loss(config)
        if custom_loss(config) is None and loss in self.capabilities().losses:
            check_keys(shared_name(loss), loss_keys(config))

    def _service_problems(self) -> list[str]:
        """A missing library of the local service, or a wrong url or key."""
        if self.url == "local":
            missing = ", ".join(name for name in LOCAL_NEEDS if find_spec(name) is None)
            if not missing:
                return []
            problem = (
                f"backend.url: local needs packages that are not installed ({missing}): "
                f"{install_command('service')}, or set the url of a service"
            )
            return [problem]
        if self.url != "hosted":
            found = _raised_by(checked_url, self.url, ", `local` or `hosted`")
            if found:
                return [f"backend.{problem}" for problem in found]
        return _raised_by(self.vendor.api_key, self.service_url)

    @property
    def sums(self) -> bool:
        """Whether the service is known to sum losses over tokens, as the protocols say."""
        return self.assume_sum or self.url == "local" or self.vendor.runs(self.service_url)

    @property
    def service_url(self) -> str:
        """The base URL of the requests."""
        return {"local": "http://local", "hosted": self.vendor.url}.get(self.url, self.url)


def _raised_by(check: Callable[..., object], *arguments: Any) -> list[str]:
    """The problems that a check raises as ConfigError."""
    try:
        check(*arguments)
    except ConfigError as error:
        return list(error.problems)
    return []
