"""`python -m retrain.run config.yaml`: parse, assemble, run.

Only this module maps errors to exit codes: 0 done, 1 the run failed, 2 bad config or usage, 130
interrupted. A user's mistake is one line on stderr; the traceback of an unexpected error goes to
error.txt in the run directory.

The module is callable: `await retrain.run(config)` works as well as `python -m retrain.run`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from retrain.errors import (
    ConfigError,
    RetrainError,
    UserCodeError,
    alike,
    blame,
    nearest,
    printable,
)
from retrain.observe.streams import let_go

if TYPE_CHECKING:
    from retrain.adapters.trl.ranks.contract import Place
    from retrain.assembly import Parts
    from retrain.config import RunConfig
    from retrain.observe.callbacks import Callback, TrainingResult
    from retrain.observe.console import Console

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_INTERRUPTIONS = (KeyboardInterrupt, asyncio.CancelledError)
STOPPING = "Finishing this step, then writing a checkpoint."
STOPPING_EARLY = "Will stop as soon as the model has loaded; nothing is trained."
STUCK_SECONDS = 3.0
"""How long threads may take to end after the run."""
REPORT_SECONDS = 2.0
"""How long another rank waits with its exit code while rank 0 reports a wrong config."""
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns its exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    places: list[Path] = []
    if _follows():
        from retrain.adapters.trl.ranks.contract import ignore_signals

        ignore_signals()

    def command() -> int:
        from retrain.config import load_config
        from retrain.observe.console import Console

        config = load_config(config_file(arguments.config), arguments.overrides)
        if arguments.run_dir:
            config = config.model_copy(update={"run_dir": Path(arguments.run_dir)})
        if _follows():
            return _follow(config, dry_run=arguments.dry_run)
        if arguments.dry_run:
            return _dry_run(config, arguments.config, resume=arguments.resume)
        console = Console()
        try:
            with in_run_dir(config, resume=arguments.resume) as config:
                places.append(config.run_dir or Path())
                drive(_train(config, console, resume=arguments.resume), console)
        except _INTERRUPTIONS:
            if not console.summarised:
                raise
            return INTERRUPTED
        return DONE

    with _interruptible():
        return exit_code(command, places)


async def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
    console: bool = True,
) -> TrainingResult:
    """Train from a config, a mapping or a YAML file. `console` prints the progress.

    Raises ConfigError before any model loads, RunError if the run can't continue.
    """
    from retrain.config import RunConfig, load_config, parse_config
    from retrain.pipeline import train

    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, RunConfig):
        config = parse_config(config)
    with in_run_dir(config, resume=resume) as config:
        return await train(config, callbacks=callbacks, resume=resume, console=console)


@contextmanager
def in_run_dir(config: RunConfig, *, resume: bool) -> Iterator[RunConfig]:
    """`config` with its run directory: the given one, or else runs/NAME, runs/NAME-2, ...

    A new run creates the next one, and removes it if it fails before it writes; `resume` takes the
    last one. Raises ConfigError if a given one has a run or is in use, or if there is no run to
    resume, or it had another model, algorithm or data.
    """
    from retrain.observe.naming import unclaim

    claims = config.run_dir is None and not resume
    config = _with_run_dir(config, resume=resume)
    with ExitStack() as failed:
        if claims and config.run_dir is not None:
            failed.callback(unclaim, config.run_dir)
        yield config
        failed.pop_all()


def _with_run_dir(config: RunConfig, *, resume: bool) -> RunConfig:
    from retrain.observe.naming import last_folder, unused_folder, wanted_folder
    from retrain.observe.run_dir import check_usable

    if config.run_dir is None:
        folder = last_folder(config) if resume else unused_folder(config)
        if folder is None:
            raise ConfigError(
                f"no run to resume in {wanted_folder(config)}: drop --resume, or pass --run-dir"
            )
        config = config.model_copy(update={"run_dir": folder})
    assert config.run_dir is not None
    check_usable(config.run_dir, resume=resume)
    if resume:
        from retrain.pipeline.checkpoint import Checkpoints, changed_run

        saved = Checkpoints(config.run_dir / "checkpoints").last_config()
        if saved is not None and (problem := changed_run(saved, config)):
            raise ConfigError(problem)
    return config


def exit_code(command: Callable[[], int], places: Sequence[Path] = ()) -> int:
    """Call a command; print what it raises on stderr, and return the exit code.

    `places` are folders for the traceback of an unexpected error.
    """
    try:
        return command()
    except (Exception, BaseExceptionGroup, *_INTERRUPTIONS) as error:  # noqa: BLE001 - all are reported
        from retrain.observe import failure

        if isinstance(error, BrokenPipeError) and _unread():
            return DONE
        found = failure.causes(error)
        if _follows() and all(isinstance(cause, ConfigError) for cause in found):
            _wait_for_rank_0()
            return USAGE
        if isinstance(found[0], _INTERRUPTIONS):
            _print("interrupted")
            return INTERRUPTED
        _print_causes(error, found)
        if all(isinstance(cause, RetrainError) for cause in found):
            return USAGE if any(isinstance(cause, ConfigError) for cause in found) else FAILED
        for place in places:
            if failure.write_error(place, error):
                _print(f"the full traceback is in {place / failure.ERROR}")
                return FAILED
        _print("".join(traceback.format_exception(error)))
        return FAILED


def drive(coroutine: Coroutine[Any, Any, T], console: Console | None = None) -> T:
    """Run a coroutine on a new event loop, without waiting for its threads afterwards.

    The first SIGINT, SIGTERM or SIGHUP cancels it, the second one ends the process. `console` shows
    a run, and announces its end on the terminal. Raises UserCodeError if user code ended the loop.
    """
    from retrain.concurrency.interrupts import Interrupts

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(coroutine, name="main")
    interrupts = Interrupts(task, partial(_announce, console), INTERRUPTED)
    try:
        with interrupts.handled():
            return _completed(loop, task)
    finally:
        _end_tasks(loop)
        generators = loop.create_task(loop.shutdown_asyncgens())
        loop.run_until_complete(asyncio.wait([generators], timeout=STUCK_SECONDS))
        _end_tasks(loop)  # of generators that never end
        asyncio.set_event_loop(None)
        loop.close()


def _completed(loop: asyncio.AbstractEventLoop, task: asyncio.Task[T]) -> T:
    """The result of the task. If another task raises KeyboardInterrupt or SystemExit, that ends the
    loop, but not the run: its task is cancelled, and has the time that it needs to end.

    Raises UserCodeError for SystemExit, which is also what the run is cancelled with.
    """
    ended: UserCodeError | None = None
    while True:
        try:
            return loop.run_until_complete(task)
        except (KeyboardInterrupt, SystemExit) as error:
            if task.done():
                raise
            if isinstance(error, SystemExit):
                ended = blame("a task of user code", error)
            task.cancel(ended)
        except asyncio.CancelledError:
            if ended is None:
                raise
            raise ended from ended.__cause__


def _end_tasks(loop: asyncio.AbstractEventLoop) -> None:
    """Cancel all tasks, and wait for them a while."""
    tasks = asyncio.all_tasks(loop)
    for task in tasks:
        task.cancel()
    if tasks:
        loop.run_until_complete(asyncio.wait(tasks, timeout=STUCK_SECONDS))


def leave(code: int) -> NoReturn:
    """End the process, even if a thread of the user's code hangs."""
    logging.shutdown()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    until = time.monotonic() + STUCK_SECONDS
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in others:
        thread.join(max(0.0, until - time.monotonic()))
    stuck = [thread.name for thread in others if thread.is_alive()]
    if stuck:
        from retrain.concurrency.leash import leash

        _print(f"Exiting with threads still running: {', '.join(stuck)}")
        leash.let_go()
        os._exit(code)
    sys.exit(code)


