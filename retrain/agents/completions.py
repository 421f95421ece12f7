"""OpenAI's API of text completions: no chat template, and prompts may be token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Annotated, Any

from pydantic import Field

from retrain.agents import api
from retrain.agents.calls import NOTHING, Reply
from retrain.agents.openai import NAMES, Sampling, Top, ending, envelope, head_of, only_sampled

MOST_CHOICES = 1024
"""Of one call."""


class _Text(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    echo: bool | None = False
    logprobs: Top | None = None


class Text:
    """`POST /completions`."""

    prefix = "cmpl"

    def read(self, body: Mapping[str, Any]) -> api.Request:
        asked = api.parse(_Text, body)
        prompts, n, top = _prompts(asked.prompt), asked.n or 1, asked.logprobs or 0
        if len(prompts) * n > MOST_CHOICES:
            raise api.invalid(
                f"prompt: got {len(prompts)} prompts with n {n}, expected at most {MOST_CHOICES} "
                "choices per call"
            )
        refused = only_sampled("logprobs", top, most=1)
        if asked.max_tokens == 0 and not asked.echo:
            raise api.invalid("max_tokens: got 0, expected an integer >= 1, or 0 with echo: true")
        if asked.echo:
            refused["echo"] = "got true, which a run does not support; send the call without it"
        if len(prompts) > 1:
            refused["prompt"] = f"got {len(prompts)} prompts, expected one per call"
        return api.Request(
            asked.model,
            prompts=prompts,
            n=n,
            stream=bool(asked.stream),
            options=api.options_of(asked, NAMES),
            extra=api.Extra(top, bool(asked.echo)),
            unused=api.unused_of(asked),
            refused=refused,
            body=asked,
        )

    def answer(
        self, request: api.Request, answer_id: str, replies: Sequence[Reply], decode: api.Decode
    ) -> dict[str, Any]:
        wanted = request.body.logprobs
        choices = []
        for index, reply in enumerate(replies):
            before = ""
            if request.extra.echo:
                prompt = request.prompts[index // request.n]
                before = prompt if isinstance(prompt, str) else decode(prompt)
            logprobs = None if wanted is None else _text_logprobs(reply, decode, wanted)
            choices.append(
                {
                    "index": index,
                    "text": before + reply.text,
                    "finish_reason": api.finish(reply),
                    "logprobs": logprobs,
                }
            )
        return envelope("text_completion", answer_id, request, choices, replies)

    def head(self, request: api.Request, answer_id: str) -> dict[str, Any]:
        return head_of("text_completion", answer_id, request)

    def delta(self, head: Mapping[str, Any], index: int, text: str, first: bool) -> api.Event:
        choice = {"index": index, "text": text, "finish_reason": None, "logprobs": None}
        return "", {**head, "choices": [choice]}

    def events(
        self, request: api.Request, answer: dict[str, Any], sent: Mapping[int, str] = NOTHING
    ) -> Iterator[api.Event]:
        head = dict(answer)
        usage = head.pop("usage")
        for choice in answer["choices"]:
            text = api.rest_of(choice["text"], sent.get(choice["index"], ""))
            yield "", {**head, "choices": [{**choice, "text": text}]}
        yield from ending(request, head, usage)


def _prompts(given: str | list[Any]) -> list[str | list[int]]:
    """The prompts of a call."""
    one = isinstance(given, str) or all(isinstance(part, int) for part in given)
    prompts: list[str | list[int]] = [given] if one else list(given)
    if not all(prompts):
        raise api.invalid("prompt: got an empty prompt, expected at least one token")
    return prompts


def _text_logprobs(reply: Reply, decode: api.Decode, top: int) -> dict[str, Any]:
    """The log-probs of the sampled tokens, after those of an echoed prompt."""
    said = reply.completion
    ids, logprobs = [*said.token_ids], list[float | None](said.logprobs)
    tops: list[api.Likely | None] = [*api.tops_of(said)]
    if isinstance(said, api.Detailed) and said.prompt_ids:
        ids = [*said.prompt_ids, *ids]
        logprobs = [None, *said.prompt_logprobs, *logprobs]
        tops = [None, *said.prompt_top, *tops]
    texts = [decode([token]) for token in ids]
    likeliest = [one if one is None else _by_text(one, decode) for one in tops]
    return {
        "tokens": texts,
        "token_logprobs": logprobs,
        "top_logprobs": likeliest if top and isinstance(said, api.Detailed) else None,
        "text_offset": [0, *accumulate(map(len, texts[:-1]))] if texts else [],
    }


def _by_text(likely: api.Likely, decode: api.Decode) -> dict[str, float]:
    """Of several tokens with the same text, such as parts of a character, the likeliest."""
    found: dict[str, float] = {}
    for token, logprob in likely:
        found.setdefault(decode([token]), logprob)
    return found
