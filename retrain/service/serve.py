"""`python -m retrain serve`: the training service on a port of this machine.

Arguments are checked before torch loads, so that `--help` and errors are fast.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import socket
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from retrain.errors import ConfigError, RetrainError, RunError, install_command
from retrain.service.state import HttpLimits, ServiceSettings
from retrain.supervision.loading import uncollected

if TYPE_CHECKING:
    from retrain.vllm.options import VllmOptions

LOOPBACK = ("127.0.0.1", "localhost", "::1")
MAX_PORT = 65535
_OF_SERVICE = {
    "threads": "CPU threads of the trainer and of each sampler",
    "max_body": "bytes of a request, decompressed",
    "max_values": "numbers in a request or in the result of a sample request",
    "max_samples": "completions of one sample request",
    "max_top": "tokens of one position in top-k log-probs and in training targets",
}
"""Numbers above 0 in `ServiceSettings`."""
_OF_FRONT = {
    "max_connections": "limit of open connections",
    "header_timeout": "seconds in which the head of a request must arrive",
    "body_timeout": "seconds in which its body must arrive, plus one for each 1000 bytes",
}
"""Numbers above 0 in `HttpLimits`."""


def main(argv: list[str] | None = None) -> int:
    """Serve until interrupted.

    Returns 0, 1 if the port is not available, 2 for a bad setting.
    """
    arguments = _parser().parse_args(argv)
    try:
        front = HttpLimits(**_numbers(arguments, _OF_FRONT))
        settings = _settings(arguments)
        with _listen(arguments.host, arguments.port) as listening:
            asyncio.run(_serve(settings, front, listening))
    except RetrainError as error:
        sys.stderr.write(f"retrain serve: {error}\n")
        return 2 if isinstance(error, ConfigError) else 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        allow_abbrev=False,
        prog="retrain serve",
        description="Run a training service that speaks the Tinker and Weaver protocols, for one "
        "base model on this machine.",
        epilog="`retrain serve --openai RUN_DIR|MODEL` serves a trained or other model to OpenAI "
        "clients instead; it has its own --help.",
    )
    settings = ServiceSettings()
    add = parser.add_argument
    default = "(default: %(default)s)"
    add("--model", default="tiny", help=f"tiny, a model folder or a Hugging Face id {default}")
    add_address(parser)
    add(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="also accept requests that are addressed to this host name, for example behind a "
        "proxy; can be repeated (on a loopback address, only localhost, 127.0.0.1 and [::1] are "
        "accepted by default)",
    )
    add(
        "--folder",
        type=Path,
        default=settings.folder,
        help=f"folder for checkpoints, kept across restarts {default}",
    )
    add("--device", help="cpu or cuda (default: cuda if available)")
    add(
        "--sampler",
        choices=("local", "vllm"),
        default="local",
        help=f"what samples: the service itself, or vLLM servers {default}",
    )
    add(
        "--vllm",
        metavar="KEY=VALUE",
        action="append",
        default=[],
        help="an option of the vLLM sampler, as in backend.sampler of a config, such as "
        "url=http://127.0.0.1:8000 or python=/path/to/env/bin/python; can be repeated",
    )
    for defaults, texts in ((settings, _OF_SERVICE), (HttpLimits(), _OF_FRONT)):
        for name, text in texts.items():
            number = getattr(defaults, name)
            help_text = f"{text} (default: {number:.10g})"
            add(_option(name), metavar="N", type=type(number), default=number, help=help_text)
    return parser


def add_address(parser: argparse.ArgumentParser) -> None:
    """The options of where to listen, and of who may call."""
    add, default = parser.add_argument, "(default: %(default)s)"
    add("--host", default=LOOPBACK[0], help=f"address to listen on {default}")
    add("--port", type=int, default=8765, help=f"port, or 0 for a free one {default}")
    add(
        "--api-key-env",
        metavar="NAME",
        help="environment variable with the API key that clients must send",
    )


def _option(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _numbers(arguments: argparse.Namespace, names: Iterable[str]) -> dict[str, Any]:
    """The values of these options; raises ConfigError unless each is a finite number above 0."""
    given = {name: getattr(arguments, name) for name in names}
    for name, value in given.items():
        if not 0 < value < float("inf"):
            what = "an integer >= 1" if isinstance(value, int) else "a number of seconds > 0"
            raise ConfigError(f"{_option(name)}: got {value:g}, expected {what}")
    return given


def _vllm(arguments: argparse.Namespace) -> VllmOptions | None:
    if arguments.sampler == "local":
        if arguments.vllm:
            raise ConfigError("--vllm has no effect without --sampler vllm")
        return None
    from pydantic import ValidationError

    from retrain.config.problems import problems_of
    from retrain.config.yaml_text import apply_override, parse_override
    from retrain.vllm.options import VllmOptions

    given: dict[str, Any] = {}
    for text in arguments.vllm:
        apply_override(given, *parse_override(text))
    try:
        options = VllmOptions.model_validate(given)
        found = [*options.problems(Path(), lora=True), *options.missing(Path())]
        problems = [f"--vllm {one}" for one in found]
    except ValidationError as error:
        found = problems_of(error, VllmOptions, prefix="--vllm")
        problems = [one.replace("--vllm.", "--vllm ") for one in found]
    if problems:
        raise ConfigError(*problems)
    return options


def api_key(arguments: argparse.Namespace) -> str | None:
    """The key that clients must send.

    Raises ConfigError if it is not set, `--host` needs one, or `--port` is no port.
    """
    key = None
    if arguments.api_key_env:
        key = os.environ.get(arguments.api_key_env, "").strip()
        if not key:
            raise ConfigError(
                f"the environment variable {arguments.api_key_env} is not set; set it to the API "
                "key, or drop --api-key-env"
            )
    if key is None and arguments.host not in LOOPBACK:
        raise ConfigError(
            f"--host {arguments.host} accepts other machines without an API key; put a key into an "
            "environment variable and pass its name with --api-key-env"
        )
    if not 0 <= arguments.port <= MAX_PORT:
        raise ConfigError(
            f"--port: got {arguments.port}, expected 0 to {MAX_PORT}; 0 chooses a free port"
        )
    return key


def _settings(arguments: argparse.Namespace) -> ServiceSettings:
    key = api_key(arguments)
    numbers = _numbers(arguments, _OF_SERVICE)
    try:
        arguments.folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"--folder: can't create {arguments.folder}: {error.strerror}; choose a writable folder"
        ) from error
    return ServiceSettings(
        model=arguments.model,
        folder=arguments.folder,
        api_key=key,
        hosts=_hosts(arguments),
        device=arguments.device,
        vllm=_vllm(arguments),
        **numbers,
    )


def _hosts(arguments: argparse.Namespace) -> tuple[str, ...] | None:
    """The names that a Host header may have; None if clients may use any."""
    allowed = tuple(name.lower().strip("[]").rstrip(".") for name in arguments.allow_host)
    for given, name in zip(arguments.allow_host, allowed, strict=True):
        if not name or "/" in name or (":" in name and not given.startswith("[")):
            raise ConfigError(
                f"--allow-host: got {given!r}, expected a host name or address without a port, "
                "such as gpu-machine or [::1]"
            )
    if arguments.host in LOOPBACK:
        return (*LOOPBACK, *allowed)
    return allowed or None


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=2048)
    except OSError as error:
        raise RunError(
            f"can't listen on {host}:{port}: {error.strerror or error}. Choose another --port, or "
            "0 for a free port"
        ) from error


async def _serve(settings: ServiceSettings, front: HttpLimits, listening: socket.socket) -> None:
    """Serve until SIGINT or SIGTERM; a second SIGINT doesn't wait for running requests.

    The socket already accepts connections when the announcement is printed. Raises ConfigError if
    a library, the model or the device is not available.
    """
    try:
        with uncollected():
            from retrain.service.app import ServiceApp
            from retrain.service.http_server import fit_connections, log_to_stderr, make_server
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"retrain serve needs {error.name}, which is not installed. Run: "
            f"{install_command('service')}"
        ) from error
    log_to_stderr()
    front = replace(front, max_connections=fit_connections(front.max_connections))
    async with ServiceApp(settings) as app:
        server = make_server(app, front)
        # uvicorn would raise signals again before the service has ended.
        server.capture_signals = nullcontext  # type: ignore[method-assign, assignment]
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, server.handle_exit, number, None)
        sys.stdout.write(_announcement(settings, listening))
        sys.stdout.flush()
        await server.serve(sockets=[listening])


def _announcement(settings: ServiceSettings, listening: socket.socket) -> str:
    host, port = listening.getsockname()[:2]
    url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
    return (
        f"Serving {settings.model} on {url}, with checkpoints in {settings.folder}. Stop: Ctrl-C.\n"
        f"In a config: backend: {{type: tinker, url: {url}}}   (or type: weaver)\n"
    )


if __name__ == "__main__":
    sys.exit(main())
