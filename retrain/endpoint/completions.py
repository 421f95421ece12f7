"""OpenAI's API of text completions: no chat template, and the prompt may be token ids."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate
from typing import Any

from retrain.endpoint import api
from retrain.endpoint.openai import NAMES, UNUSED, Sampling, ending, envelope, only_sampled
from retrain.rollout.calls import Reply


class _Text(Sampling):
    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = False
    logprobs: int | None = None


class Text:
    """`POST /completions`."""

    prefix = "cmpl"

    def read(self, body: Mapping[str, Any]) -> api.Request:
        asked = api.parse(_Text, body)
        prompt = _prompt(asked.prompt)
        only_sampled("logprobs", asked.logprobs, most=1)
        if asked.echo:
            raise api.invalid("echo: got true, which is not supported; send the call without it")
        return api.Request(
            asked.model,
            prompt=prompt,
            n=asked.n or 1,
            stream=bool(asked.stream),
            options=api.options_of(asked, NAMES),
            unused=api.unused_of(body, UNUSED),
            body=asked,
        )

    def answer(
        self, request: api.Request, answer_id: str, replies: Sequence[Reply], decode: api.Decode
    ) -> dict[str, Any]:
        wanted = request.body.logprobs is not None
        choices = [
            {
                "index": index,
                "text": reply.text,
                "finish_reason": api.finish(reply),
                "logprobs": _text_logprobs(reply, decode) if wanted else None,
            }
            for index, reply in enumerate(replies)
        ]
        return envelope("text_completion", answer_id, request, choices, replies)

    def events(self, request: api.Request, answer: dict[str, Any]) -> Iterator[api.Event]:
        head = dict(answer)
        usage = head.pop("usage")
        for choice in answer["choices"]:
            yield "", {**head, "choices": [choice]}
        yield from ending(request, head, usage)


def _prompt(prompt: str | list[Any]) -> str | list[int]:
    """The one prompt of a text completion."""
    if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
        prompt = prompt[0]
    if isinstance(prompt, list) and not all(isinstance(token, int) for token in prompt):
        raise api.invalid(f"prompt: got {len(prompt)} prompts, expected one per call")
    if not prompt:
        raise api.invalid("prompt: got an empty prompt, expected at least one token")
    return prompt


def _text_logprobs(reply: Reply, decode: api.Decode) -> dict[str, Any]:
    completion = reply.completion
    texts = [decode([token]) for token in completion.token_ids]
    return {
        "tokens": texts,
        "token_logprobs": list(completion.logprobs),
        "top_logprobs": None,
        "text_offset": [0, *accumulate(map(len, texts[:-1]))] if texts else [],
    }
