"""The tree of errors.

    RetrainError
    ├── ConfigError (ValueError)              the config is wrong; exit 2
    │   ├── PluginError                       a plug-in isn't found, or its keys don't fit
    │   ├── PromptError                       a prompt file or row can't be used
    │   └── NotFoundError (FileNotFoundError) a path given to a trainer does not exist
    ├── RunError                              the run can't continue; exit 1
    │   ├── AdapterError                      the backend failed
    │   │   └── NonFiniteError                a loss, gradient or weight is NaN or infinite
    │   ├── DeadlineError (TimeoutError)      a call of an adapter exceeded its deadline
    │   │   └── StallError                    there was no progress for `deadlines.stall` seconds
    │   ├── NoSignalError                     nothing to learn: all rollouts fail or have no credit
    │   ├── OutageError                       a reward or environment stays out of reach
    │   ├── BudgetError                       a reward has used up its budget
    │   └── CheckpointError                   a checkpoint can't be written, read or resumed
    └── UserCodeError                         an environment or reward failed in one rollout
        ├── LateError                         it exceeded its deadline
        └── RewardError                       a trainer's reward_fn failed; fit() raises this

User code raises any Python error. `blame` turns it into a UserCodeError that names the code and the
line, and the pipe records that as the outcome of the rollout.
"""

from __future__ import annotations

import difflib
import re
import sysconfig
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_OWN = re.compile(
    r"""-?\d+\.\d+\.\d+(?=[\s,:)'"]|$)   # a ticket
    | 0x[0-9a-f]+                       # <object at ...>
    | retrain-agent-\w+                 # the working folder of an agent
    | /r/[0-9a-f]{16} | sk-[\w-]{20,}   # the endpoint of a rollout
    | \b(?:pid|process)[ =]\d+
    | \b\d[\d,]*(?=[ ]tokens\b)          # the length of a prompt or a reply
    """,
    re.VERBOSE,
)
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""Characters that a terminal obeys instead of showing, but not tab and newline."""
MAX_TEXT = 20_000
"""The longest text of one error, in characters."""
LIBRARIES = (
    str(Path(__file__).parent),
    str(Path(traceback.__file__).parent),
    sysconfig.get_path("purelib"),
    sysconfig.get_path("platlib"),
)
"""The folders of retrain, of the standard library and of installed packages."""
INCLUDED = tuple(
    str(folder / name)
    for folder in (Path(__file__).parent.parent, Path(__file__).parent)
    for name in ("environments", "rewards")
)
"""Those of the included environments and rewards, in a checkout and in an installation."""


class RetrainError(Exception):
    """The base class of all errors of `retrain`."""


class ConfigError(RetrainError, ValueError):
    """The config is wrong. It holds every problem, so that a user can fix all at once."""

    def __init__(self, *problems: str, source: str = "") -> None:
        super().__init__(*problems)
        self.problems = problems
        self.source = source
        """The file with the problems."""

    def __str__(self) -> str:
        head = f"{self.source}: " if self.source else ""
        if len(self.problems) == 1:
            return head + self.problems[0]
        return f"{head}{len(self.problems)} problems" + "".join(f"\n  {p}" for p in self.problems)


class PluginError(ConfigError):
    """A plug-in isn't found, or its keys don't fit its constructor."""


class PromptError(ConfigError):
    """A prompt file or one of its rows can't be used."""


class NotFoundError(ConfigError, FileNotFoundError):
    """The path of a model, dataset or checkpoint does not exist."""


class RunError(RetrainError):
    """The run can't continue; its last checkpoint remains valid."""


class AdapterError(RunError):
    """The backend failed."""


class NonFiniteError(AdapterError):
    """A loss, gradient or weight is NaN or infinite."""


class DeadlineError(RunError, TimeoutError):
    """A call of an adapter exceeded its deadline."""


class StallError(DeadlineError):
    """There was no progress for `deadlines.stall` seconds."""


class NoSignalError(RunError):
    """There is nothing to learn: all rollouts fail or have no credit."""


class OutageError(RunError):
    """A reward or an environment that worked before can't be reached for `deadlines.outage`."""


class BudgetError(RunError):
    """A reward has used up its budget; raised by an async reward, it ends the run."""


class CheckpointError(RunError):
    """A checkpoint can't be written, read or resumed."""


class UserCodeError(RetrainError):
    """An environment or a reward failed: the message names it, `__cause__` is its exception."""


