"""From a RunConfig to the parts of a run; all problems of all parts are one ConfigError."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NoReturn, TypeVar

from pydantic import ValidationError

from retrain.adapters.base import AdapterOptions
from retrain.algorithms.base import Algorithm
from retrain.assembly.compatibility import check_compatible, warnings_about
from retrain.assembly.kinds import make, maker, target_of
from retrain.assembly.learner import Learner
from retrain.assembly.packages import installed, missing_packages
from retrain.assembly.parts import Given, Parts
from retrain.config import Plugin, RunConfig
from retrain.config.foreign import HOMES
from retrain.config.paths import find_file, find_model
from retrain.config.plugins import built_in_names, construct
from retrain.config.problems import keys_of, problems_of
from retrain.environment import Environment
from retrain.errors import (
    ConfigError,
    PluginError,
    PromptError,
    RunError,
    UserCodeError,
    install_command,
)
from retrain.prompts import FilePrompts, ListPrompts, PromptSource
from retrain.prompts.examples import Pairs
from retrain.rewarding import Scorer, WeightedReward, weighted_reward
from retrain.rollout.opponents import Opponent, opponent_of
from retrain.rollout.seats import seats_of

T = TypeVar("T")


def assemble(config: RunConfig, given: Given | None = None) -> Parts:
    """The parts of the run that `config` describes; loads no model.

    Raises ConfigError with every problem of every part, and of what does not fit together.
    """
    given = given or Given()
    problems: list[str] = []

    def attempt(make: Callable[[], T], made: T | None = None) -> Callable[[], T]:
        """Make a part, unless it is `made`. The result returns it, or raises if that failed."""
        try:
            part = make() if made is None else made
        except ConfigError as error:
            problems.extend(_lines(error))
            return _failed
        return lambda: part

    algorithm: Callable[[], Algorithm] = attempt(
        partial(make, "algorithm", config.algorithm, "algorithm", config), given.algorithm
    )

    def rows_of(plugin: Plugin, where: str, source: PromptSource | None) -> PromptSource:
        made: PromptSource = make("prompts", plugin, where, config) if source is None else source
        count = construct(where, lambda: len(made))
        if not count:
            raise PromptError(
                f"{where}: {type(made).__name__} is empty, expected at least one prompt"
            )
        for index in {0, count - 1}:  # a source of the user's makes the others during the run
            construct(where, partial(made.checked_row, index))
        return construct(where, lambda: algorithm().rows(made))

    rows = attempt(lambda: rows_of(config.prompts, "prompts", given.prompts))
    held_out: Callable[[], PromptSource | None] = attempt(
        lambda: (
            None
            if config.eval is None
            else rows_of(config.eval.prompts, "eval.prompts", given.eval_prompts)
        )
    )
    environment = attempt(partial(_environment, config), given.environment)
    scorer = attempt(partial(_scorer, config), given.scorer)
    opponents = attempt(lambda: _opponents(config, environment(), scorer()))
    options = attempt(partial(_options, config))
    attempt(lambda: _check_installed(options(), config))
    attempt(lambda: _check_endpoint(config, runs_agent(environment())))
    loggers = [
        attempt(partial(make, "logger", plugin, f"loggers.{index}", config))
        for index, plugin in enumerate(config.loggers)
    ]
    template = attempt(partial(chat_template, config), given.chat_template)
    attempt(partial(find_model, config.model, config.base_dir))
    fit = attempt(
        lambda: check_compatible(algorithm(), options(), config, _class_made_by(environment()))
    )
    if problems:
        raise ConfigError(*problems)
    loss, normalisation, capabilities = fit()
    own = {k: v for k, v in config.algorithm.loss_config.items() if k != "force"}
    return Parts(
        config,
        prompts=rows(),
        eval_prompts=held_out(),
        environment=environment(),
        scorer=scorer(),
        algorithm=algorithm(),
        loss=loss,
        loss_config={**algorithm().loss_config, **own},
        normalisation=normalisation,
        options=options(),
        capabilities=capabilities,
        chat_template=template(),
        loggers=tuple(logger() for logger in loggers),
        learner=given.learner or Learner(),
        opponents=opponents()[0],
        eval_opponents=opponents()[1],
        runs_agent=runs_agent(environment()),
        warnings=(
            *warnings_about(config, loss, capabilities),
            *options().warnings(config),
            *_dropped(rows()),
            *_unanswered(scorer(), rows(), "prompts"),
            *_unanswered(scorer(), held_out(), "eval.prompts"),
        ),
    )


def _failed() -> NoReturn:
    raise ConfigError  # its problems are collected already


def _lines(error: ConfigError) -> list[str]:
    return [f"{error.source}: {p}" if error.source else p for p in error.problems]


def _dropped(prompts: PromptSource) -> Iterator[str]:
    """Rows of the data set that are not trained on."""
    if isinstance(prompts, Pairs):
        for reason, count in prompts.dropped.items():
            yield f"prompts: {count} dropped ({reason}); {len(prompts)} pairs remain"


def _unanswered(scorer: Scorer, prompts: PromptSource | None, where: str) -> Iterator[str]:
    """A warning only, since a reward may work without an answer."""
    needy = [r.name for r in scorer.rewards if getattr(r.calculator, "needs_answer", False)]
    if not needy or not isinstance(prompts, ListPrompts):  # whose rows are in memory
        return
    if all(prompts.row(index).answer is None for index in range(len(prompts))):
        path = f" of {prompts.path}" if isinstance(prompts, FilePrompts) else ""
        yield (
            f"{where}: no row{path} has an answer, but the reward {', '.join(needy)} asks for one: "
            f"add an `answer` to the rows, or set {where}.answer_column"
        )


def runs_agent(make: Callable[[], Environment]) -> bool:
    """Whether the environments run an agent, instead of answering its turns."""
    return _class_made_by(make).run is not Environment.run


def _class_made_by(make: Callable[[], Environment]) -> type[Environment]:
    return getattr(make, "func", None) or type(make())


def _environment(config: RunConfig) -> partial[Environment]:
    made: partial[Environment] = maker("environment", config.environment, "environment", config)
    construct("environment", made)  # reports before the run what the constructor rejects
    return made


def _opponents(
    config: RunConfig, make: Callable[[], Environment], scorer: Scorer
) -> tuple[Mapping[str, Opponent], Mapping[str, Opponent]]:
    """The opponents of training and of evaluations; raises ConfigError if the seats don't fit."""
    held_out = config.eval.opponents if config.eval else None
    try:
        names = seats_of("environment", construct("environment", make))
    except UserCodeError as error:
        raise PluginError(str(error)) from error
    taken = {part.name for part in scorer.rewards} | {"environment"}
    if both := sorted(taken.intersection(names)):
        raise PluginError(f"environment: the seat {both[0]} has the name of a reward: rename one")
    found: list[dict[str, Opponent]] = []
    for where, section in (("opponents", config.opponents), ("eval.opponents", held_out)):
        if section is None:
            found.append(found[0])
            continue
        for name in section:
            if name not in names:
                seats = f"expected one of {', '.join(names)}" if names else "but it has no seats"
                raise PluginError(f"{where}: got {name!r}, no seat of the environment, {seats}")
        if names and len(section) == len(names):
            raise PluginError(f"{where}: got all seats, expected at least one that is trained")
        found.append(
            {n: opponent_of(p, f"{where}.{n}", config.base_dir) for n, p in section.items()}
        )
    return found[0], found[1]


