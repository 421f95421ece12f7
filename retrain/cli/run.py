"""`retrain run config.yaml`: parse, assemble, run."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

from retrain.cli.process import (
    DONE,
    INTERRUPTED,
    INTERRUPTIONS,
    Parser,
    drive,
    exit_code,
    follows,
    interruptible,
    launched_place,
    say,
)
from retrain.errors import ConfigError

if TYPE_CHECKING:
    from retrain.assembly import Parts
    from retrain.config import RunConfig
    from retrain.observe.callbacks import TrainingResult
    from retrain.observe.console import Console


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    places: list[Path] = []
    if follows():
        from retrain.adapters.trl.ranks.contract import ignore_signals

        ignore_signals()

    def command() -> int:
        from retrain.config import load_config
        from retrain.config.plugins import config_file
        from retrain.observe.console import Console
        from retrain.pipeline.resume import in_run_dir

        config = load_config(config_file(arguments.config), arguments.overrides)
        if arguments.run_dir:
            config = config.model_copy(update={"run_dir": Path(arguments.run_dir)})
        if follows():
            return _follow(config, dry_run=arguments.dry_run)
        if arguments.dry_run:
            return _dry_run(config, arguments.config, resume=arguments.resume)
        console = Console()
        try:
            with in_run_dir(config, resume=arguments.resume) as config:
                places.append(config.run_dir or Path())
                drive(_train(config, console, resume=arguments.resume), console)
        except INTERRUPTIONS:
            if not console.summarised:
                raise
            return INTERRUPTED
        return DONE

    with interruptible():
        return exit_code(command, places)


def _parser() -> Parser:
    parser = Parser(
        allow_abbrev=False,
        prog="retrain run",
        description="Train from a YAML file. Exit codes: 0: done; 1: the run failed; 2: bad "
        "config or usage; 130: interrupted (after a checkpoint).",
    )
    parser.add_argument(
        "config", metavar="CONFIG", help="a YAML file, or an included config such as quickstart"
    )
    parser.add_argument(
        "overrides",
        metavar="dotted.key=value",
        nargs="*",
        default=[],
        help="override a key, e.g. train.seed=1 rewards.0.weight=2",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check the config and print it with all defaults; load no model",
    )
    parser.add_argument("--resume", action="store_true", help="continue from the newest checkpoint")
    parser.add_argument("--run-dir", metavar="DIR", help="the run directory (default: runs/NAME)")
    return parser


async def _train(config: RunConfig, console: Console, *, resume: bool) -> TrainingResult:
    from retrain.pipeline import train

    parts = _assembled(config)
    say(parts.loading())
    return await train(config, callbacks=[console], resume=resume, parts=parts, console=False)


def _follow(config: RunConfig, *, dry_run: bool) -> int:
    """Do what rank 0 orders, until it ends."""
    parts = _assembled(config)
    if not dry_run:
        module, _, function = parts.options.follower.partition(":")
        getattr(import_module(module), function)(launched_place(), (parts.options, config))
    return DONE


def _dry_run(config: RunConfig, source: str, *, resume: bool) -> int:
    from retrain.observe.run_dir import as_yaml
    from retrain.pipeline.resume import with_run_dir

    if resume or config.run_dir is not None:
        with_run_dir(config, resume=resume)
    try:
        parts = _assembled(config)
    except ConfigError:
        if not follows():
            from retrain.assembly.sections import options_of

            with suppress(ConfigError):  # of what is reported already
                if forecast := options_of(config).forecast(config):
                    for line in forecast.lines():
                        say(line)
        raise
    note, _, text = as_yaml(parts.resolved()).partition("\n")
    print(note)
    print(f"# {source} is valid; no model was loaded and nothing was written")
    held_out = "" if parts.eval_prompts is None else f"; eval.prompts: {len(parts.eval_prompts)}"
    print(f"# rows of prompts: {len(parts.prompts)}{held_out}")
    print(text, end="", flush=True)
    return DONE


def _assembled(config: RunConfig) -> Parts:
    from retrain.assembly import assemble

    place = launched_place()
    parts = assemble(config)
    if place is not None and not parts.options.follower:
        raise ConfigError(
            f"backend.type {config.backend.type} trains in one process, but the launcher started "
            f"{place.size} (WORLD_SIZE); start the run without the launcher"
        )
    if follows():
        return parts
    for notice in parts.notices():
        say(notice)
    return parts
