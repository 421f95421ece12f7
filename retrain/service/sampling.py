"""Sample requests of both protocols, and what the service answers, independent of their wire forms.

Every value is checked when the request arrives: a request that the sampler can't serve must not
reach the thread that it shares with others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from retrain.engine.drawing import Top
from retrain.engine.limits import check_params
from retrain.engine.sampler import Alternatives
from retrain.errors import shown
from retrain.sampler import SamplingParams
from retrain.service.errors import ServiceError, invalid
from retrain.service.fields import INT64, LONGEST, SEEDS, Json, fits, integer, want
from retrain.service.rows import check_range, numbers_of, prompt_of, tensor_of
from retrain.service.state import RequestLimits
from retrain.types import Completion

_DEFAULT_TOKENS = 4096
"""Completion tokens when neither the request nor the model sets a limit."""
_MOST_STOPS = 256
_UNSUPPORTED = {
    "prompt_alt_tokens_k": "",
    "record_stability_info": ": it is for the loss stable_reinforce, whose formula is not public",
    "return_sampling_mask": "",
    "return_old_logprob": "",
    "return_moe_topk_indices": "",
    "score_centering": "",
}
"""Options of a sample request, in either protocol, and why the service lacks them."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """What to sample, and what to report of the prompt."""

    prompt: list[int]
    params: SamplingParams
    count: int
    eos: bool
    """False: the model's stop tokens don't end a completion."""
    top: int
    """How many of the likeliest tokens to report at each sampled position."""
    score: bool
    """Whether to report the prompt's log-probs."""
    prompt_top: int
    targets: list[list[int]] | None
    """Ids to score at each position of the prompt but the first, -1 for none."""
    sparse: tuple[Sequence[int], Sequence[int]] | None
    """The form of `targets` on the wire, which the reply has too."""
    last: int | None
    """Report log-probs and likeliest tokens of the last so many tokens of the prompt only."""

    @property
    def scored(self) -> int:
        """The first position of the prompt that has a log-prob."""
        return 1 if self.last is None else len(self.prompt) - self.last


class SampleFindings(NamedTuple):
    """What a sample request found."""

    drawn: list[tuple[Completion, Top | None]]
    prompt_logprobs: list[float | None] | None
    alternatives: Alternatives | None
    """Of the prompt."""

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        tops = [top for _, top in self.drawn]
        more = self.alternatives
        return (
            sum(2 * len(completion.token_ids) for completion, _ in self.drawn)
            + sum(2 * top.ids.size for top in (*tops, more and more.top) if top is not None)
            + sum(map(len, (more and more.given) or ()))
            + len(self.prompt_logprobs or ())
        )


def sample_request(body: Json, limits: RequestLimits, *, eos: bool) -> SampleRequest:
    for name, reason in _UNSUPPORTED.items():
        if body.get(name):
            raise invalid(f"{name} is not supported{reason}; remove it")
    prompt = prompt_of(body, limits)
    params = sampling_params(want(body, "sampling_params", dict, {}), prompt, limits)
    targets = _targets(body, prompt, limits)
    score, last = want(body, "prompt_logprobs", bool, False), "prompt_logprobs_last_n"
    if body.get(last) is not None and not score:
        raise invalid(f"{last} needs prompt_logprobs: true")
    request = SampleRequest(
        prompt,
        params,
        integer(body, "num_samples", 1, limits.samples, 1),
        eos,
        top=integer(body, "topk_sample_logprobs", 0, limits.top, 0),
        score=score,
        prompt_top=integer(body, "topk_prompt_logprobs", 0, limits.top, 0),
        targets=None if targets is None else targets[0],
        sparse=None if targets is None else targets[1],
        last=None if body.get(last) is None else integer(body, last, 1, len(prompt) - 1),
    )
    _check_size(request, limits)
    return request


def sampling_params(given: Json, prompt: Sequence[int], limits: RequestLimits) -> SamplingParams:
    """`max_tokens` defaults to what fits into the context; `stop` may have strings and ids."""
    stops = _stops(given)
    params = SamplingParams(
        max_tokens=integer(given, "max_tokens", 1, 2**31 - 1, _room(prompt, limits)),
        temperature=want(given, "temperature", float, 1.0),
        top_p=want(given, "top_p", float, 1.0),
        top_k=max(0, integer(given, "top_k", -1, INT64[1], -1)),
        stop=tuple(one for one in stops if isinstance(one, str)),
        stop_token_ids=tuple(one for one in stops if isinstance(one, int)),
        seed=None if given.get("seed") is None else integer(given, "seed", *SEEDS),
    )
    try:
        check_params(params, 1)
    except ValueError as error:
        raise invalid(str(error)) from None
    return params


def _stops(given: Json) -> list[str | int]:
    """The strings and the token ids that end a completion."""
    stop = given.get("stop") or []
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(fits(one, str) or fits(one, int) for one in stops):
        raise invalid(
            f"stop: got {shown(stop)}, expected a string or a list of strings or ids, of at most "
            f"{LONGEST} characters"
        )
    ids = want(given, "stop_token_ids", list, [])
    if not all(fits(one, int) for one in ids):
        raise invalid(f"stop_token_ids: got {shown(ids)}, expected integers")
    if len(stops) + len(ids) > _MOST_STOPS:
        raise invalid(f"stop: got {len(stops) + len(ids)} stops, expected at most {_MOST_STOPS}")
    return stops + ids


def _room(prompt: Sequence[int], limits: RequestLimits) -> int:
    """The tokens that fit into the context after the prompt."""
    if limits.context is None:
        return _DEFAULT_TOKENS
    if len(prompt) >= limits.context:
        raise invalid(
            f"prompt: got {len(prompt)} tokens, expected fewer than the model's context of "
            f"{limits.context}"
        )
    return limits.context - len(prompt)


def _targets(
    body: Json, prompt: Sequence[int], limits: RequestLimits
) -> tuple[list[list[int]], tuple[Sequence[int], Sequence[int]] | None] | None:
    """`target_prompt_logprobs`, (T - 1, K), as rows, and its sparse form if it came in that."""
    name = "target_prompt_logprobs"
    if body.get(name) is None:
        return None
    tensor = tensor_of(body, name)
    width = tensor.dimensions[1] if len(tensor.dimensions) == 2 else None
    if type(width) is not int or not 1 <= width <= limits.top or len(prompt) < 2:
        got = shown(list(tensor.dimensions))
        raise invalid(f"{name}: got shape {got}, expected [{len(prompt) - 1}, 1 to {limits.top}]")
    numbers = numbers_of(name, tensor, (len(prompt) - 1, width), int, implied=-1)
    ids = [int(number) for number in numbers]
    check_range(name, ids, limits, lowest=-1)
    return [ids[at : at + width] for at in range(0, len(ids), width)], tensor.sparse


def _check_size(request: SampleRequest, limits: RequestLimits) -> None:
    """Raise ServiceError (413) if the result may hold too many numbers."""
    width = len(request.targets[0]) if request.targets else 0
    tokens = request.params.max_tokens
    if limits.context is not None:
        tokens = min(tokens, limits.context - len(request.prompt))
    numbers = request.count * tokens * 2 * (1 + request.top)
    numbers += len(request.prompt) * (1 + 2 * request.prompt_top + width)
    if numbers > limits.values:
        raise ServiceError(
            413,
            f"the result may have {numbers} numbers, expected at most {limits.values}; ask for "
            "fewer samples, fewer tokens or fewer of the likeliest tokens",
        )
