"""The error that ended a program, as its output names it.

Python prints it below the frames of a traceback, Node above those of its stack and before its own
version. Class names are all that the output has, so what classifies errors does so by names.
"""

from __future__ import annotations

import builtins
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from retrain.errors import UserCodeError

_PYTHON = re.compile(
    r"^(?:Exception Group )?Traceback \(most recent call last\):\n(?:(?:[ \t].*)?\n)*(\S.*)", re.M
)
_GROUPED = re.compile(r"^ *[|+] ", re.M)
"""What indents the lines of an exception group."""
_CAUSED = re.compile(r"^The above exception was the direct cause|^ *\+-", re.M)
"""Between two tracebacks of one error."""
_GOES_ON = re.compile(r"\s|For [\w ]*,? visit:? https?://")
"""How the last line of a message of several lines begins: pydantic's, jsonschema's, LangChain's."""
_NODE = re.compile(r"^ *\^+ *\n\n(\S.*(?:\n(?! +at ).*)*)", re.M)
_LONGEST = 500
"""Characters of a message of several lines, in one line."""
_CLASS = re.compile(r"\[?(?:Uncaught )?(?:[\w$]+\.)*([A-Za-z_$][\w$]*)(?: \[\w+\])?(?::|$)")
_UNREACHABLE = re.compile(r"(?:API)?Connect\w*|\w*Timeout(?:Error)?|gaierror")
_NODES_UNREACHABLE = re.compile(r"fetch failed|\b(?:ECONN\w+|ENOTFOUND|ETIMEDOUT|EAI_AGAIN)\b")


class ProgramError(UserCodeError):
    """A program failed, or code in a process that reports its traceback as text.

    `info` is for the rollout's `info` if it is scored all the same.
    """

    def __init__(self, message: str, output: str = "", info: Mapping[str, Any] | None = None):
        super().__init__(message)
        found = [(line, _kinds(line)) for line in _errors(output)]
        ended = _ends(output, [line for line, _ in found])
        self.errors = found if ended else []
        """The lines of the output that name the error and its causes, outermost last; of each the
        names of its class and of those bases that are known."""
        self.logged = set() if ended else {kind for _, kinds in found for kind in kinds}
        """The classes of an error that the output goes on after: it may have been handled."""
        self.info = dict(info or {})


def kinds_of(error: BaseException) -> Collection[str]:
    """The names of an error's class and of its bases; of a program's error, with its causes'."""
    if isinstance(error, ProgramError):
        return {kind for _, kinds in error.errors for kind in kinds}
    return [kind.__name__ for kind in type(error).__mro__]


def headline(output: str) -> str:
    """The line of a failed program's output that says why.

    That is the last line, unless this is Node's version or belongs to a message of several lines.
    """
    lines = output.rstrip().splitlines() or [""]
    if lines[-1][:1].isspace() or lines[-1].startswith("Node.js v"):
        return (_errors(output) or lines)[-1].strip()
    return lines[-1]


def _errors(output: str) -> list[str]:
    """The first lines of the last error and of its causes, outermost last."""
    if node := [match[1] for match in _NODE.finditer(output)]:
        return [" ".join(node[-1].split())[:_LONGEST]]
    text = _GROUPED.sub("", output)
    found = list(_PYTHON.finditer(text))
    first = len(found) - 1
    while first > 0 and _CAUSED.search(text, found[first - 1].end(), found[first].start()):
        first -= 1
    return [match[1] for match in found[max(first, 0) :]]


def _ends(output: str, errors: Sequence[str]) -> bool:
    """Whether the output ends with the error, or with a line that names its class."""
    last = (output.rstrip().splitlines() or [""])[-1]
    if _NODE.search(output) or _GOES_ON.match(last):
        return True
    return any((match := _CLASS.match(line)) and match[1] in last for line in errors[-1:])


def _kinds(line: str) -> set[str]:
    """The class that the line of an error begins with, and its bases as far as they are known."""
    match = _CLASS.match(line)
    name = match[1] if match else ""
    known = getattr(builtins, name, None)
    bases = known.__mro__ if isinstance(known, type) else ()
    kinds = {name, *(base.__name__ for base in bases)}
    if _UNREACHABLE.fullmatch(name) or _NODES_UNREACHABLE.search(line):
        kinds.add("ConnectionError")
    if line.startswith("requests.exceptions."):
        kinds.add("RequestException")
    if name == "SyntaxError" and "JSON" in line:  # of JSON.parse
        kinds.add("JSONDecodeError")
    return kinds
