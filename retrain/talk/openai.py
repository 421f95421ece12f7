"""`retrain serve --openai RUN_DIR|MODEL`: a model for any client of OpenAI's API."""

from __future__ import annotations

import argparse
import asyncio
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from retrain.errors import RunError
from retrain.run import DONE, drive
from retrain.service.serve import api_key
from retrain.talk.arguments import require
from retrain.talk.subject import Subject, find_subject
from retrain.talk.voice import opened

if TYPE_CHECKING:
    from retrain.endpoint.public import PublicServer

NEEDED = ("starlette", "uvicorn", "torch", "transformers", "peft")


def main(arguments: argparse.Namespace) -> int:
    """Serve until interrupted."""
    key = api_key(arguments)
    require(NEEDED, "service")
    subject = find_subject(arguments.openai)
    return drive(_serve(subject, arguments, key))


async def _serve(subject: Subject, arguments: argparse.Namespace, key: str | None) -> int:
    from retrain.endpoint.public import PublicServer

    server = PublicServer(arguments.host, arguments.port, key)
    async with AsyncExitStack() as stack:
        await _listen(server, stack, f"{arguments.host}:{arguments.port}")
        print(f"loading {subject.name}", flush=True)
        voice = await stack.enter_async_context(
            opened(subject, arguments.device, arguments.threads)
        )
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
