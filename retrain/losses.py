"""The table of losses: one row per loss, with every fact that a backend or a check needs.

To add a loss that is a function of log-probs, write its formula and a row of `LOSSES` in this file.
It then runs on every backend: `engine.losses` applies the formula to tensors, and
`adapters.remote.surrogate` applies it to floats for services that do not compute the loss.

With r = exp(lp - old), where lp is the learner's and old the sampler's log-prob of a token, and
with A the token's advantage, a formula returns the loss of one token and its derivative dL/dlp. A
loss is the **sum** over the tokens whose mask is 1. An average is folded into the advantages
beforehand (`batching.normalised`), so that the losses of micro-batches add up to the batch's.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from retrain.errors import NEAR, ConfigError, nearest, shown

Normalisation = Literal["token", "sequence", "batch"]
"""What a loss is averaged over: tokens, sequences of token means, or sequences of token sums."""

TrlMean = Literal["row_means", "row_sums", "tokens", "sum"]

N = Any  # a float or a torch tensor: formulas use only operators and `Ops`
Keys = Mapping[str, float]
Result = tuple[N, N, N]
Formula = Callable[..., Result]


class Ops(Protocol):
    """The functions that a formula may call, for floats (`FLOATS`) or tensors (engine.losses)."""

    def exp(self, x: N, /) -> N: ...
    def clip(self, x: N, low: float, high: float, /) -> N: ...
    def where(self, condition: N, x: N, y: N, /) -> N: ...
    def sigmoid(self, x: N, /) -> N: ...
    def logsigmoid(self, x: N, /) -> N: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """One row of the table."""

    formula: Formula | None = None
    """None: only TRL computes it. Otherwise one of two functions, where `keys` has the values of
    the loss's keys:

    - of a token, (ops, keys, lp, old, r, A). It returns the loss, dL/dlp, and whether clipping
      changed them (None: this loss does not clip).
    - of a pair, (ops, keys, difference), where the difference is the chosen row's gain minus the
      rejected row's, and a row's gain is its sum(lp - reference). It returns the loss of a pair of
      weight 1, its derivative, and the margin to report."""
    keys: Mapping[str, float | None] = field(default_factory=dict)
    """Its keys in `algorithm.loss_config`, with their defaults. None is TRL's own default; for
    `epsilon_high` it is the value of `epsilon`."""
    reads: Literal["ratio", "rewards", "weights", "pairs"] = "ratio"
    """`ratio`: it learns from rewards, corrected by r. `rewards`: it learns from rewards and
    ignores old and r. `weights`: it learns from examples, whose weights are the advantages, and
    ignores old and r. `pairs`: it learns from pairs of examples."""
    vanishes: bool = False
    """Its loss and its gradient are 0 where the advantages are 0, but for the terms of `EXTRA`."""
    unbounded: bool = False
    """Its gradient grows with r without a limit, which makes old samples dangerous."""
    scaled: tuple[str, ...] = ()
    """Keys to multiply by the same factor as the advantages in order to scale the loss."""
    own_correction: bool = False
    """It treats samples of older weights in a way that `algorithm.mismatch` would undo."""
    normalisation: Normalisation = "token"
    """What it is averaged over unless `algorithm.normalisation` is set."""
    normalises_itself: bool = False
    """It is already an average, so `algorithm.normalisation` does not apply."""
    shared: tuple[str, Normalisation] | None = None
    """The loss of this table and the normalisation that it equals, for backends without TRL."""
    over_max_tokens: bool = False
    """It is also divided by sampling.max_tokens."""
    services: tuple[str, ...] = ()
    """The services that compute it for us. Tinker has no mask: there, advantages of 0 have to take
    a token out of the loss, so it must have no term that is left without them."""
    trl_mean: TrlMean | None = None
    """What TRL averages a micro-batch over before the batch's share is applied. `row_means`: rows,
    of which each is a mean over its tokens. `row_sums`: rows, of which each is a sum. `sum`: TRL
    divides by `num_items_in_batch`, the whole batch's. None: TRL does not compute it."""


def _importance_sampling(ops: Ops, keys: Keys, lp: N, old: N, r: N, a: N) -> Result:
    """-r A."""
    loss = -(r * a)
    return loss, loss, None


def _ppo(ops: Ops, keys: Keys, lp: N, old: N, r: N, a: N) -> Result:
    """-min(r A, clip(r, 1 - epsilon, 1 + epsilon_high) A); arXiv:1707.06347, eq. 7."""
    plain, clipped = r * a, ops.clip(r, *_bounds(keys)) * a
    stopped = clipped < plain
    return ops.where(stopped, -clipped, -plain), ops.where(stopped, 0.0, -plain), stopped


def _cispo(ops: Ops, keys: Keys, lp: N, old: N, r: N, a: N) -> Result:
    """-stop_gradient(clip(r, 1 - epsilon, 1 + epsilon_high)) A lp; arXiv:2506.13585, eq. 4."""
    clipped = ops.clip(r, *_bounds(keys))
    weight = clipped * a
    return -(weight * lp), -weight, clipped != r


