"""What vLLM's `/inference/v1/generate` returns, as our values. Pure."""

from __future__ import annotations

from retrain.errors import AdapterError
from retrain.sampler import Tokenizer
from retrain.types import Completion, StopReason
from retrain.vllm.client import Json


class ForeignWeightsError(AdapterError):
    """A server sampled with weights that the run did not publish."""


def completion_of(
    choice: Json, tokenizer: Tokenizer, *, full: int | None, version: int | None
) -> Completion:
    """A Completion of one choice.

    `full` is the number of tokens that fills the context; `version` that of the adapter, None if
    the choice's spans say it. Raises AdapterError if the reply is incomplete.
    """
    ids = choice["token_ids"]
    content = (choice["logprobs"] or {}).get("content") or ()
    logprobs = [one["logprob"] for one in content]
    if not ids or len(ids) != len(logprobs):
        raise AdapterError(
            f"vLLM returned {len(ids)} tokens and {len(logprobs)} log-probs, expected the same "
            "number, at least one"
        )
    reason = _stop_reason(choice, full=full is not None and len(ids) >= full)
    versions = [version] * len(ids) if version is not None else versions_of(choice, len(ids))
    text = tokenizer.decode(ids, skip_special_tokens=True)
    oldest = min(versions)
    per_token = versions if max(versions) != oldest else ()
    return Completion(ids, logprobs, text, reason, oldest, per_token)


def _stop_reason(choice: Json, *, full: bool) -> StopReason:
    if choice["finish_reason"] == "length":
        return "context" if full else "length"
    if choice["finish_reason"] != "stop":
        raise AdapterError(f"vLLM ended a completion with {choice['finish_reason']!r}")
    return "stop"


def versions_of(choice: Json, tokens: int) -> list[int]:
    """The version of the weights per token, (T,), from the spans."""
    versions: list[int] = []
    for span in choice["weight_versions"] or ():
        if span["start"] != len(versions):
            break
        versions += [int(span["version"])] * (span["end"] - span["start"])
    if len(versions) != tokens:
        raise AdapterError(
            f"vLLM returned {tokens} tokens, but the weight versions {choice['weight_versions']}; "
            "expected a version for each token, as vLLM 0.32 or later returns"
        )
    return versions


def prompt_rows(reply: Json, tokens: int) -> list[dict[int, float]]:
    """The log-probs by token id at each place of a prompt but the first; (tokens - 1,)."""
    rows = reply["prompt_logprobs"] or ()
    if len(rows) != tokens:
        raise AdapterError(f"vLLM scored {len(rows)} of {tokens} tokens, expected all of them")
    return [{int(i): float(one["logprob"]) for i, one in row.items()} for row in rows[1:]]


def sampled_row(content: Json) -> dict[int, float]:
    """The log-probs of a sampled token and of the likeliest ones, by token id."""
    rows = (content, *content["top_logprobs"])
    return {int(one["token_id"]): float(one["logprob"]) for one in rows}
