"""The arguments of `retrain chat` and `retrain serve --openai`, read before anything loads."""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from retrain.cli.process import Parser
from retrain.errors import ConfigError, install_command
from retrain.service.serve import add_address

HELP = "/reset begins a new conversation; /quit or Ctrl-D exits."


def chat_parser() -> argparse.ArgumentParser:
    parser = Parser(
        allow_abbrev=False,
        prog="retrain chat",
        description="Chat with a trained model, or any other model, in the terminal. For a run, "
        f"its sampling settings and chat template are used. {HELP}",
    )
    add = parser.add_argument
    add(
        "subject",
        metavar="RUN_DIR|MODEL",
        help="a run directory, its checkpoints/step_N, tiny, a model folder or a Hugging Face id",
    )
    add("--compare", action="store_true", help="also show replies of the run's base model")
    add("--system", metavar="TEXT", help="a system message")
    add("--temperature", type=float, metavar="T", help="0 is greedy (default: the run's, or 1)")
    add(
        "--max-tokens",
        type=int,
        metavar="N",
        help="maximum number of tokens per reply (default: the run's, or 256)",
    )
    _add_engine(parser)
    return parser


def openai_parser() -> argparse.ArgumentParser:
    parser = Parser(
        allow_abbrev=False,
        prog="retrain serve",
        description="Serve a trained model, or any other model, to clients of OpenAI's API, such "
        "as its SDKs. The base URL is http://HOST:PORT/v1.",
    )
    parser.add_argument(
        "--openai",
        metavar="RUN_DIR|MODEL",
        required=True,
        help="a run directory, its checkpoints/step_N, tiny, a model folder or a Hugging Face id",
    )
    add_address(parser)
    parser.add_argument(
        "--tools",
        metavar="FORMAT",
        help="the format of tool calls, such as hermes (default: the run's, or that of the chat "
        "template)",
    )
    parser.add_argument(
        "--show-tools",
        choices=("template", "system"),
        help="what shows tools to the model: the chat template, or a system message in the format "
        "hermes (default: the run's, or template)",
    )
    _add_engine(parser)
    return parser


def options_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The sampling arguments that were given; raises ConfigError for a wrong one."""
    temperature, max_tokens = arguments.temperature, arguments.max_tokens
    if temperature is not None and not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature: got {temperature:g}, expected a number >= 0")
    if max_tokens is not None and max_tokens < 1:
        raise ConfigError(f"--max-tokens: got {max_tokens}, expected an integer >= 1")
    given = {"temperature": temperature, "max_tokens": max_tokens}
    return {name: value for name, value in given.items() if value is not None}


def require(modules: Sequence[str], extra: str) -> None:
    """Raise ConfigError unless these modules are installed."""
    missing = [name for name in modules if find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"needs {', '.join(missing)}, not installed here: {install_command(extra)}"
        )


def _add_engine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", help="cpu or cuda (default: cuda if available)")
    parser.add_argument(
        "--threads", type=_count, default=1, metavar="N", help="CPU threads (default: 1)"
    )


def _count(text: str) -> int:
    """Raises ValueError, which argparse reports."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {value}, expected an integer >= 1")
    return value
