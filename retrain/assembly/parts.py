"""From a RunConfig to the parts of a run, everything checked before any model loads.

`assemble` finds and builds the plug-ins and holds the config against the backend's Capabilities.
It loads no torch; `Parts.open_adapter` does. All problems are raised as one ConfigError.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Self, TypeVar

from pydantic import ValidationError

from retrain.adapters.base import Adapter, AdapterOptions, Capabilities
from retrain.algorithms.base import Algorithm
from retrain.assembly.compatibility import check_compatible, warnings_about
from retrain.assembly.learner import Learner
from retrain.config import Plugin, RewardConfig, RunConfig
from retrain.config.binding import bind
from retrain.config.foreign import HOMES
from retrain.config.models import find_model
from retrain.config.plugins import Kind, built_in_names, find_file, find_plugin, line_of
from retrain.config.problems import keys_of, problems_of
from retrain.environment import Environment
from retrain.errors import ConfigError, PluginError, PromptError
from retrain.losses import Normalisation
from retrain.observe.callbacks import Callback
from retrain.prompts import FilePrompts, ListPrompts, PromptSource
from retrain.prompts.examples import Pairs
from retrain.rewarding import NAMES, FunctionReward, RewardCalculator, Scorer, WeightedReward

T = TypeVar("T")

KINDS = {
    "environment": Kind("environment", Environment),
    "reward": Kind("reward", RewardCalculator, accepts=callable),
    "algorithm": Kind("algorithm", Algorithm),
    "prompts": Kind("prompts", PromptSource),
    "backend": Kind("backend", AdapterOptions),
    "logger": Kind("logger", Callback),
}
ADAPTER = Kind("adapter", Adapter)
_EXTRAS = {"tinker": "remote", "weaver": "remote"}


@dataclass(frozen=True)
class Parts:
    """A run's parts, made and checked."""

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
    """None for a loss that carries its normaliser."""
    options: AdapterOptions
    capabilities: Capabilities
    chat_template: str = "auto"
    """`auto`, `none`, or the text of the file that chat.template names."""
    loggers: tuple[Callback, ...] = ()
    warnings: tuple[str, ...] = ()
    """What is allowed, but worth a word at the start."""
    learner: Learner = field(default_factory=Learner)
    """Takes part in each step; by default the adapter trains on the batch."""

    def in_form(self) -> Self:
        """With the rows in the form that the algorithm trains on; raises PromptError."""
        rows, held_out = self.algorithm.rows, self.eval_prompts
        return replace(
            self,
            prompts=rows(self.prompts),
            eval_prompts=None if held_out is None else rows(held_out),
        )

    def resolved(self) -> RunConfig:
        """The config with what the backend and the algorithm add by default."""
        config = self.config
        options = {  # a set has no order: sorted, it is always written the same
            key: sorted(value) if isinstance(value, frozenset) else value
            for key, value in self.options.model_dump(mode="json").items()
        }
        backend = Plugin(type=config.backend.type, **options)
        loss = {"loss": self.loss, "normalisation": self.normalisation}
        algorithm = config.algorithm.model_copy(update=loss)
        return config.model_copy(update={"backend": backend, "algorithm": algorithm})

    def open_adapter(self) -> Adapter:
        """The backend's adapter, not yet entered; see `adapter_of`."""
        return adapter_of(self.options, self.config)


