"""`retrain serve --openai RUN_DIR|MODEL`: a model for any client of OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.assembly import tool_format
from retrain.cli.chat.arguments import require
from retrain.cli.chat.subject import LoadableModel, find_subject
from retrain.cli.chat.voice import opened
from retrain.cli.process import DONE, drive
from retrain.config import RunConfig, ToolsConfig
from retrain.errors import RunError
from retrain.service.serve import api_key

if TYPE_CHECKING:
    from retrain.agents.public import PublicServer

ADVICE = "; start with --show-tools system: a system message shows them in the format hermes"
NEEDED = ("starlette", "uvicorn", "torch", "transformers", "peft")


def main(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    key = api_key(arguments)
    require(NEEDED, "service")
    subject = _with_tools(find_subject(arguments.openai), arguments)
    return drive(_serve(subject, arguments, key))


def _with_tools(subject: LoadableModel, arguments: argparse.Namespace) -> LoadableModel:
    """The subject with the options of tools that were given; raises PluginError."""
    given = {"format": arguments.tools, "show": arguments.show_tools}
    given = {key: value for key, value in given.items() if value is not None}
    if not given:
        return subject
    own = subject.chat.tools
    own = ToolsConfig(format=own) if isinstance(own, str) else own
    tools = ToolsConfig.model_validate({**own.model_dump(), **given})
    chat = subject.chat.model_copy(update={"tools": tools})
    config = RunConfig(chat=chat, base_dir=Path.cwd())
    return replace(subject, chat=chat, tools=tool_format(config))


async def _serve(subject: LoadableModel, arguments: argparse.Namespace, key: str | None) -> int:
    from retrain.agents.public import PublicServer

    server = PublicServer(arguments.host, arguments.port, key)
    async with AsyncExitStack() as stack:
        await _listen(server, stack, f"{arguments.host}:{arguments.port}")
        print(f"loading {subject.name}", flush=True)
        voice = await stack.enter_async_context(
            opened(subject, arguments.device, arguments.threads)
        )
        if problem := voice.chat.problem_with_tools():
            effect = "the model does not see tools"
            if not voice.chat.reads_calls:
                effect = "calls with tools are rejected"
            print(f"warning: {problem}, so {effect}{ADVICE}", file=sys.stderr)
            voice.chat.advice, voice.chat.template.shows_tools = ADVICE, False
        server.present(voice.calls, voice.spell, subject.name)
        said = "any" if key is None else f"that of {arguments.api_key_env}"
        print(f"Serving {subject.name} at {server.url} (API key: {said}, model: any name).")
        print("Stop: Ctrl-C.", flush=True)
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:  # Ctrl-C
            return DONE
    return DONE


async def _listen(server: PublicServer, stack: AsyncExitStack, address: str) -> None:
    try:
        await stack.enter_async_context(server.serving())
    except RunError as error:
        reason = getattr(error.__cause__, "strerror", None) or error.__cause__
        raise RunError(
            f"can't listen on {address}: {reason}. Choose another --port, or 0 for a free port"
        ) from error.__cause__
