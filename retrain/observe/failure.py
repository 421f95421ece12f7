"""The cause of a failed run, for its files: error.txt, the `end` event and the report."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from retrain.config.plugins import line_of
from retrain.errors import RetrainError, text_of

ERROR = "error.txt"
INTERRUPTIONS = (KeyboardInterrupt, asyncio.CancelledError)


def causes(error: BaseException) -> list[BaseException]:
    """The errors inside groups; an interruption only if there is no other."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    leaves = [leaf for inner in error.exceptions for leaf in causes(inner)]
    return [e for e in leaves if not isinstance(e, INTERRUPTIONS)] or leaves


def first_line(error: BaseException) -> str:
    """The first cause in one line, with its type."""
    first = causes(error)[0]
    return f"{type(first).__name__}: {text_of(first)}".partition("\n")[0]


def described(error: BaseException) -> dict[str, str]:
    """The first cause as the field `error` of an event: its type, message and line."""
    first = causes(error)[0]
    line = "" if isinstance(first, RetrainError) else line_of(first).removeprefix(" at ")
    return {"type": type(first).__name__, "message": text_of(first), "line": line}


def full_text(error: BaseException) -> str:
    """All causes with their notes, equal ones once; for an unexpected one also the traceback."""
    found = causes(error)
    texts = Counter(_text(cause) for cause in found)
    lines = [f"{text}\n  ({n} times)" if n > 1 else text for text, n in texts.items()]
    lines += [] if error in found else notes_of(error)
    if not all(isinstance(cause, RetrainError) for cause in found):
        lines += ["", "".join(traceback.format_exception(error))]
    return "\n".join(lines).rstrip() + "\n"


def write_error(folder: Path, error: BaseException) -> bool:
    """Write error.txt into a run directory; False if that is not possible.

    The watcher may append how the process ended. A resume empties the file.
    """
    try:
        (folder / ERROR).write_text(full_text(error), encoding="utf-8", errors="replace")
    except OSError:  # the event `end` has it too
        return False
    return True


def notes_of(error: BaseException) -> Sequence[str]:
    """The notes of an error."""
    notes = getattr(error, "__notes__", ())  # user code may have put anything there
    return [str(note) for note in notes] if isinstance(notes, list | tuple) else []


def _text(cause: BaseException) -> str:
    return "\n  ".join([f"{type(cause).__name__}: {text_of(cause)}", *notes_of(cause)])
