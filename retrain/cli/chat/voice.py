"""A loaded model that answers calls, by the chat format and the sampler that runs use."""

from __future__ import annotations

import math
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from retrain.agents.api import Detailed, Extra, Likely
from retrain.agents.calls import CallError, Calls, fitted
from retrain.chat import Chat
from retrain.cli.chat.subject import LoadableModel
from retrain.errors import RetrainError, text_of
from retrain.sampler import SamplingParams, Tokenizer
from retrain.supervision.threads import DaemonPool
from retrain.types import Completion

if TYPE_CHECKING:
    from retrain.agents.live import Live
    from retrain.cli.chat.constraint import Constraints
    from retrain.engine.drawing import Top
    from retrain.engine.sampler import LocalSampler


@dataclass(frozen=True)
class Voice:
    """Answers calls that share nothing."""

    chat: Chat
    tokenizer: Tokenizer
    sampler: LocalSampler
    params: SamplingParams
    pool: DaemonPool
    """For what takes longer than a pass of the model."""

    @cached_property
    def _constraints(self) -> Constraints:
        from retrain.cli.chat.constraint import Constraints

        return Constraints(self.chat, self.tokenizer)

    @property
    def context_length(self) -> int:
        return self.sampler.context_length or sys.maxsize

    def spell(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens included."""
        return self.tokenizer.decode(token_ids)

    def calls(self) -> Calls:
        """A rollout for one call: its history is rendered by itself, and nothing is kept."""
        # A client may have the tool calls of several answers in one history, so their ids differ.
        first_call, stop = secrets.randbelow(90_000), self.params.stop
        return Calls(self.chat, self._sample, sys.maxsize, None, first_call, stop)

    async def _sample(
        self, prompt_ids: list[int], n: int, key: str, options: Mapping[str, Any]
    ) -> list[Completion]:
        """See `calls.SampleCall`; without a seed of the client, replies differ between calls."""
        options = dict(options)
        extra, watch = options.pop("extra", Extra()), options.pop("watch", None)
        try:
            echoed = await self._scored(prompt_ids, extra.top) if extra.echo else {}
            found = await self._drawn(prompt_ids, n, options, extra, watch)
        except ValueError as error:
            raise CallError(400, "invalid_request_error", text_of(error)) from error
        except RetrainError as error:
            raise CallError(500, "server_error", text_of(error)) from error
        names = [field.name for field in fields(Completion)]
        return [
            Detailed(**{n: getattr(one, n) for n in names}, **echoed, top=_likely(top))
            for one, top in found
        ]

    async def _drawn(
        self,
        prompt_ids: list[int],
        n: int,
        options: Mapping[str, Any],
        extra: Extra,
        watch: Live | None,
    ) -> Sequence[tuple[Completion, Top | None]]:
        if options.get("max_tokens") == 0:
            return [(Completion((), (), "", "length", self.sampler.version), None)] * n
        params = fitted(self.params, prompt_ids, self.context_length, options)
        mask, drawn = None, None if watch is None else watch.drawn
        if extra.masks:
            mask = await self.pool.run(lambda: self._constraints.mask(extra, prompt_ids))
        return await self.sampler.sample_with_top(
            prompt_ids, params, n, top=extra.top, mask=mask, watch=drawn
        )

    async def _scored(self, prompt_ids: list[int], top: int) -> dict[str, Any]:
        """The fields of a Detailed about its prompt."""
        given = [[token] for token in prompt_ids[1:]]
        found = await self.sampler.alternatives(prompt_ids, top=top, given=given)
        logprobs = [one for [one] in found.given or ()]
        likely = _likely(found.top) or [()] * len(logprobs)
        return {"prompt_ids": prompt_ids, "prompt_logprobs": logprobs, "prompt_top": likely}


def _likely(top: Top | None) -> list[Likely]:
    if top is None:
        return []
    rows = zip(top.ids.tolist(), top.logprobs.tolist(), strict=True)
    return [[(i, p) for i, p in zip(*row, strict=True) if p > -math.inf] for row in rows]


@asynccontextmanager
async def opened(subject: LoadableModel, device: str | None, threads: int) -> AsyncIterator[Voice]:
    """Load a model, in a thread that Ctrl-C need not wait for.

    Raises ConfigError if the model, its chat template or the device is not available.
    """
    pool = DaemonPool(1, "retrain-loading")
    try:
        chat, model, tokenizer = await pool.run(partial(_loaded, subject, device))
    finally:
        pool.close()
    from retrain.engine.sampler import LocalSampler

    async with LocalSampler(model, tokenizer, threads=threads) as sampler:
        del model  # the sampler has its own copy
        params = SamplingParams(**dict(subject.sampling), stop_token_ids=chat.stop_token_ids)
        pool = DaemonPool(1, "retrain-grammars")
        try:
            yield Voice(chat, tokenizer, sampler, params, pool)
        finally:
            pool.close()


def _loaded(subject: LoadableModel, device: str | None) -> tuple[Chat, Any, Tokenizer]:
    """The model is a PreTrainedModel."""
    from retrain.engine.models import load_for_sampling, load_tokenizer, resolve_model

    source, own = resolve_model(subject.model, Path()), subject.adapter
    has_own = own is not None and (own / "tokenizer.json").is_file()
    tokenizer = cast(Tokenizer, load_tokenizer(own if own is not None and has_own else source))
    template = subject.template
    if subject.base is None and template == "auto" and not tokenizer.chat_template:
        print(f"{subject.name} has no chat template: messages are concatenated", file=sys.stderr)
        template = "none"
    arguments, tools = subject.chat.arguments, subject.tools
    chat = Chat(tokenizer, template=template, arguments=arguments, tools=tools)
    return chat, load_for_sampling(source, own, device), tokenizer
