"""Which column of a data set is the prompt, which the answer: told, known by name, or refused.

A mapping that the user gives wins. Else our own name wins, else the one column that has a usual
name; two such columns are an error, since a guess would train on the wrong text without a word.
"""

from __future__ import annotations

import difflib
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
    """From the data set's columns to ours. Raises PromptError when it can't be told."""
    _check_given(columns, given, source)
    mapping = dict(given)
    open_columns = [name for name in columns if name not in mapping]
    if not {"prompt", "messages"} & {*mapping.values(), *open_columns}:
        mapping[_one_of(PROMPTS, open_columns, columns, "prompt", source)] = "prompt"
    if wanted == "pairs":
        return mapping
    names = ANSWERS if wanted == "rollouts" else RESPONSES
    target = "answer" if wanted == "rollouts" else "response"
    if target not in mapping.values() and "answer" not in mapping.values():
        found = [name for name in names if name in open_columns and name not in mapping]
        if found and (len(found) == 1 or found[0] == names[0]):
            mapping[found[0]] = target
        elif found and wanted == "demonstrations":
            raise PromptError(_ambiguous(found, "response", source))
    return mapping


def renamed(row: Any, mapping: Mapping[str, str]) -> Any:  # a row is whatever the data set holds
    """The row under our names; a demonstration's response is its `answer`, as the pipe reads it."""
    if not isinstance(row, Mapping):
        return row
    taken = {("answer" if ours == "response" else ours) for ours in mapping.values()}
    rest = {key: value for key, value in row.items() if key not in mapping and key not in taken}
    ours = {("answer" if o == "response" else o): row[t] for t, o in mapping.items() if t in row}
    return {**rest, **ours}


def _check_given(columns: Sequence[str], given: Mapping[str, str], source: str) -> None:
    for theirs, ours in given.items():
        if ours not in OURS:
            near = difflib.get_close_matches(ours, OURS, n=1)
            hint = f"; did you mean {near[0]}?" if near else ""
            raise PromptError(
                f"column_mapping: {theirs!r} is mapped to {ours!r}, expected one of "
                f"{', '.join(OURS)}{hint}"
            )
        if theirs not in columns:
            raise PromptError(
                f"{source}: column_mapping names {theirs!r}, which row 0 has not; its columns are "
                f"{_listed(columns)}"
            )


def _one_of(
    names: Iterable[str], found: Sequence[str], columns: Sequence[str], ours: str, source: str
) -> str:
    usual = [name for name in names if name in found]
    if len(usual) == 1:
        return usual[0]
    if usual:
        raise PromptError(_ambiguous(usual, ours, source))
    raise PromptError(
        f"{source}, row 0: found no {ours}; its columns are {_listed(columns)}, expected one of "
        f"{', '.join(names)}; name it: column_mapping={{'THEIR_COLUMN': '{ours}'}}"
    )


def _ambiguous(found: Sequence[str], ours: str, source: str) -> str:
    return (
        f"{source}: the columns {_listed(found)} could each be the {ours}; say which: "
        f"column_mapping={{'{found[0]}': '{ours}'}}"
    )


def _listed(columns: Iterable[str]) -> str:
    return ", ".join(map(str, columns)) or "none"
