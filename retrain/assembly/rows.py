"""Checks the rows of the dataset by what the environment and the rewards need of them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence

from retrain.errors import PromptError
from retrain.prompts import PromptSource
from retrain.prompts.preparing import named
from retrain.types import Row

MOST = 5
"""How many different problems are reported."""
SECONDS = 60.0
"""How long the rows of one source may be checked before the run."""
CheckRow = Callable[[Row], None]


def check_rows(prompts: PromptSource, checks: Sequence[CheckRow]) -> Iterator[str]:
    """Check all rows, or the first and the last one of a source that is not read at the start.

    Yields a warning if it takes too long to check all. Raises PromptError with the places of the
    rows that can't be used.
    """
    count = len(prompts)
    wanted = range(count) if prompts.read_at_start else sorted({0, count - 1})
    problems: dict[str, list[int]] = {}
    until = time.monotonic() + SECONDS
    for index in wanted:
        row = prompts.checked_row(index)
        for check in checks:
            try:
                check(row)
            except ValueError as error:
                problems.setdefault(str(error), []).append(index)
        late = index + 1 < count and time.monotonic() > until
        if late and not problems:
            yield (
                f"{prompts.name}: only the first {index + 1} of {count} rows were checked for what "
                f"the environment and the rewards need, in {SECONDS:g} s; other rows may fail "
                "during the run"
            )
        if late or len(problems) == MOST:
            break
    if problems:
        raise PromptError(*(f"{named(prompts, rows)}: {text}" for text, rows in problems.items()))
