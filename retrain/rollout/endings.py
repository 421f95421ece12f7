"""Whether an agent failed because of what the model did: that is a result, not a fault.

If rollouts were dropped because a reply was too long or invalid, the model would never learn to
avoid that, and the others of the group would be compared only with each other. Frameworks are
recognised by the names of their exceptions, so that none of them is imported.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from retrain.errors import LateError, UserCodeError, text_of
from retrain.supervision.crashes import ProgramError, kinds_of
from retrain.supervision.outages import NAMES, chain, is_outage
from retrain.types import Turn

REJECTED = frozenset(
    {
        "ValidationError",  # pydantic, jsonschema
        "JSONDecodeError",  # json; JSON.parse of JavaScript
        "ZodError",  # zod
        "LengthFinishReasonError",  # openai
        "MaxTurnsExceeded",  # openai-agents
        "ModelBehaviorError",
        "UnexpectedModelBehavior",  # pydantic-ai
        "UsageLimitExceeded",
        "OutputParserException",  # langchain
        "StructuredOutputError",
        "GraphRecursionError",  # langgraph
        "AgentParsingError",  # smolagents
        "AgentMaxStepsError",
        "InstructorRetryException",  # instructor
        "IncompleteOutputException",
        "AdapterParseError",  # dspy
    }
)
"""Classes (or bases) of exceptions that reject what the model said, or how often it did."""
LONGEST = 500
"""Characters of `info["unusable"]`."""
MACHINE = frozenset({"MemoryError", "ImportError", "OSError"})
"""Classes of exceptions that are not the result of a reply that stopped early."""


def as_result(error: UserCodeError, turns: Sequence[Turn], on_error: str) -> dict[str, Any]:
    """What `info` says of a rollout that is scored although its agent failed; empty for a fault.

    `truncated` is the reason why a reply stopped early, `unusable` the exception.
    """
    if not turns or isinstance(error, LateError) or is_outage(error):
        return {}
    links = list(chain(error, contexts=False))
    program = next((link for link in links if isinstance(link, ProgramError)), None)
    if program is not None and not NAMES.isdisjoint(program.logged):
        return {}  # it may be an outage
    last = turns[-1].completion.stop_reason
    early = last if last != "stop" and all(MACHINE.isdisjoint(kinds_of(x)) for x in links) else ""
    rejected = next((link for link in links if _rejects(kinds_of(link))), None)
    if not (early or rejected or on_error == "score"):
        return {}
    found = dict(program.info) if program is not None else {}
    if early:
        return {**found, "truncated": early}
    return {**found, "unusable": _said(rejected or program or error)[:LONGEST]}


def _rejects(kinds: Collection[str]) -> bool:
    """Whether an error of these classes rejects what the model said, not the page of a server."""
    return not REJECTED.isdisjoint(kinds) and "RequestException" not in kinds


def _said(error: BaseException) -> str:
    """An exception as the last line of a traceback has it."""
    if isinstance(error, ProgramError):
        lines = [line for line, _ in error.errors] or [str(error)]
        rejected = [line for line, kinds in error.errors if _rejects(kinds)]
        return (rejected or lines)[-1]
    if isinstance(error, UserCodeError):
        return str(error)
    return f"{type(error).__name__}: {text_of(error)}"
