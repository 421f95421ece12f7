"""From a RunConfig to the parts of a run; all problems of all parts are one ConfigError.

`STEPS` first makes each part, then checks what two parts need of each other. A step is skipped if a
part that it needs could not be made: that problem is known.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

from retrain.adapters.base import AdapterOptions
from retrain.algorithms.base import Algorithm
from retrain.assembly import sections
from retrain.assembly.compatibility import Case, check_compatible, warnings_about
from retrain.assembly.parts import Given, Parts, make, normalisation_of
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
from retrain.rewarding import RewardCalculator, Scorer
from retrain.rewarding.processes import ProcessReward
from retrain.rollout.opponents import Opponent
from retrain.types import Row

CheckRow = Callable[[Row], None]


def assemble(config: RunConfig, given: Given | None = None) -> Parts:
    """The parts of the run that `config` describes; loads no model.

    Raises ConfigError with every problem of every part, and of what does not fit together.
    """
    draft, problems = Draft(config, given or Given()), Problems()
    for step, *needs in STEPS:
        if all(hasattr(draft, need) for need in needs):
            with problems.collected():
                step(draft)
    problems.report()
    return draft.parts()


class Draft:
    """The parts so far: one that could not be made is not set."""

    environment: Callable[[], Environment]
    made: Environment
    """One that no rollout uses, for checks."""
    algorithm: Algorithm
    training: PromptSource
    prompts: PromptSource
    """`training`, with its rows as the algorithm reads them."""
    held_out: PromptSource
    scorer: Scorer
    options: AdapterOptions
    chat_template: str
    tool_format: Format | None
    case: Case
    opponents: Mapping[str, Opponent]
    eval_opponents: Mapping[str, Opponent]

    def __init__(self, config: RunConfig, given: Given) -> None:
        self.config, self.given = config, given
        self.loggers: list[Callback] = []
        self.eval_prompts: PromptSource | None = None
        self.about_rows: list[str] = []
        """Warnings."""
        self.about_tools = ""
        """A warning."""

    # --- each part

    def make_environment(self) -> None:
        environment = self.given.environment or sections.environment_of(self.config)
        self.made = construct("environment", environment)
        self.environment = environment
        self.runs_agent = type(self.made).run is not Environment.run
        """Whether the environments run an agent, instead of answering its turns."""

    def make_algorithm(self) -> None:
        section = self.config.algorithm
        self.algorithm = self.given.algorithm or make(
            "algorithm", section, "algorithm", self.config
        )

    def make_scorer(self) -> None:
        self.scorer = self.given.scorer or sections.scorer_of(self.config)

    def make_options(self) -> None:
        self.options = sections.options_of(self.config)

    def make_loggers(self) -> None:
        problems = Problems()
        for index, plugin in enumerate(self.config.loggers):
            with problems.collected():
                self.loggers.append(make("logger", plugin, f"loggers.{index}", self.config))
        problems.report()

    def make_chat_template(self) -> None:
        self.chat_template = self.given.chat_template or sections.chat_template(self.config)

    def make_tool_format(self) -> None:
        self.tool_format = sections.tool_format(self.config)

    def find_model(self) -> None:
        find_model(self.config.model, self.config.base_dir)

    # --- the prompts, which may be the environment's own

    def make_prompts(self) -> None:
        given = self.given.prompts
        self.training = self._source("prompts", self.config.prompts, given, lambda: None)

    def make_held_out(self) -> None:
        section = self.config.eval
        if section is not None:
            given, where = self.given.eval_prompts, "eval.prompts"
            self.held_out = self._source(
                where, section.prompts, given, lambda: self._known("training").held_out
            )

    def read_prompts(self) -> None:
        self.prompts = construct("prompts", lambda: self.training.each(self.algorithm.rows))

    def read_held_out(self) -> None:
        rows = self.algorithm.rows
        self.eval_prompts = construct("eval.prompts", lambda: self.held_out.each(rows))

    def _source(
        self,
        where: str,
        section: PromptsConfig,
        made: PromptSource | None,
        held_out: Callable[[], PromptSource | None],
    ) -> PromptSource:
        """A source with rows, of which the first and the last one are good."""
        if made is None:
            origin = Origin(where, self.config.base_dir, self._own, held_out)
            made = built(section, origin, keys_of(RunConfig))
        source = made
        count = construct(where, lambda: len(source))
        if not count:
            name = source.name or type(source).__name__
            raise PromptError(f"{where}: {name} is empty, expected at least one prompt")
        for index in {0, count - 1}:  # a source of the user's makes the others during the run
            construct(where, partial(source.checked_row, index))
        return source

    def _own(self) -> Environment:
        """An environment whose own tasks are the prompts."""
        make: Callable[[], Environment] = self._known("environment")
        return construct("environment", make)

    def _known(self, part: str) -> Any:
        """A part, if it could be made."""
        if not hasattr(self, part):
            raise ConfigError  # without a text: that problem is known
        return getattr(self, part)

    # --- what parts need of each other

    def make_opponents(self) -> None:
        found = sections.opponents_of(self.config, self.made, self.scorer)
        self.opponents, self.eval_opponents = found

    def check_rows(self) -> None:
        if self.algorithm.source == "rollouts":
            self._check_rows("prompts", self.prompts)

    def check_held_out(self) -> None:
        if self.eval_prompts is not None:
            self._check_rows("eval.prompts", self.eval_prompts)

    def _check_rows(self, where: str, source: PromptSource) -> None:
        if checks := row_checks(self.made, self.scorer):
            from retrain.assembly.rows import check_rows

            found = construct(where, lambda: list(check_rows(source, checks)))
            self.about_rows += [f"{where}: {text}" for text in found]

    def check_installed(self) -> None:
        sections.check_installed(self.options, self.config)

    def check_endpoint(self) -> None:
        if self.runs_agent:
            sections.check_endpoint(self.config)

    def check_tools(self) -> None:
        if self.algorithm.source == "rollouts":
            self.about_tools = sections.tools_warning(
                self.config, self.options, self.chat_template, self.tool_format, self.made
            )

    def check_fit(self) -> None:
        self.case = Case.of(self.config, self.algorithm, self.options)
        check_compatible(self.case, self.options, type(self.made))

    # --- the end

    def parts(self) -> Parts:
        """The checked parts."""
        config, case, algorithm = self.config, self.case, self.algorithm
        own = {k: v for k, v in config.algorithm.loss_config.items() if k != "force"}
        return Parts(
            config,
            prompts=self.prompts,
            eval_prompts=self.eval_prompts,
            environment=self.environment,
            scorer=self.scorer,
            algorithm=algorithm,
            loss=case.loss,
            loss_config={**algorithm.loss_config, **own},
            normalisation=normalisation_of(case.row, config.algorithm.normalisation),
            options=self.options,
            capabilities=case.capabilities,
            chat_template=self.chat_template,
            tool_format=self.tool_format,
            loggers=tuple(self.loggers),
            learner=self.given.learner,
            opponents=self.opponents,
            eval_opponents=self.eval_opponents,
            runs_agent=self.runs_agent,
            warnings=tuple(self._warnings()),
        )

    def _warnings(self) -> Iterator[str]:
        yield from warnings_about(self.case)
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


STEPS: Iterable[tuple[Callable[[Draft], None], *tuple[str, ...]]] = (
    (Draft.make_environment,),
    (Draft.make_algorithm,),
    (Draft.make_prompts,),
    (Draft.read_prompts, "training", "algorithm"),
    (Draft.make_held_out,),
    (Draft.read_held_out, "held_out", "algorithm"),
    (Draft.make_scorer,),
    (Draft.make_options,),
    (Draft.make_loggers,),
    (Draft.make_chat_template,),
    (Draft.make_tool_format,),
    (Draft.find_model,),
    (Draft.make_opponents, "made", "scorer"),
    (Draft.check_rows, "made", "scorer", "algorithm", "prompts"),
    (Draft.check_held_out, "made", "scorer"),
    (Draft.check_installed, "options"),
    (Draft.check_endpoint, "made"),
    (Draft.check_tools, "made", "algorithm", "options", "chat_template", "tool_format"),
    (Draft.check_fit, "made", "algorithm", "options"),
)
"""Each with the parts that it needs."""


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
        if overrides and not scorer.composition.is_gated(term.name):
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
