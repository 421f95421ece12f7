"""From a RunConfig to the parts of a run; all problems of all parts are one ConfigError."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial

from retrain.algorithms.base import Algorithm
from retrain.assembly import sections
from retrain.assembly.compatibility import check_compatible, warnings_about
from retrain.assembly.kinds import make
from retrain.assembly.parts import Given, Parts
from retrain.assembly.rows import check_rows, row_checks
from retrain.config import PromptsConfig, RunConfig
from retrain.config.paths import find_model
from retrain.config.plugins import construct
from retrain.config.problems import keys_of
from retrain.environment import Environment
from retrain.errors import PromptError
from retrain.prompts import Origin, PromptSource
from retrain.prompts.building import built
from retrain.prompts.examples import Pairs
from retrain.rewarding import Scorer

Held = PromptSource | None


def assemble(config: RunConfig, given: Given | None = None) -> Parts:
    """The parts of the run that `config` describes; loads no model.

    Raises ConfigError with every problem of every part, and of what does not fit together.
    """
    given = given or Given()
    attempt = sections.Attempts()
    environment = attempt(partial(sections.environment_of, config), given.environment)
    algorithm: Callable[[], Algorithm] = attempt(
        partial(make, "algorithm", config.algorithm, "algorithm", config), given.algorithm
    )
    training, rows, held_out = _prompts(config, given, attempt, environment, algorithm)
    scorer = attempt(partial(sections.scorer_of, config), given.scorer)
    opponents = attempt(lambda: sections.opponents_of(config, environment(), scorer()))
    checked = _checked_rows(attempt, environment, algorithm, scorer, rows, held_out)
    options = attempt(partial(sections.options_of, config))
    attempt(lambda: sections.check_installed(options(), config))
    attempt(lambda: sections.check_endpoint(config, runs_agent(environment())))
    loggers = [
        attempt(partial(make, "logger", plugin, f"loggers.{index}", config))
        for index, plugin in enumerate(config.loggers)
    ]
    template = attempt(partial(sections.chat_template, config), given.chat_template)
    form = attempt(partial(sections.tool_format, config))
    attempt(partial(find_model, config.model, config.base_dir))
    tools = attempt(
        lambda: (
            sections.tools_warning(
                config, options(), template(), form(), environment(), runs_agent(environment())
            )
            if algorithm().source == "rollouts"
            else ""
        )
    )
    fit = attempt(
        lambda: check_compatible(algorithm(), options(), config, _class_made_by(environment()))
    )
    attempt.finish()
    loss, normalisation, capabilities = fit()
    own = {k: v for k, v in config.algorithm.loss_config.items() if k != "force"}
    parts = Parts(
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
        learner=given.learner,
        opponents=opponents()[0],
        eval_opponents=opponents()[1],
        runs_agent=runs_agent(environment()),
    )
    warnings = [*_warnings(parts, training().warnings, checked()), *filter(None, [tools()])]
    return replace(parts, warnings=tuple(warnings))


def _prompts(
    config: RunConfig,
    given: Given,
    attempt: sections.Attempts,
    environment: Callable[[], Callable[[], Environment]],
    algorithm: Callable[[], Algorithm],
) -> tuple[Callable[[], PromptSource], Callable[[], PromptSource], Callable[[], Held]]:
    """The source of training, its rows for the algorithm, and the rows of evaluations."""

    def source(
        where: str, section: PromptsConfig, made: PromptSource | None, held_out: Callable[[], Held]
    ) -> PromptSource:
        origin = Origin(
            where, config.base_dir, lambda: construct("environment", environment()), held_out
        )
        keys = keys_of(RunConfig)
        return _checked(where, built(section, origin, keys) if made is None else made)

    def rows(made: PromptSource, where: str) -> PromptSource:
        return construct(where, lambda: made.each(algorithm().rows))

    training = attempt(lambda: source("prompts", config.prompts, given.prompts, lambda: None))
    trained = attempt(lambda: rows(training(), "prompts"))
    if config.eval is None:
        return training, trained, lambda: None
    section, where = config.eval.prompts, "eval.prompts"
    held_out = attempt(
        lambda: source(where, section, given.eval_prompts, lambda: training().held_out)
    )
    return training, trained, attempt(lambda: rows(held_out(), where))


def _checked(where: str, source: PromptSource) -> PromptSource:
    """A source with rows, of which the first and the last one are good."""
    count = construct(where, lambda: len(source))
    if not count:
        name = source.name or type(source).__name__
        raise PromptError(f"{where}: {name} is empty, expected at least one prompt")
    for index in {0, count - 1}:  # a source of the user's makes the others during the run
        construct(where, partial(source.checked_row, index))
    return source


def _checked_rows(
    attempt: sections.Attempts,
    environment: Callable[[], Callable[[], Environment]],
    algorithm: Callable[[], Algorithm],
    scorer: Callable[[], Scorer],
    rows: Callable[[], PromptSource],
    held_out: Callable[[], Held],
) -> Callable[[], list[str]]:
    """Warnings about the rows of rollouts, which the environment and the rewards check."""

    def check(where: str, made: Held) -> list[str]:
        checks = row_checks(construct("environment", environment()), scorer())
        found = construct(where, lambda: list(check_rows(made, checks) if made else ()))
        return [f"{where}: {text}" for text in found]

    plays = attempt(lambda: algorithm().source == "rollouts")
    own = attempt(lambda: check("prompts", rows()) if plays() else [])
    evaluated = attempt(lambda: check("eval.prompts", held_out()))
    return lambda: [*own(), *evaluated()]


def _warnings(parts: Parts, training: Iterable[str], rows: Iterable[str]) -> Iterator[str]:
    """All warnings, with those of the source of training and of the rows."""
    yield from warnings_about(parts.config, parts.loss, parts.capabilities)
    yield from parts.options.warnings(parts.config)
    yield from (f"prompts: {text}" for text in training)
    yield from _dropped(parts.prompts)
    yield from rows
    yield from _unanswered(parts.scorer, parts.prompts, "prompts")
    yield from _unanswered(parts.scorer, parts.eval_prompts, "eval.prompts")


def _dropped(prompts: PromptSource) -> Iterator[str]:
    """Rows of the dataset that are not trained on."""
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
            f"needs one: add an `answer` to the rows, or set {where}.answer_column"
        )


def runs_agent(make: Callable[[], Environment]) -> bool:
    """Whether the environments run an agent, instead of answering its turns."""
    return _class_made_by(make).run is not Environment.run


def _class_made_by(make: Callable[[], Environment]) -> type[Environment]:
    return getattr(make, "func", None) or type(make())
