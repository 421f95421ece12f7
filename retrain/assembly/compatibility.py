"""Whether the parts of a run fit together: reports at the start what a backend does not support.

Pure functions of the config and of what the parts declare about themselves.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from retrain.adapters.base import AdapterOptions, Capabilities
from retrain.algorithms.base import Algorithm
from retrain.config import RunConfig, SamplingConfig
from retrain.environment import Environment
from retrain.errors import ConfigError, nearest, shown
from retrain.losses import Loss, row_of

SHAPING = frozenset({"temperature", "top_p", "top_k"})
"""The sampling settings that change the distribution, unless they have their default."""
ROWS = {"demonstrations": 1, "pairs": 2}
"""What an algorithm learns from other than rollouts, and the number of answers per row."""


@dataclass(frozen=True, slots=True)
class Fit:
    """What is compared: the config, its algorithm and loss, and what the backend supports."""

    config: RunConfig
    algorithm: Algorithm
    loss: str
    row: Loss
    capabilities: Capabilities

    @classmethod
    def of(cls, config: RunConfig, algorithm: Algorithm, options: AdapterOptions) -> Fit:
        loss = config.algorithm.loss or algorithm.loss
        return cls(config, algorithm, loss, row_of(loss), options.capabilities())


def check_compatible(fit: Fit, options: AdapterOptions, environment: type[Environment]) -> None:
    """Raises ConfigError with all problems."""
    own = fit.algorithm.source in ROWS
    problems = [
        *_supported(fit),
        *_loss(fit),
        *_backend(fit.config, fit.capabilities),
        *_kl_penalty(fit),
        *_mismatch(fit),
        *_check_publish(fit),
        *_algorithm(fit.algorithm, fit.config),
        *options.problems(fit.config),
        *(_examples(fit) if own else _rewards(fit, environment)),
    ]
    if problems:
        raise ConfigError(*problems)


def warnings_about(fit: Fit) -> Iterator[str]:
    """What is allowed, but rarely intended."""
    config, sampling = fit.config, fit.config.sampling
    yield from _short_stall(config)
    if config.prompts.held_out and (config.eval is None or config.eval.prompts.type != "held_out"):
        yield (
            f"prompts.held_out holds out {config.prompts.held_out:g} of the rows, but nothing "
            "evaluates on them: set eval.prompts to held_out, or remove the key"
        )
    if sampling.temperature == 0 and config.algorithm.group_size > 1:
        yield (
            "sampling.temperature is 0: the rollouts of a group are equal unless the environment "
            "differs, and nothing is learned from equal rewards"
        )
    if fit.row.reads == "ratio":
        yield from _wrong_ratio(fit)
    yield from _clipped_credit(config)
    stale = config.staleness.bound > 0 and config.algorithm.mismatch is None
    if fit.row.reads == "rewards" and stale:
        yield (
            f"algorithm.loss: {fit.loss} has no ratio, so samples of older weights are trained as "
            "if they were fresh; set staleness.target to 0, or set algorithm.mismatch"
        )


def _wrong_ratio(fit: Fit) -> Iterator[str]:
    """What keeps the ratio of the trainer's probability to the sampler's from being 1."""
    if shaped := _shaped(fit.config.sampling, fit.capabilities):
        yield (
            f"sampling with {shaped}: {fit.loss} weighs tokens by the ratio of the "
            "trainer's probability to the sampler's. This backend's trainer does not apply these "
            "settings, so the ratio is not 1 even for fresh samples; watch kl/sampler_trainer"
        )
    if own := sorted(SHAPING.intersection(fit.config.endpoint.honour)):
        yield (
            f"endpoint.honour: with an agent's own {', '.join(own)}, the ratio of the trainer's "
            f"probability to the sampler's, by which {fit.loss} weighs tokens, is not 1 even for "
            "fresh samples; watch kl/sampler_trainer"
        )


def _short_stall(config: RunConfig) -> Iterator[str]:
    """During one long call nothing else may progress."""
    stall = config.deadlines.stall
    longer = {
        name: limit
        for name, limit in config.deadlines
        if name not in ("stall", "blocked", "outage") and limit > stall
    }
    if longer:
        yield (
            f"deadlines.stall is {stall:g} s, less than deadlines."
            f"{', '.join(f'{name} ({limit:g})' for name, limit in longer.items())}: a longer call "
            "can end the run before it reaches its own deadline; raise stall to at least "
            f"{max(longer.values()):g}, or lower the others"
        )


def _clipped_credit(config: RunConfig) -> Iterator[str]:
    if config.algorithm.arguments.get("credit", "whole") == "whole":
        return
    for index, reward in enumerate(config.rewards):
        # the built-in rewards have no parts per turn
        parts = reward.type == "environment" or ":" in reward.type or ".py" in reward.type
        if parts and reward.clip is not None:
            yield (
                f"rewards.{index}.clip: a clipped reward has no per-turn values: all of it counts "
                "at the last turn, so algorithm.credit has no effect on it. Remove clip to use "
                "the values of each turn"
            )


def _shaped(sampling: SamplingConfig, capabilities: Capabilities) -> str:
    """The settings that change the sampler's distribution but not the trainer's."""
    if sampling.temperature == 0:
        return ""
    names = _changed(sampling).keys() & SHAPING - capabilities.scored_as_sampled
    return ", ".join(f"{name} {value}" for name, value in sampling if name in names)


def _changed(sampling: SamplingConfig) -> dict[str, Any]:
    """The settings that do not have their default."""
    return {name: v for name, v in sampling if v != SamplingConfig.model_fields[name].default}


def _supported(fit: Fit) -> Iterator[str]:
    loss, row, config, capabilities = fit.loss, fit.row, fit.config, fit.capabilities
    able = sorted(capabilities.losses)
    where = f"algorithm.loss: the {config.backend.type} backend"
    if ":" in loss and not (loss in able or capabilities.custom_losses):
        yield f"{where} does not support custom losses; it supports {', '.join(able)}"
    elif ":" not in loss and loss not in able:
        hint = nearest(loss, able, "; the nearest is {}")
        if row.shared and row.shared[0] in able:
            hint = f"; {row.shared[0]} with normalisation: {row.shared[1]} is the same"
        yield f"{where} does not support the loss {loss!r}{hint} (it supports {', '.join(able)})"


def _loss(fit: Fit) -> Iterator[str]:
    """Whether the loss can do what `algorithm` asks for."""
    loss, row, config, settings = fit.loss, fit.row, fit.config, fit.config.algorithm
    wanted, force = settings.normalisation, settings.loss_config.get("force", False)
    if wanted is not None and row.normalises_itself:
        yield (
            f"algorithm.normalisation: got {wanted!r}, but the loss {loss} has its own "
            "normalisation; remove it, or use the loss ppo"
        )
    if wanted == "sequence" and row.scaled:
        yield (
            f"algorithm.normalisation: {loss} can't be normalised by sequence; use token or batch"
        )
    if not isinstance(force, bool):
        yield f"algorithm.loss_config.force: got {shown(force)}, expected true or false"
    elif row.unbounded and config.staleness.target > 1 and not (force or settings.mismatch):
        yield (
            f"staleness.target: got {config.staleness.target}, but {loss} does not clip its ratio, "
            "which can be extreme for old samples; use the loss ppo or cispo, use a target of at "
            "most 1, set algorithm.mismatch, or set algorithm.loss_config.force: true"
        )


def _backend(config: RunConfig, capabilities: Capabilities) -> Iterator[str]:
    for name, value in _changed(config.sampling).items():
        if name not in capabilities.sampling:
            yield (
                f"sampling.{name}: got {shown(value)}, but the {config.backend.type} backend does "
                "not support it; remove it"
            )
    for name in config.endpoint.honour:
        if name not in capabilities.sampling:
            yield (
                f"endpoint.honour: got {name}, but the {config.backend.type} backend does not "
                "support it; remove it"
            )
    limit = capabilities.max_staleness
    if limit is not None and config.staleness.bound > limit:
        yield (
            f"staleness.max: got {config.staleness.bound}, but the {config.backend.type} backend "
            f"allows at most {limit}"
        )


def _kl_penalty(fit: Fit) -> Iterator[str]:
    """The penalty compares unshaped log-probs: the sampler's and the reference's."""
    config, settings = fit.config, fit.config.algorithm
    if not settings.kl_penalty:
        return
    where = f"algorithm.kl_penalty: got {settings.kl_penalty}, but"
    if fit.algorithm.source in ROWS:
        yield f"{where} {settings.type} samples no tokens to penalise; remove it"
    if not fit.capabilities.scores:
        yield f"{where} the {config.backend.type} backend has no reference log-probs; remove it"
    if settings.loss_config.get("beta") and fit.row.formula is None:
        yield f"{where} algorithm.loss_config.beta is a KL to the same reference; remove one"
    if _changed(config.sampling).keys() & SHAPING:
        yield (
            f"{where} it compares the sampled distribution with the reference's unshaped one; set "
            "sampling.temperature to 1, top_p to 1 and top_k to 0"
        )


def _mismatch(fit: Fit) -> Iterator[str]:
    """What would be corrected twice, or not as `algorithm.mismatch` says."""
    loss, row, config, capabilities = fit.loss, fit.row, fit.config, fit.capabilities
    settings, where = config.algorithm, "algorithm.mismatch:"
    if settings.mismatch is None:
        return
    if fit.algorithm.source in ROWS:
        yield f"{where} {settings.type} samples no tokens, so there is no mismatch; remove it"
        return
    if not capabilities.mismatch:
        yield f"{where} the {config.backend.type} backend does not support it; remove it"
    if row.own_correction:
        yield (
            f"{where} the loss {loss} corrects old samples itself, by the log-probs that mismatch "
            "replaces; use the loss ppo or importance_sampling, or remove mismatch"
        )
    for key, advice in {
        "off_policy_mask_threshold": "it corrects the same difference; remove one",
        "beta": "mismatch does not weigh this KL term; use algorithm.kl_penalty instead",
    }.items():
        if settings.loss_config.get(key) and row.formula is None:
            yield f"{where} got algorithm.loss_config.{key} too, but {advice}"
    level = settings.loss_config.get("importance_sampling_level")
    if settings.mismatch.level == "token" and (loss == "luspo" or level == "sequence"):
        yield (
            f"{where} level is token, but the ratio of the loss {loss} is the sequence's; set "
            "algorithm.mismatch.level to sequence"
        )
    if shaped := _shaped(config.sampling, capabilities):
        yield (
            f"{where} sampling with {shaped} changes the sampler's distribution but not the "
            "trainer's, and mismatch would undo it; remove algorithm.mismatch, or that setting"
        )


def _check_publish(fit: Fit) -> Iterator[str]:
    where, config = "train.check_publish: got true, but", fit.config
    if config.train.check_publish is not True:
        return
    if fit.algorithm.source in ROWS:
        yield f"{where} {config.algorithm.type} publishes for evaluations only; remove it"
    elif fit.capabilities.checks == "no":
        yield f"{where} the {config.backend.type} backend can't score tokens; remove it"


def _algorithm(algorithm: Algorithm, config: RunConfig) -> Iterator[str]:
    name, size = config.algorithm.type, config.algorithm.group_size
    whole_batch = algorithm.source in ROWS or algorithm.compares == "batch"
    if config.train.no_signal == "refill" and whole_batch:
        yield (
            f"train.no_signal: got 'refill', but {name} learns from groups with equal rewards too; "
            "set it to keep"
        )
    if size < algorithm.min_group_size:
        yield (
            f"algorithm.group_size: got {size}, but {name} compares the rollouts of one prompt; "
            f"expected at least {algorithm.min_group_size}"
        )


def _examples(fit: Fit) -> Iterator[str]:
    """Sections without an effect when the rows of the dataset are trained."""
    config, algorithm, loss = fit.config, fit.algorithm, fit.loss
    settings, plain = config.algorithm, RunConfig(prompts=config.prompts)
    where = f"has no effect: algorithm {settings.type} trains on {algorithm.source} of the dataset"
    if config.environment != plain.environment:
        yield f"environment: {config.environment.type} {where}; remove it"
    if config.rewards:
        yield f"rewards: {config.rewards[0].type} {where}; remove it"
    if _changed(config.sampling):
        yield f"sampling: it {where}; remove it (see algorithm.max_length)"
    size = ROWS[algorithm.source]
    if settings.group_size not in (plain.algorithm.group_size, size):
        yield (
            f"algorithm.group_size: {settings.group_size} {where}, {size} per row; remove it "
            "(train.groups_per_step is the batch size)"
        )
    if loss != algorithm.loss:
        yield f"algorithm.loss: got {loss!r}, but {settings.type} uses {algorithm.loss}; remove it"
    for key in sorted(algorithm.loss_config.keys() & settings.loss_config.keys()):
        yield f"algorithm.loss_config.{key}: that is algorithm.{key} here"
    if config.eval is not None and not fit.capabilities.scores:
        yield f"eval: the {config.backend.type} backend can't score given tokens; remove it"


def _rewards(fit: Fit, environment: type[Environment]) -> Iterator[str]:
    config, loss, reads = fit.config, fit.loss, fit.row.reads
    if reads == "pairs":
        yield (
            f"algorithm.loss: {loss} compares given answers, but {config.algorithm.type} trains on "
            "rollouts; set algorithm.type to dpo"
        )
    given = environment.step is not Environment.step or environment.run is not Environment.run
    if not config.rewards and not given and reads == "ratio":
        yield (
            f"rewards: missing, and the step of the environment {config.environment.type} returns "
            "no reward, so nothing can be learned; return one from its step, or add e.g. "
            "`rewards: [{type: my_reward.py:my_function}]`"
        )
