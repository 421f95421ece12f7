"""`python -m retrain.trainer.nexrl -m self-hosted -c FILE --run-nexrl`: run a recipe.

The flags are those of NexRL's command. The recipe runs in this process: `-m` must agree with its
backend, and `-r` continues from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from retrain.cli.process import DONE, drive, exit_code, leave
from retrain.errors import ConfigError
from retrain.pipeline.resume import in_run_dir

MODES = {"self-hosted": ("self-hosted",), "training-service": ("tinker", "weaver")}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code, as `retrain run` does."""
    parser = argparse.ArgumentParser(
        allow_abbrev=False, prog="python -m retrain.trainer.nexrl", description=__doc__
    )
    parser.add_argument("-m", "--mode", choices=tuple(MODES), help="the backend of the recipe")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the recipe")
    parser.add_argument("--run-nexrl", action="store_true", help="run it; default: only check")
    parser.add_argument("-r", "--resume", action="store_true", help="continue this run")
    parser.add_argument("--run-dir", metavar="DIR", help="the run directory (default: runs/NAME)")
    arguments = parser.parse_args(argv)
    places: list[Path] = []
    return exit_code(lambda: _run(arguments, places), places)


def _run(arguments: argparse.Namespace, places: list[Path]) -> int:
    from retrain.observe.console import Console
    from retrain.trainer.nexrl.recipe import load_recipe

    recipe = load_recipe(arguments.config)
    backend = recipe.trainer.settings.service.backend
    if arguments.mode is not None and backend not in MODES[arguments.mode]:
        raise ConfigError(
            f"-m {arguments.mode}: trainer.train_service.backend is {backend}; drop -m, or make "
            "them agree"
        )
    if not arguments.run_nexrl:
        sys.stdout.write(f"{arguments.config}: the recipe is valid; add --run-nexrl to run it\n")
        return DONE
    config = recipe.config
    if arguments.run_dir:
        config = config.model_copy(update={"run_dir": Path(arguments.run_dir)})
    with in_run_dir(config, resume=arguments.resume) as config:
        places.append(config.run_dir or Path())
        recipe = dataclasses.replace(recipe, config=config)
        console = Console()
        running = recipe.train(callbacks=[console], resume=arguments.resume, console=False)
        drive(running, console)
    return DONE


if __name__ == "__main__":
    leave(main())
