"""From a RunConfig to the parts of a run; all problems of all parts are one ConfigError."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from retrain.adapters.base import AdapterOptions
from retrain.algorithms.base import Algorithm
from retrain.assembly import sections
from retrain.assembly.compatibility import Fit, check_compatible, warnings_about
from retrain.assembly.parts import Given, Parts, make, maker, normalisation_of
from retrain.assembly.sections import Problems
from retrain.chat.formats.base import Format
from retrain.config import PromptsConfig, RunConfig
from retrain.config.paths import find_model
from retrain.config.plugins import construct
from retrain.config.problems import keys_of
from retrain.environment import Environment
from retrain.errors import ConfigError, PromptError
from retrain.observe.callbacks import Callback
from retrain.prompts import Origin, PromptSource
from retrain.prompts.building import built
from retrain.prompts.examples import Pairs
from retrain.rollout.opponents import Opponent
from retrain.scoring import RewardCalculator, Scorer
from retrain.scoring.processes import ProcessReward
from retrain.types import Row

CheckRow = Callable[[Row], None]


def assemble(config: RunConfig, given: Given | None = None) -> Parts:
    """The parts of the run that `config` describes; loads no model.

    Raises ConfigError with every problem of every part, and of what does not fit together.
    """
    draft = Draft(config, given or Given())
    draft.make()
    draft.make_prompts()
    draft.compare()
    draft.problems.report()
    return draft.parts()


class Draft:
    """The parts so far: one that could not be made is not set, and its problem is collected."""

    environment: Callable[[], Environment]
    made: Environment
    """One that no rollout uses, for checks."""
    algorithm: Algorithm
    training: PromptSource
    prompts: PromptSource
    """`training`, with its rows as the algorithm reads them."""
    eval_prompts: PromptSource | None = None
    scorer: Scorer
    options: AdapterOptions
    chat_template: str
    tool_format: Format | None
    fit: Fit
    opponents: tuple[Mapping[str, Opponent], Mapping[str, Opponent]]
    """Those of training and of evaluations."""

    def __init__(self, config: RunConfig, given: Given) -> None:
        self.config, self.given, self.problems = config, given, Problems()
        self.loggers: list[Callback] = []
        self.about_rows: list[str] = []
        """Warnings."""
        self.about_tools = ""
        """A warning, if any."""

    def make(self) -> None:
        """The parts that need no other one."""
        config, given, collected = self.config, self.given, self.problems.collected
        with collected():
            section = config.environment
            environment = given.environment or maker("environment", section, "environment", config)
            self.made = construct("environment", environment)
            self.environment = environment
        with collected():
            self.algorithm = given.algorithm or make(
                "algorithm", config.algorithm, "algorithm", config
            )
        with collected():
            self.scorer = given.scorer or sections.scorer_of(config)
        with collected():
            self.options = sections.options_of(config)
        for index, plugin in enumerate(config.loggers):
            with collected():
                self.loggers.append(make("logger", plugin, f"loggers.{index}", config))
        with collected():
            self.chat_template = given.chat_template or sections.chat_template(config)
        with collected():
            self.tool_format = sections.tool_format(config)
        with collected():
            find_model(config.model, config.base_dir)

    def make_prompts(self) -> None:
        """The prompts, perhaps the environment's own, with rows as the algorithm reads them."""
        with self.problems.collected():
            given = self.given.prompts
            self.training = self._source("prompts", self.config.prompts, given, lambda: None)
            self.prompts = self._read("prompts", self.training)
        if self.config.eval is not None:
            with self.problems.collected():
                section, where = self.config.eval.prompts, "eval.prompts"
                rest = partial(self._known, "training")
                held_out = self._source(
                    where, section, self.given.eval_prompts, lambda: rest().held_out
                )
                self.eval_prompts = self._read(where, held_out)

    def compare(self) -> None:
        """What parts need of each other."""
        collected, known = self.problems.collected, self._known
        with collected():
            self.opponents = sections.opponents_of(self.config, known("made"), known("scorer"))
        with collected():
            if known("algorithm").source == "rollouts":
                self._check_rows("prompts", known("prompts"))
        with collected():
            self._check_rows("eval.prompts", self.eval_prompts)
        with collected():
            sections.check_installed(known("options"), self.config)
        with collected():
            if runs_agent(known("made")):
                sections.check_endpoint(self.config)
        with collected():
            if known("algorithm").source == "rollouts":
                self.about_tools = sections.tools_warning(
                    self.config,
                    *map(known, ("options", "chat_template", "tool_format", "made")),
                )
        with collected():
            fit = Fit.of(self.config, known("algorithm"), known("options"))
            check_compatible(fit, self.options, type(known("made")))
            self.fit = fit

    def _known(self, part: str) -> Any:
        """A part, if it could be made."""
        if not hasattr(self, part):
            raise ConfigError  # without a text: that problem is known
        return getattr(self, part)

    def _source(
        self,
        where: str,
        section: PromptsConfig,
        made: PromptSource | None,
        held_out: Callable[[], PromptSource | None],
    ) -> PromptSource:
        """A source with rows, of which the first and the last one are good."""
        if made is None:

            def own() -> Environment:
                make: Callable[[], Environment] = self._known("environment")
                return construct("environment", make)

            origin = Origin(where, self.config.base_dir, own, held_out)
            made = built(section, origin, keys_of(RunConfig))
        count = construct(where, made.__len__)
        if not count:
            name = made.name or type(made).__name__
            raise PromptError(f"{where}: {name} is empty, expected at least one prompt")
        for index in {0, count - 1}:  # a source of the user's makes the others during the run
            construct(where, partial(made.checked_row, index))
        return made

    def _read(self, where: str, source: PromptSource) -> PromptSource:
        algorithm: Algorithm = self._known("algorithm")
        if type(algorithm).rows is Algorithm.rows:  # it reads them as they are
            return source
        return construct(where, lambda: source.each(algorithm.rows))

    def _check_rows(self, where: str, source: PromptSource | None) -> None:
        checks = row_checks(self._known("made"), self._known("scorer"))
        if checks and source is not None:
            from retrain.assembly.rows import check_rows

            found = construct(where, lambda: list(check_rows(source, checks)))
            self.about_rows += [f"{where}: {text}" for text in found]

    def parts(self) -> Parts:
        """The checked parts."""
        config, fit, algorithm = self.config, self.fit, self.algorithm
        own = {k: v for k, v in config.algorithm.loss_config.items() if k != "force"}
        opponents, eval_opponents = self.opponents
        return Parts(
            config,
            prompts=self.prompts,
            eval_prompts=self.eval_prompts,
            environment=self.environment,
            scorer=self.scorer,
            algorithm=algorithm,
            loss=fit.loss,
            loss_config={**algorithm.loss_config, **own},
            normalisation=normalisation_of(fit.row, config.algorithm.normalisation),
            options=self.options,
            capabilities=fit.capabilities,
            chat_template=self.chat_template,
            tool_format=self.tool_format,
            loggers=tuple(self.loggers),
            learner=self.given.learner,
            opponents=opponents,
            eval_opponents=eval_opponents,
            runs_agent=runs_agent(self.made),
            warnings=tuple(self._warnings()),
        )

    def _warnings(self) -> Iterator[str]:
        yield from warnings_about(self.fit)
        yield from self.options.warnings(self.config)
        yield from (f"prompts: {text}" for text in self.training.warnings)
        if isinstance(self.prompts, Pairs):
            for reason, count in self.prompts.dropped.items():
                yield f"prompts: {count} dropped ({reason}); {len(self.prompts)} pairs remain"
        yield from self.about_rows
        yield from _unanswered(self.scorer, self.prompts, "prompts")
        yield from _unanswered(self.scorer, self.eval_prompts, "eval.prompts")
        if self.about_tools:
            yield self.about_tools


def runs_agent(environment: Environment) -> bool:
    """Whether the environment runs an agent, instead of answering its turns."""
    return type(environment).run is not Environment.run


def row_checks(environment: Environment, scorer: Scorer) -> tuple[CheckRow, ...]:
    """Those who override `check_row`; a reward that others gate may not concern all rows."""
    checks: list[CheckRow] = []
    if type(environment).check_row is not Environment.check_row:
        checks.append(environment.check_row)
    for term in scorer.rewards:
        calculator = term.calculator
        if isinstance(calculator, ProcessReward):
            calculator = calculator.inner
        overrides = type(calculator).check_row is not RewardCalculator.check_row
        if overrides and not scorer.composition.gates[term.name]:
            checks.append(calculator.check_row)
    return tuple(checks)


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
