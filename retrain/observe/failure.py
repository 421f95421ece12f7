"""The cause of a failed run, for its files: error.txt, the `end` event and the report."""

from __future__ import annotations

import asyncio
import traceback
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from retrain.config.plugins import line_of
from retrain.errors import MAX_TEXT, RetrainError, alike, printable, text_of

ERROR = "error.txt"
INTERRUPTIONS = (KeyboardInterrupt, asyncio.CancelledError)


def causes(error: BaseException) -> list[BaseException]:
    """The errors inside groups; an interruption only if there is no other."""
    if not isinstance(error, BaseExceptionGroup):
        return [error]
    leaves = [leaf for inner in error.exceptions for leaf in causes(inner)]
    return [e for e in leaves if not isinstance(e, INTERRUPTIONS)] or leaves


def single(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first cause of a group. The other kinds, and what the groups note, are its notes."""
    first, *others = causes(group)
    kinds = Counter(alike(first_line(other)) for other in others)
    texts = {alike(first_line(other)): first_line(other) for other in reversed(others)}
    more = kinds.pop(alike(first_line(first)), 0)
    notes = [f"and {more} more like it"] * bool(more)
    for kind, number in kinds.items():
        notes.append(f"also failed: {texts[kind]}" + (f" ({number} times)" if number > 1 else ""))
    for note in (*notes, *_group_notes(group)):
        with suppress(TypeError):  # user code may have put anything into __notes__
            first.add_note(note)
    return first


def _group_notes(error: BaseException) -> list[str]:
    if not isinstance(error, BaseExceptionGroup):
        return []
    inner = [note for one in error.exceptions for note in _group_notes(one)]
    return [*notes_of(error), *inner]


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
        lines += ["", *(line[:MAX_TEXT] for line in traceback.format_exception(error))]
    return printable("\n".join(lines).rstrip() + "\n")


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
    notes = getattr(error, "__notes__", ())  # user code may have put anything there
    return [printable(str(note)) for note in notes] if isinstance(notes, list | tuple) else []


def _text(cause: BaseException) -> str:
    return "\n  ".join([f"{type(cause).__name__}: {text_of(cause)}", *notes_of(cause)])
