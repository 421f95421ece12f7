"""The process of a command: its exit code, its event loop, signals, and what it prints on stderr.

Only this module maps errors to exit codes: 0 done, 1 the run failed, 2 bad config or usage, 130
interrupted. A user's mistake is one line on stderr; the traceback of an unexpected error goes to
error.txt in the run directory.
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
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

from retrain.errors import (
    ConfigError,
    RetrainError,
    UserCodeError,
    alike,
    blame,
    nearest,
    printable,
    text_of,
)
from retrain.observe.streams import let_go

if TYPE_CHECKING:
    from retrain.adapters.trl.ranks.contract import Place
    from retrain.observe.console import Console

DONE, FAILED, USAGE, INTERRUPTED = 0, 1, 2, 130
INTERRUPTIONS = (KeyboardInterrupt, asyncio.CancelledError)
STOPPING = "Finishing this step, then writing a checkpoint."
STOPPING_EARLY = "Will stop as soon as the model has loaded; nothing is trained."
STUCK_SECONDS = 3.0
"""How long threads may take to end after the run."""
REPORT_SECONDS = 2.0
"""How long another rank waits with its exit code while rank 0 reports a wrong config."""
T = TypeVar("T")


def exit_code(command: Callable[[], int], places: Sequence[Path] = ()) -> int:
    """Call a command; print what it raises on stderr, and return the exit code.

    `places` are folders for the traceback of an unexpected error.
    """
    try:
        return command()
    except (Exception, BaseExceptionGroup, *INTERRUPTIONS) as error:  # noqa: BLE001 - all are reported
        from retrain.observe import failure

        if isinstance(error, BrokenPipeError) and _unread():
            return DONE
        found = failure.causes(error)
        if follows() and all(isinstance(cause, ConfigError) for cause in found):
            # rank 0 prints the same error; a launcher ends it as soon as another rank has ended
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            time.sleep(REPORT_SECONDS)
            return USAGE
        if isinstance(found[0], INTERRUPTIONS):
            say("interrupted")
            return INTERRUPTED
        _print_causes(error, found)
        if all(isinstance(cause, RetrainError) for cause in found):
            return USAGE if any(isinstance(cause, ConfigError) for cause in found) else FAILED
        for place in places:
            if failure.write_error(place, error):
                say(f"the full traceback is in {place / failure.ERROR}")
                return FAILED
        say("".join(traceback.format_exception(error)))
        return FAILED


def drive(coroutine: Coroutine[Any, Any, T], console: Console | None = None) -> T:
    """Run a coroutine on a new event loop, without waiting for its threads afterwards.

    The first SIGINT, SIGTERM or SIGHUP cancels it, the second one ends the process. `console` shows
    a run, and announces its end on the terminal. Raises UserCodeError if user code ended the loop.
    """
    from retrain.supervision.interrupts import Interrupts

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
        from retrain.supervision.leash import leash

        say(f"Exiting with threads still running: {', '.join(stuck)}")
        leash.let_go()
        os._exit(code)
    sys.exit(code)


def launched_place() -> Place | None:
    """This process's place among those that a launcher such as torchrun started; None without one.

    Raises ConfigError if the launcher's variables are wrong.
    """
    if "WORLD_SIZE" not in os.environ:
        return None
    from retrain.adapters.trl.ranks.contract import launched

    return launched()


def follows() -> bool:
    """Whether a launcher started this process beside rank 0, which reports."""
    try:
        place = launched_place()
    except ConfigError:
        return False
    return place is not None and place.rank > 0


@contextmanager
def interruptible() -> Iterator[None]:
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


class Parser(argparse.ArgumentParser):
    """Names the option that resembles an unknown one."""

    def error(self, message: str) -> NoReturn:
        head, _, unknown = message.partition("unrecognized arguments: ")
        names = [name for action in self._actions for name in action.option_strings]
        given = [name.partition("=")[0] for name in unknown.split() if name.startswith("--")]
        hints = [nearest(name, names) for name in given if not head]
        super().error(message + "".join(hints))


def _print_causes(error: BaseException, causes: Sequence[BaseException]) -> None:
    """One message per cause, with its notes; causes of one kind are counted."""
    from retrain.config.plugins import line_of
    from retrain.observe import failure

    kinds: dict[str, list[list[str]]] = {}
    for cause in causes:
        text = text_of(cause)
        if not isinstance(cause, RetrainError):  # unexpected
            text = f"{type(cause).__name__}: {text}{line_of(cause)}"
        kinds.setdefault(alike(text), []).append([text, *failure.notes_of(cause)])
    for (text, *notes), *others in kinds.values():
        more = f" (and {len(others)} more like it)" if others else ""
        say("\n  ".join([f"error: {text}{more}", *notes]))
    for note in () if error in causes else failure.notes_of(error):
        say(note)


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


def say(text: str) -> None:
    try:
        print(printable(text), file=sys.stderr, flush=True)
    except OSError:  # the terminal is closed
        let_go(sys.stderr)
