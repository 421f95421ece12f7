"""Which column of a dataset is the prompt, which the answer.

The mapping that the user gives decides. Without one, a column with our own name is used, else the
one column with a usual name. Two columns with usual names are an error, since training on the wrong
one would go unnoticed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Literal

from retrain.errors import PromptError

Wanted = Literal["rollouts", "demonstrations", "pairs"]

PROMPTS = ("prompt", "question", "problem", "instruction", "query", "input")
ANSWERS = ("answer", "expected_answer", "ground_truth", "solution", "target")
RESPONSES = ("response", "completion", "answer", "generated_solution", "output", "solution")
OURS = ("prompt", "messages", "answer", "response", "chosen", "rejected")
HELPSTEER = frozenset({"prompt", "response", "helpfulness", "correctness", "coherence"})
"""Columns of nvidia/HelpSteer and HelpSteer2: single responses with scores, no pairs."""


def mapping_of(
    columns: Sequence[str], wanted: Wanted, given: Mapping[str, str], source: str
) -> dict[str, str]:
    """A mapping from the dataset's columns to our names.

    Raises PromptError when the columns don't show which one is the prompt or the response.
    """
    _check_given(columns, given, source)
    mapping = dict(given)
    rest = [name for name in columns if name not in mapping]
    if not {"prompt", "messages"} & {*mapping.values(), *rest}:
        mapping[_prompt_column(rest, columns, source)] = "prompt"
    target = "answer" if wanted == "rollouts" else "response"
    if wanted != "pairs" and not {target, "answer"} & {*mapping.values()}:
        left = [name for name in rest if name not in mapping]
        if column := _reply_column(left, target, source):
            mapping[column] = target
    return mapping


def renamed(row: Any, mapping: Mapping[str, str]) -> Any:  # a row is whatever the dataset holds
    """The row with our names added; a demonstration's response is its `answer`, as in the pipe."""
    if not isinstance(row, Mapping):
        return row
    names = {theirs: "answer" if o == "response" else o for theirs, o in mapping.items()}
    rest = {key: value for key, value in row.items() if key not in names or key not in OURS}
    return {**rest, **{ours: row[theirs] for theirs, ours in names.items() if theirs in row}}


def _check_given(columns: Sequence[str], given: Mapping[str, str], source: str) -> None:
    for theirs, ours in given.items():
        if ours not in OURS:
            raise PromptError(
                f"column_mapping: {theirs!r} is mapped to {ours!r}, expected one of "
                f"{', '.join(OURS)}"
            )
        if theirs not in columns:
            raise PromptError(
                f"{source}: column_mapping names {theirs!r}, which is missing in row 0; its "
                f"columns are {_listed(columns)}"
            )


def _prompt_column(rest: Sequence[str], columns: Sequence[str], source: str) -> str:
    usual = [name for name in PROMPTS if name in rest]
    if not usual:
        raise PromptError(
            f"{source}, row 0: found no prompt in the columns {_listed(columns)}; expected one of "
            f"{', '.join(PROMPTS)}, or column_mapping={{'THEIR_COLUMN': 'prompt'}}"
        )
    return _only(usual, "prompt", source)


def _reply_column(rest: Sequence[str], target: str, source: str) -> str | None:
    """The column of the answer or the response; None for rollouts, which need no answer."""
    names = ANSWERS if target == "answer" else RESPONSES
    found = [name for name in names if name in rest]
    if names[0] in found:
        return names[0]
    if not found or (len(found) > 1 and target == "answer"):
        return None
    return _only(found, target, source)


def _only(found: Sequence[str], ours: str, source: str) -> str:
    if len(found) > 1:
        raise PromptError(
            f"{source}: the columns {_listed(found)} could each be the {ours}; choose one with "
            f"column_mapping={{'{found[0]}': '{ours}'}}"
        )
    return found[0]


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(map(str, columns)) or "none"
