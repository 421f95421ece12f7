"""`python -m retrain serve`: the training service on a port of this machine.

What the arguments say is checked before torch loads, so that `--help` and mistakes are quick.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path

from retrain.errors import ConfigError, install_command
from retrain.service.state import Settings

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_PORT = 65535


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted; 0 then, 1 when the port can't be had, 2 on a bad setting."""
    arguments = _parser().parse_args(argv)
    try:
        settings = _settings(arguments)
    except ConfigError as error:
        return _complain(2, str(error))
    try:
        listening = _listen(arguments.host, arguments.port)
    except OSError as error:
        reason = error.strerror or str(error)
        return _complain(
            1,
            f"can't listen on {arguments.host}:{arguments.port}: {reason}. Take another --port, or "
            "0 for any free one",
        )
    with listening:
        try:
            serve = _server()
            asyncio.run(serve(settings, listening, _announcement(settings, listening)))
        except ConfigError as error:
            return _complain(2, str(error))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="retrain serve",
        description="A training service that speaks the Tinker and the Weaver protocol, on one "
        "base model of this machine.",
    )
    parser.add_argument("--model", default="tiny", help="tiny, a model folder, or a Hub id")
    parser.add_argument("--host", default="127.0.0.1", help="the address to listen on")
    parser.add_argument("--port", type=int, default=8765, help="0 takes any free one")
    parser.add_argument(
        "--api-key-env",
        metavar="NAME",
        help="the environment variable that holds the key which clients must send",
    )
    parser.add_argument(
        "--folder",
        type=Path,
        default=Path("service"),
        help="where checkpoints are kept; a restarted service finds them there",
    )
    parser.add_argument("--device", help="cpu or cuda; by default cuda where there is one")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each worker")
    return parser


def _settings(arguments: argparse.Namespace) -> Settings:
    key = None
    if arguments.api_key_env:
        key = os.environ.get(arguments.api_key_env, "").strip()
        if not key:
            raise ConfigError(
                f"the environment variable {arguments.api_key_env} is empty: set it to the key, or "
                "leave --api-key-env out"
            )
    if key is None and arguments.host not in LOOPBACK:
        raise ConfigError(
            f"--host {arguments.host} lets other machines in, and no key is asked for: name the "
            "variable that holds one with --api-key-env"
        )
    if not 0 <= arguments.port <= MAX_PORT:
        raise ConfigError(
            f"--port {arguments.port}: expected 0 to {MAX_PORT}; 0 takes any free one"
        )
    if arguments.threads < 1:
        raise ConfigError(f"--threads {arguments.threads}: expected at least 1")
    try:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--folder {arguments.folder} can't be made: {error.strerror}; name one that can be "
            "written"
        ) from error
    return Settings(
        model=arguments.model,
        folder=arguments.folder,
        api_key=key,
        device=arguments.device,
        threads=arguments.threads,
    )


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


def _server() -> Callable[[Settings, socket.socket, str], Coroutine[None, None, None]]:
    """`server.serve`; raises ConfigError when a library that it needs is missing."""
    try:
        from retrain.service.server import serve
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"needs {error.name}, which is not installed: {install_command('service')}"
        ) from error
    return serve


def _announcement(settings: Settings, listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return (
        f"{settings.model} is served on {url}; checkpoints are kept in {settings.folder}\n"
        f"backend: {{type: tinker, url: {url}}}   (or type: weaver); stop with Ctrl-C\n"
    )


def _complain(code: int, message: str) -> int:
    sys.stderr.write(f"retrain serve: {message}\n")
    return code


if __name__ == "__main__":
    sys.exit(main())
