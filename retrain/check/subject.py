"""`retrain check ENVIRONMENT|CONFIG`: load the subject, and check what it has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from pathlib import Path

from retrain.assembly import Parts, assemble, maker
from retrain.check.bench import Bench, Finding, Say, explained, fail, limited, ok, waiting, warn
from retrain.check.environments import SAMPLES, check_environment, contract
from retrain.check.rewards import tried_rewards
from retrain.config import Plugin, PromptsConfig, RunConfig, load_config
from retrain.config.paths import TINY, find_model
from retrain.config.plugins import built_in_names, config_file, construct, find_object
from retrain.config.variables import Problems, filled_in
from retrain.config.yaml_text import parse_override
from retrain.environment import Environment
from retrain.errors import ConfigError, NotFoundError, PluginError
from retrain.prompts import Origin
from retrain.prompts.building import built
from retrain.types import Prompt, Ticket

PROMPTS = 3
"""The rows of a config that its environment plays."""
Watched = Callable[[], AbstractContextManager[object]]


async def check_subject(
    subject: str,
    keys: Sequence[str] = (),
    say: Say = lambda text: None,
    replies: Sequence[str] = (),
    watched: Watched = nullcontext,
) -> list[Finding]:
    """Check a config's environment and rewards with its prompts, or an environment on its own.

    `keys` are overrides of the config, or `key=value` of the environment. `say` is called with what
    is being waited for, if it takes long. The rewards of a config score `replies` too. `watched` is
    entered for the checks, not while prompts load. Raises ConfigError if it can't be loaded.
    """
    own = subject in built_in_names("environment")  # some included configs have such a name
    file = Path(subject) if own else config_file(subject)
    if file.suffix in (".yaml", ".yml"):
        config, absent = _without_model(load_config(file, keys))
        parts = assemble(config)
        with watched():
            findings = await _checked_parts(parts, say, replies)
        return [*absent, *explained(findings, parts.config)]
    if replies:
        raise ConfigError(f"--reply: got the environment {subject}, expected a config with rewards")
    make = _maker(subject, keys)
    prompts = _own_tasks(make) or SAMPLES
    with watched():
        return await check_environment(make, prompts, say=say)


def _without_model(config: RunConfig) -> tuple[RunConfig, list[Finding]]:
    """The config; if its model is not trained yet, with another one and a warning."""
    try:
        find_model(config.model, config.base_dir)
    except NotFoundError as error:
        absent = warn("the model does not exist yet", str(error))
        return config.model_copy(update={"model": TINY}), [absent]
    except ConfigError:  # `assemble` reports it with the other problems
        pass
    return config, []


async def _checked_parts(loaded: Parts, say: Say, replies: Sequence[str]) -> list[Finding]:
    parts = replace(loaded, config=limited(loaded.config))
    fit = [ok("all parts of the config load and fit together"), *map(warn, parts.warnings)]
    if (source := parts.algorithm.source) != "rollouts":
        return [*fit, ok(f"the rows are {source}: the environment and the rewards are not used")]
    seed, rows = parts.config.train.seed, parts.prompts.first_rows(PROMPTS)
    prompts = [parts.prompts.prompt(Ticket(0, row), seed) for row in rows]
    bench = Bench(parts.environment, prompts, parts.config, say)
    with bench.blocks.watched():
        findings = await contract(bench)
        if any(finding.fatal for finding in findings):
            trials = [fail("rewards: not tried, because no rollout succeeds")]
        elif bench.blocks.too_long:
            trials = [fail("rewards: not tried, because the event loop is blocked")]
        else:
            with waiting(say, "the rewards, called for a few rollouts"):
                trials = await tried_rewards(parts, prompts, replies)
    return [*fit, *findings, bench.blocks.finding(), *trials]


def _maker(subject: str, keys: Sequence[str]) -> Callable[[], Environment]:
    unset: Problems = {}
    given = {path[0]: value for path, value in map(parse_override, keys)}
    arguments = filled_in(given, unset)
    if unset:
        raise ConfigError(*(f"{path}: {problem}" for path, problem in unset.items()))
    plugin = Plugin.model_validate({**arguments, "type": subject})
    try:
        return maker("environment", plugin, "environment", RunConfig(base_dir=Path.cwd()))
    except PluginError as error:
        raise _as_tool(subject, error) from error


def _as_tool(subject: str, error: PluginError) -> PluginError:
    """The error of a subject that is no environment, with what to do if it is a tool."""
    try:
        found = find_object(subject, Path.cwd(), "environment")
    except PluginError:
        return error
    is_class = isinstance(found, type) and issubclass(found, Environment)
    if is_class or not callable(found) or ":" not in subject:
        return error
    return PluginError(
        f"{subject} is not an environment. To check it as a tool: "
        f"retrain check tools 'tools=[{subject}]'. In a config: "
        f"`environment: {{type: tools, tools: [{subject}]}}`."
    )


def _own_tasks(make: Callable[[], Environment]) -> list[Prompt]:
    environment = construct("environment", make)
    if type(environment).prompts is Environment.prompts:
        return []
    origin = Origin("prompts", Path.cwd(), lambda: environment)
    source = built(PromptsConfig(type="environment", limit=PROMPTS), origin)
    return [source.prompt(Ticket(0, index)) for index in range(len(source))]
