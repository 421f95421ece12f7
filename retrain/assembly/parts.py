"""The parts of a run, those of them that may exist before it, and how a section becomes one.

Nothing here loads torch but `Parts.open_adapter`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from retrain.adapters.base import Adapter, AdapterOptions, Capabilities
from retrain.algorithms.base import Algorithm
from retrain.assembly.learner import Learner
from retrain.chat.formats.base import Format
from retrain.config import Plugin, RunConfig
from retrain.config.binding import bind
from retrain.config.paths import is_hub_id
from retrain.config.plugins import Kind, construct, find_plugin
from retrain.config.problems import keys_of
from retrain.environment import Environment
from retrain.errors import PluginError, install_command
from retrain.losses import Loss, Normalisation, vanishes
from retrain.observe.callbacks import Callback
from retrain.prompts import PromptSource
from retrain.prompts.building import PROMPTS
from retrain.rollout.opponents import Opponent
from retrain.scoring import REWARD, Scorer
from retrain.supervision.jsonable import Filled
from retrain.supervision.loading import uncollected

ADAPTER = Kind("adapter", Adapter)
KINDS = {
    "environment": Kind("environment", Environment),
    "reward": REWARD,
    "algorithm": Kind("algorithm", Algorithm),
    "prompts": PROMPTS,
    "backend": Kind("backend", AdapterOptions),
    "logger": Kind("logger", Callback),
}
"""The kinds of plug-ins that a config names."""


@dataclass(frozen=True)
class Parts:
    """The parts of a run, made and checked."""

    config: RunConfig
    prompts: PromptSource
    eval_prompts: PromptSource | None
    environment: Callable[[], Environment]
    """Makes one instance."""
    scorer: Scorer
    algorithm: Algorithm
    loss: str
    loss_config: Mapping[str, Any]  # the loss's own keys
    normalisation: Normalisation | None
    """None for a loss with a normalisation of its own."""
    options: AdapterOptions
    capabilities: Capabilities
    chat_template: str = "auto"
    """`auto`, `none`, or the text of the file that chat.template names."""
    tool_format: Format | None = None
    """None if it is to be inferred from the chat template."""
    loggers: tuple[Callback, ...] = ()
    opponents: Mapping[str, Opponent] = field(default_factory=dict)
    """Who speaks for the seats that are not trained."""
    eval_opponents: Mapping[str, Opponent] = field(default_factory=dict)
    """The same in evaluations."""
    runs_agent: bool = False
    """Whether the environment runs an agent, which needs the endpoint."""
    warnings: tuple[str, ...] = ()
    """What is allowed, but worth a word at the start."""
    learner: Learner | None = None
    """Takes part in each step; without one the adapter trains on the batch."""

    def resolved(self) -> RunConfig:
        """The config with what the backend and the algorithm add by default."""
        config = self.config
        given = config.backend.arguments
        backend = Plugin(type=config.backend.type, **as_filled(dumped(self.options), given))
        loss = {"loss": self.loss, "normalisation": self.normalisation}
        algorithm = config.algorithm.model_copy(update=loss)
        return config.model_copy(update={"backend": backend, "algorithm": algorithm})

    @property
    def skips_flat(self) -> bool:
        """Whether a batch has no gradient if all its advantages are 0: nothing else counts.

        A learner with an update of its own decides for itself, and a schedule of rewards goes by
        the version: it would stand still.
        """
        own = self.learner is not None and type(self.learner).update is not Learner.update
        if own or self.config.algorithm.kl_penalty or self.scorer.composition.scheduled:
            return False
        return vanishes(self.loss, self.loss_config)

    def notices(self) -> Iterator[str]:
        """The warnings and the memory that the run needs, for the terminal."""
        forecast = self.options.forecast(self.config)
        yield from (f"warning: {warning}" for warning in self.warnings)
        if forecast is not None:
            yield from forecast.lines()

    def loading(self) -> str:
        """The line before the model loads."""
        model, backend = self.config.model, self.config.backend.type
        layout = f" ({found})" if (found := self.options.layout()) else ""
        hub = (
            f"; there is no folder {model}, so it is read from the Hugging Face Hub or its cache"
            if is_hub_id(model, self.config.base_dir)
            else ""
        )
        return f"loading model {model} on the {backend} backend{layout}{hub}"

    def open_adapter(self) -> Adapter:
        """The backend's adapter, not yet entered; see `adapter_of`."""
        return adapter_of(self.options, self.config)


@dataclass(frozen=True)
class Given:
    """Parts that exist before `assemble`, which makes those that are None.

    The config's section of a given part is only a label: no plug-in is loaded for it.
    """

    prompts: PromptSource | None = None
    eval_prompts: PromptSource | None = None
    environment: Callable[[], Environment] | None = None
    scorer: Scorer | None = None
    algorithm: Algorithm | None = None
    chat_template: str | None = None
    learner: Learner | None = None


def adapter_of(options: AdapterOptions, config: RunConfig) -> Adapter:
    """The backend's adapter, not yet entered. Imports it, and torch if it needs that.

    Raises PluginError if a library is missing.
    """
    where = "backend.type"
    try:
        with uncollected() if options.needs() else nullcontext():
            found = find_plugin(ADAPTER, options.adapter, where, config.base_dir)
    except PluginError as error:
        missing = error.__cause__
        if not isinstance(missing, ModuleNotFoundError):
            raise
        command = install_command(options.extra) if options.extra else "install it with pip"
        raise PluginError(
            f"{where}: {config.backend.type} needs {missing.name}, which is not installed: "
            f"{command}"
        ) from error
    adapter: Adapter = found(options, config)
    return adapter


def target_of(kind: str, plugin: Plugin, where: str, config: RunConfig) -> Any:
    """The class or function that a section names."""
    return find_plugin(KINDS[kind], plugin.type, f"{where}.type", config.base_dir)


def maker(kind: str, plugin: Plugin, where: str, config: RunConfig) -> partial[Any]:
    """A section's class with its keys, checked and bound."""
    target = target_of(kind, plugin, where, config)
    keys = bind(
        target,
        plugin.arguments,
        where,
        given={"base_dir": config.base_dir},
        beside=type(plugin).model_fields,
        known=keys_of(RunConfig),
    )
    return partial(target, **keys)


def make(kind: str, plugin: Plugin, where: str, config: RunConfig) -> Any:
    """One instance of a section's class. Raises ConfigError."""
    return construct(where, maker(kind, plugin, where, config))


def dumped(options: AdapterOptions) -> dict[str, Any]:
    """All keys of a backend. A set has no order: sorted, it is always written the same."""
    return {
        key: sorted(value) if isinstance(value, frozenset) else value
        for key, value in options.model_dump().items()
    }


def as_filled(value: Any, given: Any) -> Any:
    """`value` with the strings of `given` that the environment filled in: files have their text."""
    if isinstance(value, dict) and isinstance(given, Mapping):
        return {key: as_filled(inner, given.get(key)) for key, inner in value.items()}
    if isinstance(value, list | tuple) and isinstance(given, list) and len(value) == len(given):
        return [as_filled(*pair) for pair in zip(value, given, strict=True)]
    return given if isinstance(given, Filled) and value == given else value


def normalisation_of(row: Loss, given: Normalisation | None) -> Normalisation | None:
    """What a loss is averaged over; None if it normalises itself."""
    return None if row.normalises_itself else given or row.normalisation
