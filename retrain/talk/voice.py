"""A loaded model that answers calls, by the chat format and the sampler that runs use."""

from __future__ import annotations

import secrets
import sys
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

from retrain.chat import Chat
from retrain.concurrency.threads import DaemonPool
from retrain.errors import RetrainError, text_of
from retrain.rollout.calls import CallError, Calls, fitted
from retrain.sampler import Sampler, SamplingParams, Tokenizer
from retrain.talk.subject import Subject
from retrain.types import Completion


@dataclass(frozen=True)
class Voice:
    """Answers calls that share nothing."""

    chat: Chat
    sampler: Sampler
    params: SamplingParams
    context_length: int

    def calls(self) -> Calls:
        """A rollout for one call: its history is rendered by itself, and nothing is kept."""
        # A client may have the tool calls of several answers in one history, so their ids differ.
        return Calls(self.chat, self._sample, sys.maxsize, None, secrets.randbelow(90_000))

    async def _sample(
        self, prompt_ids: list[int], n: int, key: str, options: Mapping[str, Any]
    ) -> list[Completion]:
        """See `calls.Sample`; without a seed of the client, replies differ from call to call."""
        params = fitted(self.params, prompt_ids, self.context_length, options)
        try:
            return await self.sampler.sample(prompt_ids, params, n)
        except ValueError as error:
            raise CallError(400, "invalid_request_error", text_of(error)) from error
        except RetrainError as error:
            raise CallError(500, "server_error", text_of(error)) from error


@asynccontextmanager
async def opened(subject: Subject, device: str | None, threads: int) -> AsyncIterator[Voice]:
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
        yield Voice(chat, sampler, params, sampler.context_length or sys.maxsize)


def _loaded(subject: Subject, device: str | None) -> tuple[Chat, Any, Tokenizer]:
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
