"""`python -m retrain.run config.yaml`: parse, assemble, run.

The only place that maps errors to exit codes (0 done, 1 the run failed, 2 bad config or usage,
130 interrupted) and that unwraps a lone ExceptionGroup. A user's mistake is told in a sentence; a
traceback of anything unforeseen goes to the run directory's error.txt.

The module is callable, so that `await retrain.run(config)` works beside `python -m retrain.run`.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import re
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType, ModuleType
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from retrain.errors import ConfigError, RetrainError
from retrain.observe.streams import let_go

if TYPE_CHECKING:
    from retrain.config import RunConfig
    from retrain.observe.callbacks import Callback, TrainingResult
    from retrain.observe.console import Console

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
_INTERRUPTIONS = (KeyboardInterrupt, asyncio.CancelledError)
STOPPING = "stopping after a checkpoint; once more ends at once"
STUCK_SECONDS = 3.0
"""What threads have to end by themselves when the run is over."""
_TICKET = re.compile(r"-?\d+\.\d+\.\d+")
T = TypeVar("T")


def main(argv: Sequence[str] | None = None) -> int:
    """The command; its exit code."""
    arguments = _parser().parse_intermixed_args(argv)
    places: list[Path] = []

    def command() -> int:
        from retrain.config import load_config
        from retrain.observe.console import Console

        config = load_config(config_file(arguments.config), arguments.overrides)
        if arguments.run_dir:
            config = config.model_copy(update={"run_dir": Path(arguments.run_dir)})
        if arguments.dry_run:
            return _dry_run(config, arguments.config)
        config = with_run_dir(config, resume=arguments.resume)
        places.append(config.run_dir or Path())
        console = Console()
        drive(_train(config, console, resume=arguments.resume), console.announce)
        return DONE

    return exit_code(command, places)


async def run(
    config: RunConfig | Mapping[str, Any] | str | Path,
    *,
    callbacks: Sequence[Callback] = (),
    resume: bool = False,
) -> TrainingResult:
    """Train as a config, a mapping or a YAML file says.

    Raises ConfigError before any model loads, RunError when the run can't go on.
    """
    from retrain.config import RunConfig, load_config, parse_config
    from retrain.pipeline import train

    if isinstance(config, str | Path):
        config = load_config(config)
    elif not isinstance(config, RunConfig):
        config = parse_config(config)
    return await train(with_run_dir(config, resume=resume), callbacks=callbacks, resume=resume)


def with_run_dir(config: RunConfig, *, resume: bool) -> RunConfig:
    """`config` with its run directory: the given one, else runs/NAME, runs/NAME-2, ...

    A fresh run takes the first name that is free, `resume` the last one in use. Raises ConfigError
    when there is none to resume, or it had another model, algorithm or data.
    """
    if config.run_dir is None:
        config = _named(config, resume=resume)
    if resume and config.run_dir is not None:
        from retrain.pipeline.checkpoint import Checkpoints, changed_run

        saved = Checkpoints(config.run_dir / "checkpoints").last_config()
        if saved is not None and (problem := changed_run(saved, config)):
            raise ConfigError(problem)
    return config


def _named(config: RunConfig, *, resume: bool) -> RunConfig:
    name = config.name or "run"
    last, folder, number = None, Path("runs") / name, 1
    while (folder / "events.jsonl").exists():
        number += 1
        last, folder = folder, Path("runs") / f"{name}-{number}"
    if resume and last is None:
        raise ConfigError(
            f"there is no run to resume at {folder}: leave --resume, or use --run-dir"
        )
    return config.model_copy(update={"run_dir": last if resume else folder})


def exit_code(command: Callable[[], int], places: Sequence[Path] = ()) -> int:
    """Call a command; tell what it raises on stderr, and return the exit code.

    `places` are the folders that may take an unforeseen error's traceback.
    """
    try:
        return command()
    except (Exception, BaseExceptionGroup, *_INTERRUPTIONS) as error:  # noqa: BLE001 - every error is told
        if isinstance(error, BrokenPipeError) and _unread():
            return DONE
        alike = _alike(_causes(error))
        causes = [first for first, *_ in alike]
        if isinstance(causes[0], _INTERRUPTIONS):
            _tell("interrupted")
            return INTERRUPTED
        for cause, *others in alike:
            more = f" (and {len(others)} more like it)" if others else ""
            _tell(f"error: {_sentence(cause, more)}")
        for note in () if error in causes else getattr(error, "__notes__", ()):
            _tell(note)
        if all(isinstance(cause, RetrainError) for cause in causes):
            return USAGE if any(isinstance(cause, ConfigError) for cause in causes) else FAILED
        _keep_traceback(error, places)
        return FAILED


def drive(
    coroutine: Coroutine[Any, Any, T], announce: Callable[[str], bool] = lambda _: False
) -> T:
    """Run a coroutine to its end on a loop of its own; its threads are not waited for.

    The first SIGINT, SIGTERM or SIGHUP cancels it, the second one ends the process at once.
    `announce` may say so in place of a line on stderr, which a live display would draw over; it is
    called in the signal's handler, where it must not lock, and returns whether it says it.
    """
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    task = loop.create_task(coroutine, name="main")
    try:
        with _signals(loop, task, announce):
            return loop.run_until_complete(task)
    finally:
        rest = asyncio.all_tasks(loop)
        for other in rest:
            other.cancel()
        if rest:
            loop.run_until_complete(asyncio.wait(rest, timeout=STUCK_SECONDS))
        loop.run_until_complete(loop.shutdown_asyncgens())
        asyncio.set_event_loop(None)
        loop.close()


def leave(code: int) -> NoReturn:
    """End the process, even when a thread of a user's code hangs."""
    logging.shutdown()
    with suppress(OSError, ValueError):
        sys.stdout.flush()
    until = time.monotonic() + STUCK_SECONDS
    others = [t for t in threading.enumerate() if t is not threading.main_thread() and not t.daemon]
    for thread in others:
        thread.join(max(0.0, until - time.monotonic()))
    stuck = [thread.name for thread in others if thread.is_alive()]
    if stuck:
        _tell(f"left behind, since they did not end: {', '.join(stuck)}")
        os._exit(code)
    sys.exit(code)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="retrain run",
        description="Train as a YAML file says. Exit code: 0 done, 1 the run failed, "
        "2 bad config or usage, 130 interrupted (after a checkpoint).",
    )
    parser.add_argument(
        "config", metavar="CONFIG.yaml", help="a YAML file, or quickstart: the built-in example"
    )
    parser.add_argument(
        "overrides",
        metavar="dotted.key=value",
        nargs="*",
        default=[],
        help="change a key, e.g. train.seed=1 rewards.0.weight=2",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="check everything, print the resolved config, stop"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on from the newest checkpoint of this run"
    )
    parser.add_argument("--run-dir", metavar="DIR", help="where the run is kept (runs/NAME)")
    return parser


