"""From an open adapter to the slots of a run: what makes its rollouts, or reads its rows."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext, suppress
from functools import partial

from retrain.adapters.base import Adapter
from retrain.chat import Chat
from retrain.chat.template import NOT_SHOWN
from retrain.config import RunConfig
from retrain.pipeline.run import Run
from retrain.prompts.preparing import long_prompts
from retrain.rollout import Playback, Rollouts, Slot
from retrain.sampler import Sampler
from retrain.types import Message

logger = logging.getLogger(__name__)


@asynccontextmanager
async def serving(run: Run, adapter: Adapter) -> AsyncIterator[None]:
    """Use this open adapter to play and to train; serve an endpoint if agents need one."""
    run.backend.adapter = adapter
    run.skips_flat = run.parts.skips_flat and not adapter.model_loss
    adapter.watch(run.record.server)
    run.record.decode = adapter.tokenizer.decode
    if checks_publishes(run.config, adapter):
        from retrain.pipeline.verify import PublishCheck

        report = partial(run.record.event, "fault")
        run.backend.check = PublishCheck(run.config, adapter, lambda error: report(error=error))
    if run.sampled:
        _play(run, _chat(run))
    else:
        _read(run, _chat(run))
    if run.parts.learner is not None:
        run.parts.learner.attach(adapter)
    try:
        async with nullcontext() if run.door is None else run.door.serving():
            yield
    finally:
        for opponent in (*run.parts.opponents.values(), *run.parts.eval_opponents.values()):
            await opponent.close()


def checks_publishes(config: RunConfig, adapter: Adapter) -> bool:
    """Whether each publish is checked: if the config says so, or if that costs nothing."""
    wanted = config.train.check_publish
    return wanted is True or (wanted == "auto" and adapter.capabilities.checks == "free")


def _chat(run: Run) -> Chat:
    parts = run.parts
    chat = Chat(
        run.backend.adapter.tokenizer,
        template=parts.chat_template,
        arguments=run.config.chat.arguments,
        tools=parts.tool_format,
    )
    if NOT_SHOWN in parts.warnings:
        chat.template.shows_tools = False  # probed, it would warn again
    return chat


def _read(run: Run, chat: Chat) -> None:
    """Let the run and its evaluations read the rows of the dataset."""
    context = run.backend.adapter.context_length
    playback = Playback(chat, min(run.parts.algorithm.max_length or context, context))
    run.slot = lambda size: playback
    if run.evaluation is not None:
        run.evaluation.make_slot = lambda size, sampler: playback


def _play(run: Run, chat: Chat) -> None:
    """Let the run and its evaluations play rollouts."""
    config, parts, adapter = run.config, run.parts, run.backend.adapter
    if parts.runs_agent:
        from retrain.agents.server import EndpointServer

        run.door = EndpointServer(config.endpoint, adapter.tokenizer.decode)
    rollouts = Rollouts(
        config,
        adapter.sampler,
        chat,
        adapter.context_length,
        run.watch.progress,
        run.door,
        parts.opponents,
    )
    setups = asyncio.Semaphore(config.rollout.setup_concurrency)
    slot = partial(Slot, make=parts.environment, scorer=parts.scorer, setups=setups,
                   fault=run.record.fault)  # fmt: skip
    run.slot = partial(slot, rollouts=rollouts)

    def held_out(size: int, sampler: Sampler) -> Slot:
        return slot(size, rollouts=rollouts.held_out(sampler, parts.eval_opponents))

    if run.evaluation is not None:
        run.evaluation.make_slot = held_out
    _warn_of_length(run, chat, rollouts.context_length)


def _warn_of_length(run: Run, chat: Chat, context: int) -> None:
    """Warn of completions, and of prompts, that exceed the context."""
    most = run.config.sampling.max_tokens
    if most > run.backend.adapter.context_length:
        logger.warning(
            "sampling.max_tokens is %d, but prompt and completion share a context of %d tokens: "
            "completions are cut off there",
            most,
            run.backend.adapter.context_length,
        )

    def tokens(messages: Sequence[Message]) -> int:
        return len(chat.begin(messages).prompt_ids)

    with suppress(Exception):  # of the template: a rollout reports it
        if text := long_prompts(run.parts.prompts, tokens, context - most):
            logger.warning(
                "prompts: %s. With sampling.max_tokens (%d) they exceed the context of %d tokens: "
                "their completions are cut off, or their rollouts are invalid. Shorten them, or "
                "remove them with `filter`.",
                text,
                most,
                context,
            )
