"""The command line: `retrain run | check | report | chat | serve | schema`.

A command's modules load when it is called, so that `--help` is fast.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from retrain import __version__
from retrain.cli.process import DONE, FAILED, USAGE, Parser, drive, exit_code, leave
from retrain.cli.run import main as run_command
from retrain.errors import nearest

if TYPE_CHECKING:
    from retrain.check import Finding

COMMANDS = {
    "run": "train from a YAML file",
    "check": "test an environment, or all parts of a config, before a run",
    "report": "write RUN_DIR/report.html",
    "chat": "chat with a trained model, or any other model, in the terminal",
    "serve": "run a training service (Tinker and Weaver protocols), or serve a model to OpenAI "
    "clients (--openai)",
    "schema": "print the JSON schema of a config, for editors",
}


def main() -> NoReturn:
    """The console script."""
    leave(command(sys.argv[1:]))


def command(argv: Sequence[str]) -> int:
    """Call the command that `argv` names; returns its exit code."""
    name, rest = (argv[0], argv[1:]) if argv else ("", ())
    if name in ("", "-h", "--help"):
        print("usage: retrain COMMAND [ARGUMENTS] (help on a command: retrain COMMAND --help)\n")
        print(*(f"  {known:8} {words}" for known, words in COMMANDS.items()), sep="\n")
        return DONE if name else USAGE
    if name in ("--version", "-V"):
        print(f"retrain {__version__}")
        return DONE
    if name not in COMMANDS:
        hint = (
            nearest(name, ["--help", "--version", *COMMANDS])
            or f"; expected one of {', '.join(COMMANDS)}"
        )
        print(f"error: unknown command {name!r}{hint}", file=sys.stderr)
        return USAGE
    called = {"run": run_command, "check": _check, "report": _report, "chat": _chat}
    return exit_code(lambda: {**called, "serve": _serve, "schema": _schema}[name](rest))


def _check(argv: Sequence[str]) -> int:
    parser = Parser(
        allow_abbrev=False,
        prog="retrain check",
        description="Run rollouts with fixed replies, check that the environment fulfils its "
        "contract, and call the rewards of a config. Each tool is called a few times "
        "with made-up arguments. Exit codes: 0: all checks passed (possibly with "
        "warnings); 1: a check failed; 2: the subject can't be loaded.",
    )
    parser.add_argument("subject", metavar="ENVIRONMENT|CONFIG")
    parser.add_argument(
        "keys",
        metavar="key=value",
        nargs="*",
        default=[],
        help="override keys of the environment or config",
    )
    parser.add_argument(
        "--reply",
        metavar="TEXT",
        action="append",
        default=[],
        help="a model reply that the rewards of a config also score; can be repeated",
    )
    arguments = parser.parse_intermixed_args(argv)
    findings = drive(_watched_check(arguments.subject, arguments.keys, arguments.reply))
    print(*findings, sep="\n")
    return DONE if all(finding.good for finding in findings) else FAILED


async def _watched_check(
    subject: str, keys: Sequence[str], replies: Sequence[str]
) -> list[Finding]:
    """With a watch: code that blocks the loop can't be cancelled, so it ends the process."""
    from retrain.check import check_subject
    from retrain.check.bench import DEADLINE
    from retrain.supervision.watch import Watch

    tell = partial(print, "FAIL ", flush=True)
    say = partial(print, file=sys.stderr, flush=True)
    watched = partial(
        Watch, slow=DEADLINE, found=lambda *_: None, blocked=DEADLINE, last_words=tell
    )
    return await check_subject(subject, keys, say, replies, watched)


def _report(argv: Sequence[str]) -> int:
    parser = Parser(
        allow_abbrev=False, prog="retrain report", description="Write report.html for a run."
    )
    parser.add_argument("run_dir", metavar="RUN_DIR", type=Path)
    arguments = parser.parse_args(argv)
    from retrain.report.page import write_report

    print(write_report(arguments.run_dir))
    return DONE


def _chat(argv: Sequence[str]) -> int:
    from retrain.cli.chat.arguments import chat_parser

    arguments = chat_parser().parse_args(argv)
    from retrain.cli.chat.terminal import main as chat_command

    return chat_command(arguments)


def _serve(argv: Sequence[str]) -> int:
    if any(given.partition("=")[0] == "--openai" for given in argv):
        from retrain.cli.chat.arguments import openai_parser

        arguments = openai_parser().parse_args(argv)
        from retrain.cli.chat.openai import main as openai_command

        return openai_command(arguments)
    from retrain.service.serve import main as serve_command

    return serve_command(list(argv))


def _schema(argv: Sequence[str]) -> int:
    description = "Print the JSON schema of a config, with the keys of every built-in plug-in."
    Parser(allow_abbrev=False, prog="retrain schema", description=description).parse_args(argv)
    from retrain.assembly.schema import run_schema, with_variables

    print(json.dumps(with_variables(run_schema()), indent=2))
    return DONE