def assemble(config: RunConfig, given: Mapping[str, Any] | None = None) -> Parts:
    """The parts of the run that `config` describes.

    `given` holds parts by their name in Parts that exist already: what the config says of them is
    a label, and no plug-in is looked for. Raises ConfigError with every problem of every part.
    """
    problems: list[str] = []
    made: dict[str, Any] = dict(given or {})

    def attempt(name: str, make: Callable[[RunConfig], Any]) -> None:
        if name in made:
            return
        with _collected(problems):
            made[name] = make(config)

    attempt("prompts", lambda c: _prompts(c.prompts, "prompts", c))
    attempt("eval_prompts", _eval_prompts)
    attempt("environment", _environment)
    attempt("scorer", _scorer)
    attempt("algorithm", lambda c: _make("algorithm", c.algorithm, "algorithm", c))
    attempt("options", _options)
    attempt("loggers", _loggers)
    attempt("chat_template", chat_template)
    attempt("model", lambda c: find_model(c.model, c.base_dir))
    for name, where in (("prompts", "prompts"), ("eval_prompts", "eval.prompts")):
        if "algorithm" in made and made.get(name) is not None:
            with _collected(problems):
                made[name] = _in_form(made["algorithm"], made[name], where)
    if {"algorithm", "options", "environment"} <= made.keys():
        compatible = partial(check_compatible, made["algorithm"], made["options"])
        kind = getattr(made["environment"], "func", None) or type(made["environment"]())
        attempt("loss", lambda c: compatible(c, kind))
    if problems:
        raise ConfigError(*problems)
    del made["model"]
    loss, normalisation, capabilities = made.pop("loss")
    own = {k: v for k, v in config.algorithm.loss_config.items() if k != "force"}
    loss_config = {**made["algorithm"].loss_config, **own}
    return Parts(
        config,
        **made,
        loss=loss,
        loss_config=loss_config,
        normalisation=normalisation,
        capabilities=capabilities,
        warnings=(
            *warnings_about(config, loss, capabilities),
            *_left_out(made["prompts"]),
            *_unanswered(made["scorer"], made["prompts"], "prompts"),
            *_unanswered(made["scorer"], made["eval_prompts"], "eval.prompts"),
        ),
    )


def adapter_of(options: AdapterOptions, config: RunConfig) -> Adapter:
    """The backend's adapter, not yet entered; imports it, and with it torch if it needs that.

    Raises ConfigError when a library that it needs is missing.
    """
    where = "backend.type"
    try:
        found = find_plugin(ADAPTER, options.adapter, where, config.base_dir)
    except PluginError as error:
        if isinstance(error.__cause__, ModuleNotFoundError):
            kind = config.backend.type
            raise PluginError(
                f"{where}: {kind} needs {error.__cause__.name}, which is not installed: "
                f"pip install 'retrain[{_EXTRAS.get(kind, kind)}]'"
            ) from error
        raise
    adapter: Adapter = found(options, config)
    return adapter


def _left_out(prompts: PromptSource) -> Iterator[str]:
    """What of the data set is not trained on."""
    if isinstance(prompts, Pairs):
        for reason, count in prompts.dropped.items():
            yield f"prompts: {count} left out, {reason}; {len(prompts)} pairs remain"


def _unanswered(scorer: Scorer, prompts: PromptSource | None, where: str) -> Iterator[str]:
    """A reward may make do without an answer, so this is no error."""
    needy = [r.name for r in scorer.rewards if getattr(r.calculator, "needs_answer", False)]
    if not needy or not isinstance(prompts, ListPrompts):  # whose rows are at hand
        return
    if all(prompts.row(index).answer is None for index in range(len(prompts))):
        path = f" of {prompts.path}" if isinstance(prompts, FilePrompts) else ""
        yield (
            f"{where}: no row{path} has an answer, and the reward {', '.join(needy)} asks for one: "
            f"give the rows an `answer`, or name their column by {where}.answer_column"
        )


def target_of(kind: str, plugin: Plugin, where: str, config: RunConfig) -> Any:
    """The class or function that a plug-in section names."""
    return find_plugin(KINDS[kind], plugin.type, f"{where}.type", config.base_dir)


def _make(kind: str, plugin: Plugin, where: str, config: RunConfig) -> Any:
    """One instance of a plug-in section's class."""
    return _construct(where, _maker(kind, plugin, where, config))


def _maker(kind: str, plugin: Plugin, where: str, config: RunConfig) -> partial[Any]:
    """A plug-in section's class, its keys checked and bound."""
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


def _construct(where: str, make: Callable[[], T]) -> T:
    """Call a user's constructor; what it raises is a problem of the config."""
    try:
        return make()
    except ConfigError as error:
        if isinstance(error, PromptError):
            raise PromptError(*(f"{where}: {problem}" for problem in error.problems)) from error
        raise
    except Exception as error:
        name = getattr(getattr(make, "func", make), "__name__", "the constructor")
        raise PluginError(
            f"{where}: {name}(...) raised {type(error).__name__}: {error}{line_of(error)}"
        ) from error


def _in_form(algorithm: Algorithm, prompts: PromptSource, where: str) -> PromptSource:
    try:
        return algorithm.rows(prompts)
    except PromptError as error:
        raise PromptError(*(f"{where}: {problem}" for problem in error.problems)) from error


def _eval_prompts(config: RunConfig) -> PromptSource | None:
    if config.eval is None:
        return None
    return _prompts(config.eval.prompts, "eval.prompts", config)