HINTS = {
    ("-q", "--quiet", "--silent"): "redirect the output: > run.log 2>&1",
    ("-v", "--verbose", "--debug"): "all that happens is in events.jsonl of the run directory",
    ("-V", "--version"): "the version: retrain --version",
}
"""What other programs' options are here."""


class Parser(argparse.ArgumentParser):
    """Names the option that resembles an unknown one."""

    def error(self, message: str) -> NoReturn:
        head, _, unknown = message.partition("unrecognized arguments: ")
        names = [name for action in self._actions for name in action.option_strings]
        hints = [hint_of(name.partition("=")[0], names) for name in unknown.split() if not head]
        super().error(message + "".join(hints))


def hint_of(name: str, known: Sequence[str]) -> str:
    """What to do about an unknown option: "; did you mean ...?", or nothing."""
    for names, hint in HINTS.items():
        if name in names:
            return f"; {hint}"
    return nearest(name, known) if name.startswith("--") else ""


def _parser() -> argparse.ArgumentParser:
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


def config_file(text: str) -> Path:
    """The file of a command's CONFIG: a path, or the name of an included config."""
    from retrain.config.plugins import built_ins

    return Path(text) if Path(text).exists() else built_ins("config").get(text, Path(text))


async def _train(config: RunConfig, console: Console, *, resume: bool) -> TrainingResult:
    from retrain.pipeline import train

    parts = _assembled(config)
    _print(parts.loading())
    return await train(config, callbacks=[console], resume=resume, parts=parts, console=False)


