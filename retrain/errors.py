"""What can go wrong, as one tree.

    RetrainError
    ├── ConfigError (ValueError)              the run's description is wrong; exit 2
    │   ├── PluginError                       a plug-in can't be found, or its keys don't fit
    │   ├── PromptError                       a prompt file or row can't be used
    │   └── NotFoundError (FileNotFoundError) a path given to a trainer does not exist
    ├── RunError                              the run can't go on; exit 1
    │   ├── AdapterError                      the backend failed
    │   │   └── NonFiniteError                a loss, gradient or weight is NaN or infinite
    │   ├── DeadlineError (TimeoutError)      an adapter's await outlived its deadline
    │   │   └── StallError                    nothing moved for a while
    │   ├── NoSignalError                     nothing to learn from: all fail, or all are flat
    │   └── CheckpointError                   a checkpoint can't be written, read or continued from
    └── UserCodeError                         an environment or reward failed: one rollout's matter
        ├── LateError                         it outlived its deadline
        └── RewardError                       a trainer's reward_fn failed, and fit() is to say so

User code raises plain Python errors; `blame` turns one into a UserCodeError that names whose code
it was and where, and the pipe records that as the rollout's outcome.
"""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path


class RetrainError(Exception):
    """Anything that `retrain` raises on purpose."""


class ConfigError(RetrainError, ValueError):
    """The description of the run is wrong: what was got, what was expected, what to do.

    Holds every problem that was found, so that a user mends them in one go.
    """

    def __init__(self, *problems: str, source: str = "") -> None:
        super().__init__(*problems)
        self.problems = problems
        self.source = source
        """The file that the problems are in."""

    def __str__(self) -> str:
        head = f"{self.source}: " if self.source else ""
        if len(self.problems) == 1:
            return head + self.problems[0]
        return f"{head}{len(self.problems)} problems" + "".join(f"\n  {p}" for p in self.problems)


class PluginError(ConfigError):
    """A plug-in can't be found, or its keys don't fit its constructor."""


class PromptError(ConfigError):
    """A prompt file or one of its rows can't be used."""


class NotFoundError(ConfigError, FileNotFoundError):
    """A model, data set or checkpoint that can only be a path does not exist."""


class RunError(RetrainError):
    """The run can't go on; its last checkpoint stays good."""


class AdapterError(RunError):
    """The backend failed."""


class NonFiniteError(AdapterError):
    """A loss, gradient or weight is NaN or infinite."""


class DeadlineError(RunError, TimeoutError):
    """An await on an adapter outlived its deadline."""


class StallError(DeadlineError):
    """Nothing moved for `deadlines.stall` seconds."""


class NoSignalError(RunError):
    """There is nothing to learn from."""


class CheckpointError(RunError):
    """A checkpoint can't be written, read or continued from."""


class UserCodeError(RetrainError):
    """An environment or a reward failed; the message names it, the cause is its exception."""


class LateError(UserCodeError):
    """User code outlived its deadline."""


class RewardError(UserCodeError):
    """A trainer's `reward_fn` raised or returned no number; the message holds prompt and reply."""


def blame(owner: str, error: BaseException) -> UserCodeError:
    """The error of a user's `owner` ("reward 'slot_match'"), with the line that raised it."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    text = f": {error}" if str(error) else ""
    wrapped = UserCodeError(f"{owner} raised {type(error).__name__}{text}{where}")
    wrapped.__cause__ = error
    return wrapped


def shown(value: object, limit: int = 80) -> str:
    """A value as an error tells it: its repr, cut to `limit` characters."""
    try:
        text = repr(value)
    except Exception:  # noqa: BLE001 - a user's own; or Python's, of an integer of 4300 digits
        return f"<{type(value).__name__}>"
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def first_of(items: Sequence[str], separator: str = ", ", limit: int = 8) -> str:
    """The first `limit` items as an error tells them, and how many more there are."""
    more = [f"and {len(items) - limit} more"] if len(items) > limit else []
    return separator.join([*items[:limit], *more])


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