def _log_likelihood(ops: Ops, keys: Keys, lp: N, old: N, r: N, a: N) -> Result:
    """-A lp.

    For `cross_entropy`, A is the token's weight. For `reinforce`, A is the sequence's advantage:
    the sum over its tokens is -A log p(sequence), as in REINFORCE and RLOO (Williams 1992;
    Ahmadian et al. 2024, arXiv:2402.14740). They have no ratio, since their samples are fresh.
    """
    return -(a * lp), -a, None


def _dro(ops: Ops, keys: Keys, lp: N, old: N, r: N, a: N) -> Result:
    """-(A lp - beta/2 (lp - old)^2); arXiv:2405.19107."""
    gap, beta = lp - old, keys["beta"]
    return -(a * lp - beta / 2 * (gap * gap)), -(a - beta * gap), None


def _dpo(ops: Ops, keys: Keys, difference: N) -> Result:
    """-log sigmoid(beta x the difference of the gains); arXiv:2305.18290, eq. 7."""
    margin = keys["beta"] * difference
    return -ops.logsigmoid(margin), -keys["beta"] * ops.sigmoid(-margin), margin


def mismatch_weight(
    ops: Any,  # Ops, which torch's overloaded functions fit only at run time
    kind: Literal["tis", "mask"],
    low: float,
    high: float,
    r: N,
) -> tuple[N, N]:
    """The weight of a token whose ratio, or whose sequence's, is r; and whether r is outside.

    `tis` is truncated importance sampling: r clipped to [low, high] (Yao et al. 2025, "Your
    efficient RL framework secretly brings you off-policy RL training"); without bounds it is the
    weight of decoupled PPO (Hilton et al. 2021, arXiv:2110.00641; AReaL, arXiv:2505.24298). `mask`
    is r inside of [low, high] and 0 outside (IcePop, arXiv:2510.18855).
    """
    clipped = ops.clip(r, low, high)
    outside = clipped != r
    return (clipped if kind == "tis" else ops.where(outside, 0.0, r)), outside


def _bounds(keys: Keys) -> tuple[float, float]:
    return 1 - keys["epsilon"], 1 + keys["epsilon_high"]


EXTRA = ("beta", "entropy_coef", "use_adaptive_entropy")
"""Keys of TRL's losses that add a term without advantages, unless they are unset or 0."""


def _of_trl(trl_mean: TrlMean, *names: str, **facts: Any) -> Loss:  # facts: further fields
    """One of TRL's own losses, with the keys that all of them have and `names`."""
    common = (
        *("beta", "use_bias_correction_kl", "off_policy_mask_threshold", "entropy_coef"),
        *("use_adaptive_entropy", "entropy_coef_min", "entropy_coef_max", "entropy_coef_delta"),
        "entropy_target",
    )
    keys = dict.fromkeys((*common, *names))
    return Loss(keys=keys, normalises_itself=True, trl_mean=trl_mean, vanishes=True, **facts)


_LEVEL = "importance_sampling_level"
_CLIP = ("epsilon", "epsilon_high", "delta", _LEVEL)

LOSSES: dict[str, Loss] = {
    "importance_sampling": Loss(
        formula=_importance_sampling, vanishes=True, unbounded=True, services=("tinker", "weaver")
    ),
    "ppo": Loss(
        formula=_ppo,
        keys={"epsilon": 0.2, "epsilon_high": None},
        vanishes=True,
        services=("tinker",),
    ),
    "cispo": Loss(
        formula=_cispo,
        vanishes=True,
        keys={"epsilon": 1.0, "epsilon_high": 4.0},
        services=("tinker",),
        trl_mean="sum",
    ),
    "reinforce": Loss(
        formula=_log_likelihood, reads="rewards", vanishes=True, normalisation="batch"
    ),
    "cross_entropy": Loss(
        formula=_log_likelihood, reads="weights", vanishes=True, services=("tinker", "weaver")
    ),
    # Tinker computes it too, but with beta/2 (lp - old)^2 also of the prompt's tokens.
    "dro": Loss(formula=_dro, keys={"beta": 0.05}, scaled=("beta",), own_correction=True),
    # The size of a pair's advantages is its weight, which already holds the mean over pairs.
    "dpo": Loss(formula=_dpo, keys={"beta": 0.1}, reads="pairs", normalises_itself=True),
    # arXiv:2402.03300, eq. 3
    "grpo": _of_trl("row_means", *_CLIP, shared=("ppo", "sequence")),
    # arXiv:2503.14476, eq. 8
    "dapo": _of_trl("sum", *_CLIP, shared=("ppo", "token")),
    # A mean over a micro-batch's tokens, so over the whole batch it is dapo
    "bnpo": _of_trl("tokens", *_CLIP, shared=("ppo", "token")),
    # arXiv:2503.20783
    "dr_grpo": _of_trl(
        "row_sums", *_CLIP, "max_completion_length", shared=("ppo", "batch"), over_max_tokens=True
    ),
    # arXiv:2602.05261
    "luspo": _of_trl("row_sums", *_CLIP),
    # arXiv:2511.20347
    "sapo": _of_trl("row_means", _LEVEL, "sapo_temperature_pos", "sapo_temperature_neg"),
    # arXiv:2602.10693
    "vespo": _of_trl(
        "sum",
        *("vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg"),
        own_correction=True,
    ),
}
"""The losses by name. `algorithm.loss` can also name a function of the user's."""