def _launched() -> Place | None:
    """This process's place among those that a launcher such as torchrun started; None without one.

    Raises ConfigError if the launcher's variables are wrong.
    """
    if "WORLD_SIZE" not in os.environ:
        return None
    from retrain.adapters.trl.ranks.contract import launched

    return launched()


def _follows() -> bool:
    """Whether a launcher started this process beside rank 0, which reports."""
    try:
        place = _launched()
    except ConfigError:
        return False
    return place is not None and place.rank > 0


def _wait_for_rank_0() -> None:
    """Rank 0 prints the same error; a launcher ends it as soon as another rank has ended."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    time.sleep(REPORT_SECONDS)


def _follow(config: RunConfig, *, dry_run: bool) -> int:
    """Do what rank 0 orders, until it ends."""
    parts = _assembled(config)
    if not dry_run:
        module, _, function = parts.options.follower.partition(":")
        getattr(import_module(module), function)(_launched(), (parts.options, config))
    return DONE


def _dry_run(config: RunConfig, source: str, *, resume: bool) -> int:
    from retrain.observe.run_dir import as_yaml

    if resume or config.run_dir is not None:
        _with_run_dir(config, resume=resume)
    try:
        parts = _assembled(config)
    except ConfigError:
        if not _follows():
            from retrain.assembly.sections import options_of

            with suppress(ConfigError):  # of what is reported already
                if forecast := options_of(config).forecast(config):
                    for line in forecast.lines():
                        _print(line)
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

    place = _launched()
    parts = assemble(config)
    if place is not None and not parts.options.follower:
        raise ConfigError(
            f"backend.type {config.backend.type} trains in one process, but the launcher started "
            f"{place.size} (WORLD_SIZE); start the run without the launcher"
        )
    if _follows():
        return parts
    for notice in parts.notices():
        _print(notice)
    return parts


@contextmanager
def _interruptible() -> Iterator[None]:
    """Let SIGTERM raise KeyboardInterrupt, as SIGINT does, before and after the loop runs."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
        yield
        return
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def _announce(console: Console | None) -> None:
    """Say that the run stops. `print` would lock, and the interrupted code may hold that lock."""
    text = "Stopping."
    if console is not None:
        text = STOPPING if console.training else STOPPING_EARLY
    text += " Press Ctrl-C again to quit now."
    if console is None or not console.announce(text):
        with suppress(OSError):  # the terminal may be closed
            os.write(2, f"\n{text}\n".encode())


def _print_causes(error: BaseException, causes: Sequence[BaseException]) -> None:
    """One message per cause, with its notes; causes of one kind are counted."""
    from retrain.observe import failure

    kinds: dict[str, list[list[str]]] = {}
    for cause in causes:
        text = _message(cause)
        kinds.setdefault(alike(text), []).append([text, *failure.notes_of(cause)])
    for (text, *notes), *others in kinds.values():
        more = f" (and {len(others)} more like it)" if others else ""
        _print("\n  ".join([f"error: {text}{more}", *notes]))
    for note in () if error in causes else failure.notes_of(error):
        _print(note)


def _message(error: BaseException) -> str:
    """What the error says; an unexpected one with its type and line."""
    from retrain.config.plugins import line_of
    from retrain.errors import text_of

    text = text_of(error)
    return (
        text
        if isinstance(error, RetrainError)
        else f"{type(error).__name__}: {text}{line_of(error)}"
    )


def _unread() -> bool:
    """Whether the reader of standard output is gone, as in `retrain schema | head`.

    Polls the pipe: whether another write fails depends on what Python still buffers.
    """
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # errors only
    except (OSError, ValueError):  # not a file
        return False
    if not poll.poll(0):
        return False
    let_go(sys.stdout)
    return True


def _print(text: str) -> None:
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:  # the terminal is closed
        let_go(sys.stderr)


class _CallableModule(ModuleType):
    async def __call__(self, *args: Any, **keys: Any) -> TrainingResult:
        return await run(*args, **keys)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    leave(main())