def chat_template(config: RunConfig) -> str:
    """`auto`, `none`, or the content of the file `chat.template`; raises ConfigError."""
    template, where = config.chat.template, "chat.template: "
    if template in ("auto", "none"):
        return template
    path = find_file(template, config.base_dir, where)
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{where}can't read {path}: {error}") from error


def _scorer(config: RunConfig) -> Scorer:
    parts: list[WeightedReward] = []
    problems: list[str] = []
    for index, reward in enumerate(config.rewards):
        try:
            parts.append(
                weighted_reward(reward, f"rewards.{index}", config.base_dir, config.deadlines)
            )
        except ConfigError as error:
            problems += _lines(error)
    if "environment" in [part.name for part in parts]:
        problems.append(
            "rewards: the name 'environment' is reserved for the reward of the environment's "
            "steps: set another `name`"
        )
    if problems:
        raise PluginError(*problems)
    concurrency = config.rollout.reward_concurrency
    return Scorer(parts, deadlines=config.deadlines, concurrency=concurrency)


def _check_installed(options: AdapterOptions, config: RunConfig) -> None:
    if missing := list(missing_packages(options, config.backend.type)):
        raise PluginError(*missing)


def _check_endpoint(config: RunConfig, needed: bool) -> None:
    missing = [name for name in ("starlette", "uvicorn") if not installed(name)]
    if needed and missing:
        raise PluginError(
            f"environment.type: {config.environment.type} runs an agent, which needs what is not "
            f"installed ({', '.join(missing)}): {install_command('agents')}"
        )
    if needed and config.endpoint.port:
        from retrain.endpoint.connections import bound

        try:
            bound(config.endpoint).close()  # the model has not loaded yet
        except RunError as error:
            raise PluginError(str(error)) from error


def _options(config: RunConfig) -> AdapterOptions:
    found: type[AdapterOptions] = target_of("backend", config.backend, "backend", config)
    keys = config.backend.arguments
    try:
        return found.model_validate(keys)
    except ValidationError as error:
        others = [name for name in built_in_names("backend") if name != config.backend.type]
        theirs: dict[str, list[str]] = {}  # the keys that only other backends have
        for other in others:
            kind = target_of("backend", Plugin(type=other), "backend", config)
            for key in keys.keys() & kind.model_fields.keys() - found.model_fields.keys():
                if HOMES.get(key, "backend.").startswith("backend."):  # else of another section
                    theirs.setdefault(f"backend.{key}", []).append(other)
        problems = [
            f"{path}: not a key of {config.backend.type}, only of {' and '.join(owners)}: remove "
            "it, or choose another backend.type"
            for path, owners in sorted(theirs.items())
        ]
        problems += problems_of(error, found, theirs, "backend", keys_of(RunConfig))
        raise PluginError(*problems) from None
