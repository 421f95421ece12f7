"""Whether the parts of a run fit together: reports at the start what a backend does not support.

Pure functions of the config and of what the parts declare about themselves.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterator

from retrain.adapters.base import AdapterOptions, Capabilities
from retrain.algorithms.base import Algorithm
from retrain.config import DeadlinesConfig, RunConfig, SamplingConfig
from retrain.environment import Environment
from retrain.errors import ConfigError, shown
from retrain.losses import Normalisation, row_of

NEUTRAL = (("temperature", 1.0), ("top_p", 1.0), ("top_k", 0))
"""The sampling settings that change the distribution, with the values that do not change it."""


def check_compatible(
    algorithm: Algorithm,
    options: AdapterOptions,
    config: RunConfig,
    environment: type[Environment],
) -> tuple[str, Normalisation | None, Capabilities]:
    """The loss, its normalisation and the backend's capabilities.

    Raises ConfigError with all problems.
    """
    capabilities = options.capabilities()
    loss = config.algorithm.loss or algorithm.loss
    problems = [
        *_loss(loss, config, capabilities),
        *_normalisation(loss, config),
        *_sampling(config, capabilities),
        *_staleness(loss, config, capabilities),
        *_kl_penalty(loss, algorithm, config, capabilities),
        *_no_signal(algorithm, config),
        *_group_size(algorithm, config),
        *options.problems(config),
    ]
    if algorithm.source != "rollouts":
        problems += _examples(algorithm, loss, config, capabilities)
    else:
        problems += _rewards(loss, config, environment)
    if problems:
        raise ConfigError(*problems)
    if row_of(loss).normalises_itself:
        return loss, None, capabilities
    return loss, config.algorithm.normalisation or "token", capabilities


def warnings_about(config: RunConfig, loss: str, capabilities: Capabilities) -> Iterator[str]:
    """What is allowed, but rarely intended."""
    yield from _stall(config.deadlines)
    sampling = config.sampling
    if sampling.temperature == 0 and config.algorithm.group_size > 1:
        yield (
            "sampling.temperature is 0: the rollouts of a group are equal unless the environment "
            "differs, and nothing is learned from equal rewards"
        )
    if row_of(loss).reads != "ratio" or sampling.temperature == 0:
        return
    shaped = [
        f"{name} {getattr(sampling, name)}"
        for name, neutral in NEUTRAL
        if getattr(sampling, name) != neutral and name not in capabilities.scored_as_sampled
    ]
    if shaped:
        yield (
            f"sampling with {', '.join(shaped)}: {loss} weighs tokens by the ratio of the "
            "trainer's probability to the sampler's. This backend's trainer does not apply these "
            "settings, so the ratio is not 1 even for fresh samples; watch kl/sampler_trainer"
        )


def _stall(deadlines: DeadlinesConfig) -> Iterator[str]:
    """During one long call nothing else may progress, so the stall limit is reached first."""
    longer = {
        name: limit
        for name, limit in deadlines
        if name not in ("stall", "blocked") and limit > deadlines.stall
    }
    if longer:
        yield (
            f"deadlines.stall is {deadlines.stall:g} s, less than deadlines."
            f"{', '.join(f'{name} ({limit:g})' for name, limit in longer.items())}: a longer call "
            "can end the run before it reaches its own deadline; raise stall to at least "
            f"{max(longer.values()):g}, or lower the others"
        )


def _loss(loss: str, config: RunConfig, capabilities: Capabilities) -> Iterator[str]:
    able = capabilities.losses
    if loss in able or (":" in loss and capabilities.custom_losses):
        return
    where = f"algorithm.loss: the {config.backend.type} backend"
    if ":" in loss:
        yield f"{where} does not support a loss of your own; it has {', '.join(sorted(able))}"
        return
    near = difflib.get_close_matches(loss, sorted(able), n=1)
    shared = row_of(loss).shared
    if shared and shared[0] in able:
        hint = f"; {shared[0]} with normalisation: {shared[1]} is the same"
    else:
        hint = f"; the nearest is {near[0]}" if near else ""
    yield f"{where} has no loss {loss!r}{hint} (it has {', '.join(sorted(able))})"


def _normalisation(loss: str, config: RunConfig) -> Iterator[str]:
    wanted, row = config.algorithm.normalisation, row_of(loss)
    if wanted is not None and row.normalises_itself:
        yield (
            f"algorithm.normalisation: got {wanted!r}, but the loss {loss} has its own "
            "normalisation; remove it, or use the loss ppo"
        )
    if wanted == "sequence" and row.scaled:
        yield (
            f"algorithm.normalisation: {loss} can't be normalised by sequence; use token or batch"
        )


def _sampling(config: RunConfig, capabilities: Capabilities) -> Iterator[str]:
    plain = SamplingConfig()
    for name in SamplingConfig.model_fields:
        value = getattr(config.sampling, name)
        if value != getattr(plain, name) and name not in capabilities.sampling:
            yield (
                f"sampling.{name}: got {shown(value)}, but the {config.backend.type} backend does "
                "not support it; remove it"
            )


def _staleness(loss: str, config: RunConfig, capabilities: Capabilities) -> Iterator[str]:
    limit = capabilities.max_staleness
    if limit is not None and config.staleness.bound > limit:
        yield (
            f"staleness.max: is {config.staleness.bound}, but the {config.backend.type} backend "
            f"allows at most {limit}"
        )
    force = config.algorithm.loss_config.get("force", False)
    if not isinstance(force, bool):
        yield f"algorithm.loss_config.force: got {shown(force)}, expected true or false"
    elif row_of(loss).unbounded and config.staleness.target > 1 and not force:
        yield (
            f"staleness.target: got {config.staleness.target}, but {loss} does not clip its ratio, "
            "which can be extreme for old samples; use the loss ppo or cispo, use a target of at "
            "most 1, or set algorithm.loss_config.force: true"
        )


def _kl_penalty(
    loss: str, algorithm: Algorithm, config: RunConfig, capabilities: Capabilities
) -> Iterator[str]:
    """The penalty compares unshaped log-probs: the sampler's and the reference's."""
    settings = config.algorithm
    if not settings.kl_penalty:
        return
    where = f"algorithm.kl_penalty: got {settings.kl_penalty}, but"
    if algorithm.source != "rollouts":
        yield f"{where} {settings.type} samples no tokens to penalise; remove it"
    if not capabilities.scores:
        yield f"{where} the {config.backend.type} backend has no reference log-probs; remove it"
    if settings.loss_config.get("beta") and row_of(loss).formula is None:
        yield f"{where} algorithm.loss_config.beta is a KL to the same reference; remove one"
    if any(getattr(config.sampling, name) != neutral for name, neutral in NEUTRAL):
        yield (
            f"{where} it compares the sampled distribution with the reference's unshaped one; set "
            "sampling.temperature to 1, top_p to 1 and top_k to 0"
        )


def _no_signal(algorithm: Algorithm, config: RunConfig) -> Iterator[str]:
    whole_batch = algorithm.source != "rollouts" or algorithm.compares == "batch"
    if config.train.no_signal == "refill" and whole_batch:
        yield (
            f"train.no_signal: got 'refill', but {config.algorithm.type} learns from groups with "
            "equal rewards too; set it to keep"
        )


def _group_size(algorithm: Algorithm, config: RunConfig) -> Iterator[str]:
    if config.algorithm.group_size < algorithm.min_group_size:
        yield (
            f"algorithm.group_size: got {config.algorithm.group_size}, but "
            f"{config.algorithm.type} compares the rollouts of one prompt; expected at least "
            f"{algorithm.min_group_size}"
        )


def _examples(
    algorithm: Algorithm, loss: str, config: RunConfig, capabilities: Capabilities
) -> Iterator[str]:
    """Sections without an effect when the rows of the data set are trained."""
    settings, plain = config.algorithm, RunConfig(prompts=config.prompts)
    where = f"has no effect: algorithm {settings.type} trains on {algorithm.source} of the data set"
    if config.environment != plain.environment:
        yield f"environment: {config.environment.type} {where}; remove it"
    if config.rewards:
        yield f"rewards: {config.rewards[0].type} {where}; remove it"
    if config.sampling != plain.sampling:
        yield f"sampling: it {where}; remove it (see algorithm.max_length)"
    size = {"demonstrations": 1, "pairs": 2}[algorithm.source]
    if settings.group_size not in (plain.algorithm.group_size, size):
        yield (
            f"algorithm.group_size: {settings.group_size} {where}, {size} per row; remove it "
            "(train.groups_per_step is the batch size)"
        )
    if loss != algorithm.loss:
        yield f"algorithm.loss: got {loss!r}, but {settings.type} uses {algorithm.loss}; remove it"
    for key in sorted(algorithm.loss_config.keys() & settings.loss_config.keys()):
        yield f"algorithm.loss_config.{key}: that is algorithm.{key} here"
    if config.eval is not None and not capabilities.scores:
        yield f"eval: the {config.backend.type} backend can't score given tokens; remove it"


def _rewards(loss: str, config: RunConfig, environment: type[Environment]) -> Iterator[str]:
    reads = row_of(loss).reads
    if reads == "pairs":
        yield (
            f"algorithm.loss: {loss} compares given answers, but {config.algorithm.type} trains on "
            "rollouts; set algorithm.type to dpo"
        )
    if reads == "ratio" and not config.rewards and environment.step is Environment.step:
        yield (
            f"rewards: missing, and the step of the environment {config.environment.type} returns "
            "no reward, so nothing can be learned; return one from its step, or add e.g. "
            "`rewards: [{type: my_reward.py:my_function}]`"
        )
