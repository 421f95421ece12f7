"""From a RunConfig to the parts of a run; all problems of all parts are one ConfigError."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import NoReturn, TypeVar, cast

from pydantic import ValidationError

from retrain.adapters.base import AdapterOptions
from retrain.algorithms.base import Algorithm
from retrain.assembly.compatibility import check_compatible, warnings_about
from retrain.assembly.kinds import make, maker, target_of
from retrain.assembly.learner import Learner
from retrain.assembly.packages import installed, missing_packages
from retrain.assembly.parts import Given, Parts
from retrain.assembly.rows import check_rows, row_checks
from retrain.chat.formats.base import Format
from retrain.chat.probing import KIND
from retrain.config import Plugin, PromptsConfig, RunConfig
from retrain.config.foreign import HOMES
from retrain.config.paths import find_file, find_model
from retrain.config.plugins import built_in_names, construct, find_plugin
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
from retrain.prompts import Origin, PromptSource
from retrain.prompts.building import built
from retrain.prompts.examples import Pairs
from retrain.rewarding import Scorer, Term, WeightedReward, term_of
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

    environment = attempt(partial(_environment, config), given.environment)
    algorithm: Callable[[], Algorithm] = attempt(
        partial(make, "algorithm", config.algorithm, "algorithm", config), given.algorithm
    )

    def source_of(section: PromptsConfig, where: str, source: PromptSource | None) -> PromptSource:
        if source is None:
            origin = Origin(
                where,
                config.base_dir,
                lambda: construct("environment", environment()),
                (lambda: training().held_out) if where != "prompts" else lambda: None,
            )
            source = built(section, origin, keys_of(RunConfig))
        return _checked(where, source)

    def rows_of(made: PromptSource, where: str) -> PromptSource:
        return construct(where, lambda: made.each(algorithm().rows))

    training = attempt(lambda: source_of(config.prompts, "prompts", given.prompts))
    rows = attempt(lambda: rows_of(training(), "prompts"))
    evaluated = attempt(
        lambda: (
            None
            if config.eval is None
            else source_of(config.eval.prompts, "eval.prompts", given.eval_prompts)
        )
    )
    held_out = attempt(lambda: (made := evaluated()) and rows_of(made, "eval.prompts"))
    scorer = attempt(partial(_scorer, config), given.scorer)
    opponents = attempt(lambda: _opponents(config, environment(), scorer()))

    def check(made: PromptSource | None, where: str) -> list[str]:
        """The warnings about the rows of rollouts; raises PromptError."""
        checks = row_checks(construct("environment", environment()), scorer())
        found = construct(where, lambda: list(check_rows(made, checks) if made else ()))
        return [f"{where}: {text}" for text in found]

    plays = attempt(lambda: algorithm().source == "rollouts")
    unchecked = attempt(lambda: check(rows(), "prompts") if plays() else [])
    unchecked_eval = attempt(lambda: check(held_out(), "eval.prompts"))
    options = attempt(partial(_options, config))
    attempt(lambda: _check_installed(options(), config))
    attempt(lambda: _check_endpoint(config, runs_agent(environment())))
    loggers = [
        attempt(partial(make, "logger", plugin, f"loggers.{index}", config))
        for index, plugin in enumerate(config.loggers)
    ]
    template = attempt(partial(chat_template, config), given.chat_template)
    form = attempt(partial(tool_format, config))
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
        tool_format=form(),
        loggers=tuple(logger() for logger in loggers),
        learner=given.learner or Learner(),
        opponents=opponents()[0],
        eval_opponents=opponents()[1],
        runs_agent=runs_agent(environment()),
        warnings=(
            *warnings_about(config, loss, capabilities),
            *options().warnings(config),
            *(f"prompts: {text}" for text in training().warnings),
            *_dropped(rows()),
            *unchecked(),
            *unchecked_eval(),
            *_unanswered(scorer(), rows(), "prompts"),
            *_unanswered(scorer(), held_out(), "eval.prompts"),
        ),
    )


def _checked(where: str, source: PromptSource) -> PromptSource:
    """A source with rows, of which the first and the last one are good."""
    count = construct(where, lambda: len(source))
    if not count:
        name = source.name or type(source).__name__
        raise PromptError(f"{where}: {name} is empty, expected at least one prompt")
    for index in {0, count - 1}:  # a source of the user's makes the others during the run
        construct(where, partial(source.checked_row, index))
    return source


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
    if not needy or prompts is None or not prompts.read_at_start:
        return
    first = min(len(prompts), 1000)
    if all(prompts.checked_row(index).answer is None for index in range(first)):
        rows = "no row" if first == len(prompts) else f"none of the first {first} rows"
        yield (
            f"{where}: {rows} of {prompts.name} has an answer, but the reward {', '.join(needy)} "
            f"asks for one: add an `answer` to the rows, or set {where}.answer_column"
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
    if both := sorted(set(scorer.composition.names).intersection(names)):
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


def tool_format(config: RunConfig) -> Format | None:
    """The format `chat.tools`; None if it is to be inferred. Raises PluginError."""
    name = config.chat.tools
    if name == "auto":
        return None
    found = find_plugin(KIND, name, "chat.tools", config.base_dir)
    return cast(Format, construct("chat.tools", found) if inspect.isclass(found) else found)


def _scorer(config: RunConfig) -> Scorer:
    terms: list[Term] = []
    problems: list[str] = []
    for index, reward in enumerate(config.rewards):
        where = f"rewards.{index}"
        try:
            term = term_of(reward, where, config.base_dir, config.deadlines)
            if isinstance(term, WeightedReward):
                check = partial(term.calculator.check_group, config.algorithm.group_size)
                construct(where, check, type(term.calculator))
            terms.append(term)
        except ConfigError as error:
            problems += _lines(error)
    if problems:
        raise PluginError(*problems)
    concurrency = config.rollout.reward_concurrency
    return Scorer(terms, deadlines=config.deadlines, concurrency=concurrency)


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