def _prompts(plugin: Plugin, where: str, config: RunConfig) -> PromptSource:
    source: PromptSource = _make("prompts", plugin, where, config)
    if not len(source):
        name = type(source).__name__
        raise PromptError(f"{where}: {name} is empty: a run needs at least one prompt")
    return source


def _environment(config: RunConfig) -> partial[Environment]:
    make: partial[Environment] = _maker("environment", config.environment, "environment", config)
    _construct("environment", make)  # what its constructor refuses is told before the run
    return make


def chat_template(config: RunConfig) -> str:
    """`auto`, `none`, or the text of the file that `chat.template` names; raises ConfigError."""
    template = config.chat.template
    if template in ("auto", "none"):
        return template
    path = find_file(template, "chat.template", config.base_dir)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat.template: {path} can't be read as text: {error}") from error


def _loggers(config: RunConfig) -> tuple[Callback, ...]:
    return tuple(
        _make("logger", plugin, f"loggers.{index}", config)
        for index, plugin in enumerate(config.loggers)
    )


def _scorer(config: RunConfig) -> Scorer:
    parts: list[WeightedReward] = []
    problems: list[str] = []
    for index, reward in enumerate(config.rewards):
        with _collected(problems):
            parts.append(_reward(reward, f"rewards.{index}", config))
    names = [part.name for part in parts]
    twice = sorted({name for name in names if names.count(name) > 1})
    problems += [f"rewards: two are called {name!r}: give each its own `name`" for name in twice]
    if "environment" in names:
        problems.append(
            "rewards: `environment` is the name of the steps' own reward: choose a name"
        )
    if problems:
        raise PluginError(*problems)
    return Scorer(
        parts,
        deadline=config.deadlines.reward,
        concurrency=config.rollout.reward_concurrency,
    )


def _reward(reward: RewardConfig, where: str, config: RunConfig) -> WeightedReward:
    found = target_of("reward", reward, where, config)
    if isinstance(found, type):
        calculator: RewardCalculator = _make("reward", reward, where, config)
    elif isinstance(found, RewardCalculator) and not isinstance(found, FunctionReward):
        bind(lambda: None, reward.arguments, where)  # an instance takes no keys
        calculator = found
    else:
        calculator = _function_reward(found, reward, where)
    own_name = reward.type.replace("/", ":").rpartition(":")[2].removesuffix(".py")
    return WeightedReward(reward.name or calculator.name or own_name, reward.weight, calculator)


def _function_reward(found: Any, reward: RewardConfig, where: str) -> FunctionReward:
    """A reward function with the YAML's further keys bound to its arguments."""
    made = found if isinstance(found, FunctionReward) else None
    function = made.function if made else found
    keys = bind(
        function,
        reward.arguments,
        where,
        given=made.bound if made else {},
        provided=NAMES,
        beside=RewardConfig.model_fields,
    )
    return FunctionReward(function, made.name if made else "", **keys)


def _options(config: RunConfig) -> AdapterOptions:
    found: type[AdapterOptions] = target_of("backend", config.backend, "backend", config)
    try:
        return found.model_validate(config.backend.arguments)
    except ValidationError as error:
        of_others = dict(_keys_of_other_backends(config, found))
        problems = problems_of(error, found, of_others, "backend", keys_of(RunConfig))
        raise PluginError(*of_others.values(), *problems) from None


def _keys_of_other_backends(
    config: RunConfig, chosen: type[AdapterOptions]
) -> Iterator[tuple[str, str]]:
    """Paths of keys that the chosen backend lacks and another has, with what to say of each."""
    others: dict[str, type[AdapterOptions]] = {
        name: target_of("backend", Plugin(type=name), "backend", config)
        for name in built_in_names("backend")
    }
    for key in sorted(set(config.backend.arguments) - set(chosen.model_fields)):
        if not HOMES.get(key, "backend.").startswith("backend."):
            continue  # its home is elsewhere in the config
        owners = [name for name, options in others.items() if key in options.model_fields]
        if owners:
            told = f"a key of backend {' and '.join(owners)}; {config.backend.type} has none"
            path = f"backend.{key}"
            yield path, f"{path}: {told}: leave it out, or choose another backend.type"


@contextmanager
def _collected(problems: list[str]) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        problems += [p if not error.source else f"{error.source}: {p}" for p in error.problems]