class LateError(UserCodeError):
    """User code exceeded its deadline."""


class RewardError(UserCodeError):
    """A trainer's `reward_fn` failed; the message contains the prompt and the reply."""


def blame(owner: str, error: BaseException) -> UserCodeError:
    """The error of user code, `owner` ("reward 'slot_match'"), with the line of it that raised.

    That is the deepest line of the user's files, or of an installed library if there is none. No
    line is added if retrain raised it or one of the included environments and rewards did or called
    the library: it isn't the user's. A UserCodeError says itself what failed.
    """
    said = text_of(error)
    if isinstance(error, UserCodeError):
        wrapped = UserCodeError(f"{owner}: {said}")
        wrapped.__cause__ = error
        return wrapped
    stack = traceback.extract_tb(error.__traceback__)
    frames = [f for f in stack if not is_library(f.filename)]
    if not frames and not any(f.filename.startswith(INCLUDED) for f in stack):
        frames = [f for f in stack[-1:] if not f.filename.startswith(LIBRARIES[0])]
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = f": {said}" if said else ""
    wrapped = UserCodeError(f"{owner} raised {type(error).__name__}{text}{where}")
    wrapped.__cause__ = error
    return wrapped


def is_library(file: str) -> bool:
    """Whether a file is not the user's; also of another environment's packages on PYTHONPATH."""
    return file.startswith((*LIBRARIES, *INCLUDED, "<frozen ")) or "/site-packages/" in file


def place_of(function: object) -> str:
    """ " (file:line)" of the definition of a Python function; empty for anything else."""
    code = getattr(function, "__code__", None)
    return f" ({Path(code.co_filename).name}:{code.co_firstlineno})" if code else ""


def alike(error: str) -> str:
    """The text without what differs from rollout to rollout: errors with equal ones are one kind.

    These are tickets, addresses of objects, temporary folders, processes, endpoints' URLs and
    numbers of tokens.
    """
    return _OWN.sub("...", error)


def printable(text: str) -> str:
    """`text` with control characters escaped, so that a terminal shows them and obeys none."""
    return _CONTROL.sub(lambda found: repr(found.group())[1:-1], text.replace("\r\n", "\n"))


def text_of(error: BaseException) -> str:
    """The printable text of any exception, truncated to MAX_TEXT characters.

    For a group it is the first error's. A `__str__` that raises is reported as such.
    """
    try:
        if isinstance(error, BaseExceptionGroup):  # its own text says only how many there are
            first = error.exceptions[0]
            return f"{error.message}: {type(first).__name__}: {text_of(first)}"
        text = str(error)
    except Exception as failure:  # noqa: BLE001 - of user code
        return f"<its __str__ raised {type(failure).__name__}>"
    if len(text) > MAX_TEXT:
        text = f"{text[:MAX_TEXT]}... ({len(text):,} characters)"
    return printable(text)


def shown(value: object, limit: int = 80) -> str:
    """A value as errors show it: its repr, truncated to `limit` characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - of user code, or of Python for an integer of 4300 digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def first_of(items: Sequence[str], separator: str = ", ", limit: int = 8) -> str:
    """The first `limit` items as errors show them, and how many more there are."""
    more = [f"and {len(items) - limit} more"] if len(items) > limit else []
    return separator.join([*items[:limit], *more])


NEAR = " (did you mean {!r}?)"


def nearest(name: str, known: Iterable[str], said: str = "; did you mean {}?") -> str:
    """`said` with the known name that resembles `name` most; empty if none does."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.7)
    return said.format(*close) if close else ""


def install_command(extra: str) -> str:
    """The command that installs an optional dependency set, `pip install 'retrain-rl[remote]'`.

    In a checkout it installs from the checkout: `pip install -e '.[remote]'`. Every message that
    names an extra calls this, since `retrain` on the public index is another project.
    """
    root = Path(__file__).resolve().parent.parent
    with suppress(OSError):
        if 'name = "retrain-rl"' in (root / "pyproject.toml").read_text(encoding="utf-8"):
            return f"pip install -e '{'.' if root == Path.cwd() else root}[{extra}]'"
    return f"pip install 'retrain-rl[{extra}]'"


@contextmanager
def needing(extra: str) -> Iterator[None]:
    """For imports of optional packages; one that is missing raises ConfigError, which says what to
    install."""
    try:
        yield
    except ImportError as error:
        raise ConfigError(
            f"the extra {extra} is not installed ({error}): {install_command(extra)}"
        ) from error