def row_of(name: str) -> Loss:
    """The row of a loss.

    A function of the user's (`module:function`) is a loss of tokens, normalised like the others. A
    name that only a user's own backend knows normalises itself.
    """
    return LOSSES.get(name) or Loss(normalises_itself=":" not in name)


def vanishes(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a batch whose advantages are all 0 has a loss and a gradient of 0.

    `config` has the keys of the loss. Of a user's own loss nothing is known.
    """
    return row_of(name).vanishes and not any(config.get(key) for key in EXTRA)


def native_to(service: str) -> frozenset[str]:
    """The losses that `service` computes itself."""
    return frozenset(name for name, row in LOSSES.items() if service in row.services)


def shared_name(name: str) -> str:
    """The name of the loss that `name` equals, apart from normalisation; or `name` itself."""
    shared = row_of(name).shared
    return shared[0] if shared else name


def settings(name: str, config: Mapping[str, Any]) -> dict[str, float]:
    """The values of the keys of a loss that has a formula; raises ConfigError as `check_keys`."""
    check_keys(name, config)
    given = {key: value for key, value in config.items() if value is not None}
    merged = {**LOSSES[name].keys, **given}
    if merged.get("epsilon_high", 0.0) is None:
        merged["epsilon_high"] = merged["epsilon"]
    return {key: float(value) for key, value in merged.items() if value is not None}


def clip_bounds(values: Keys) -> tuple[float, float] | None:
    """The lowest and highest ratio under a loss with these keys; None: it does not clip."""
    return _bounds(values) if "epsilon_high" in values else None


def check_keys(name: str, config: Mapping[str, Any]) -> None:
    """Raises ConfigError on an unknown loss or key, or a value that is not a number.

    TRL checks the values of its own losses.
    """
    if name not in LOSSES:
        near, known = nearest(name, LOSSES, NEAR), ", ".join(sorted(LOSSES))
        raise ConfigError(f"unknown loss {name!r}{near}; expected one of {known}")
    row = LOSSES[name]
    for key, value in config.items():
        where = f"algorithm.loss_config.{key}"
        if key not in row.keys:
            takes = f"it takes {', '.join(row.keys) or 'no keys'}"
            near = nearest(str(key), row.keys, NEAR)
            raise ConfigError(f"{where}: the loss {name!r} has no such key{near}; {takes}")
        wrong = isinstance(value, bool) or not isinstance(value, (int, float, type(None)))
        if row.formula and (wrong or not math.isfinite(value or 0.0)):
            raise ConfigError(f"{where}: got {shown(value)}, expected a number")


def pair_rows(pair_ids: Sequence[float], credits: Sequence[float]) -> list[tuple[int, int]]:
    """The row numbers of the chosen and the rejected answer, pair by pair.

    Two rows with one id form a pair. A row's credit is the sum of its advantages: positive for the
    chosen row, negative for the rejected one. Raises ValueError on rows that do not form pairs.
    """
    members: dict[float, dict[bool, int]] = {}
    for row, (pair, credit) in enumerate(zip(pair_ids, credits, strict=True)):
        if credit == 0 or (credit > 0) in members.setdefault(pair, {}):
            got = "no advantage" if credit == 0 else "the same sign as its pair's other row"
            raise ValueError(
                f"row {row} of a batch of pairs has {got}; a pair is one row with positive "
                "advantages (chosen) and one row with negative advantages (rejected)"
            )
        members[pair][credit > 0] = row
    single = [pair for pair, rows in members.items() if len(rows) != 2]
    if single:
        raise ValueError(f"pairs {single} have one row; both rows must be in the same micro-batch")
    return [(rows[True], rows[False]) for rows in members.values()]


class _Floats:
    """`Ops` for floats; an overflow is infinity."""

    exp = staticmethod(lambda x: math.exp(x) if x < 700.0 else math.inf)
    clip = staticmethod(lambda x, low, high: min(max(x, low), high))
    where = staticmethod(lambda condition, x, y: x if condition else y)
    sigmoid = staticmethod(lambda x: math.exp(FLOATS.logsigmoid(x)))
    logsigmoid = staticmethod(lambda x: min(x, 0.0) - math.log1p(math.exp(-abs(x))))


FLOATS: Ops = _Floats()