def config_file(text: str) -> Path:
    """The file that a command's CONFIG.yaml names; `quickstart` is the built-in example."""
    if text == "quickstart" and not Path(text).exists():
        return Path(__file__).parent / "quickstart" / "quickstart.yaml"
    return Path(text)


async def _train(config: RunConfig, console: Console, *, resume: bool) -> TrainingResult:
    from retrain.assembly import assemble
    from retrain.pipeline import train

    parts = assemble(config)
    for warning in parts.warnings:
        _tell(f"warning: {warning}")
    return await train(config, callbacks=[console], resume=resume, parts=parts)


def _dry_run(config: RunConfig, source: str) -> int:
    import yaml

    from retrain.assembly import assemble
    from retrain.observe.run_dir import resolved

    parts = assemble(config)
    for warning in parts.warnings:
        _tell(f"warning: {warning}")
    print(f"# {source}: nothing is wrong with it; no model was loaded, nothing was written")
    text = yaml.safe_dump(resolved(parts.resolved()), sort_keys=False, allow_unicode=True)
    print(text, end="", flush=True)
    return DONE


@contextmanager
def _signals(
    loop: asyncio.AbstractEventLoop, task: asyncio.Task[Any], announce: Callable[[str], bool]
) -> Iterator[None]:
    """Plain handlers, not the loop's: they work while user code blocks the loop."""
    if threading.current_thread() is not threading.main_thread():
        yield  # only the main thread may set handlers
        return
    asked = False

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        if asked:
            os._exit(INTERRUPTED)
        asked = True
        loop.call_soon_threadsafe(task.cancel)
        if announce(STOPPING):
            return
        with suppress(OSError):  # the terminal may be gone; and print may lock
            os.write(2, f"\n{STOPPING}\n".encode())

    signals = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL:  # nohup ignores it: so do we then
        signals.append(signal.SIGHUP)
    before = {number: signal.signal(number, handle) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _causes(error: BaseException) -> list[BaseException]:
    """The errors inside groups; a RetrainError speaks for whatever it caused.

    An interruption is one of them only where nothing else is: 130 promises a clean checkpoint.
    """
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    leaves = [leaf for inner in error.exceptions for leaf in _causes(inner)]
    return [e for e in leaves if not isinstance(e, _INTERRUPTIONS)] or leaves


def _alike(errors: Sequence[BaseException]) -> list[list[BaseException]]:
    """Errors whose texts differ by no more than a ticket, together."""
    found: dict[str, list[BaseException]] = {}
    for error in errors:
        found.setdefault(_TICKET.sub("", str(error)), []).append(error)
    return list(found.values())


def _sentence(error: BaseException, more: str) -> str:
    from retrain.config.plugins import line_of

    text = str(error)
    if not isinstance(error, RetrainError):
        text = f"{type(error).__name__}: {error}{line_of(error)}"
    return "\n  ".join([text + more, *getattr(error, "__notes__", ())])


def _keep_traceback(error: BaseException, places: Sequence[Path]) -> None:
    text = "".join(traceback.format_exception(error))
    for place in places:
        with suppress(OSError):
            file = place / "error.txt"
            file.write_text(text, encoding="utf-8")
            _tell(f"the whole story is in {file}")
            return
    _tell(text)


def _unread() -> bool:
    """Whether nobody reads the standard output any more: `retrain schema | head`.

    The pipe itself is asked: whether a write fails again depends on what Python still buffers.
    """
    poll = select.poll()
    try:
        poll.register(sys.stdout.fileno(), 0)  # its errors alone
    except (OSError, ValueError):  # no file
        return False
    if not poll.poll(0):
        return False
    let_go(sys.stdout)
    return True


def _tell(text: str) -> None:
    try:
        print(text, file=sys.stderr, flush=True)
    except OSError:  # the terminal was closed
        let_go(sys.stderr)


class _CallableModule(ModuleType):
    async def __call__(self, *args: Any, **keys: Any) -> TrainingResult:
        return await run(*args, **keys)


sys.modules[__name__].__class__ = _CallableModule

if __name__ == "__main__":
    leave(main())
