"""`python -m retrain.trainer.nexrl -m self-hosted -c FILE --run-nexrl`: run a recipe here.

The flags are those of NexRL's own command; there is no cluster, so `-m` only has to agree with the
recipe's backend, and `-r` goes on from the newest checkpoint.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path

from retrain.errors import ConfigError
from retrain.run import DONE, drive, exit_code, leave, with_run_dir

MODES = {"self-hosted": ("self-hosted",), "training-service": ("tinker", "weaver")}


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code, as `retrain run`'s."""
    parser = argparse.ArgumentParser(prog="python -m retrain.trainer.nexrl", description=__doc__)
    parser.add_argument("-m", "--mode", choices=tuple(MODES), help="what the recipe trains on")
    parser.add_argument("-c", "--config", required=True, metavar="FILE", help="the recipe")
    parser.add_argument("--run-nexrl", action="store_true", help="run it; without: check it only")
    parser.add_argument("-r", "--resume", action="store_true", help="go on with this run")
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is kept (runs/NAME)")
    arguments = parser.parse_args(argv)
    places: list[Path] = []
    return exit_code(lambda: _run(arguments, places), places)


def _run(arguments: argparse.Namespace, places: list[Path]) -> int:
    from retrain.observe.console import Console
    from retrain.trainer.nexrl.recipe import load_recipe

    recipe = load_recipe(arguments.config)
    backend = recipe.trainer.backend
    if arguments.mode is not None and backend not in MODES[arguments.mode]:
        raise ConfigError(
            f"-m {arguments.mode} was given, but trainer.train_service.backend is {backend}: "
            "leave -m out, or make them agree"
        )
    if not arguments.run_nexrl:
        sys.stdout.write(f"{arguments.config}: nothing is wrong with it; --run-nexrl runs it\n")
        return DONE
    config = recipe.config
    if arguments.run_dir:
        config = config.model_copy(update={"run_dir": Path(arguments.run_dir)})
    config = with_run_dir(config, resume=arguments.resume)
    places.append(config.run_dir or Path())
    recipe = dataclasses.replace(recipe, config=config)
    console = Console()
    drive(recipe.train(callbacks=[console], resume=arguments.resume), console.announce)
    return DONE


if __name__ == "__main__":
    leave(main())
