"""A rollout that may call the endpoint, and its answers, which later calls may refer to."""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from retrain.agents.api import Request
from retrain.agents.calls import CallError, Calls, Reply
from retrain.types import Message


@dataclass(frozen=True, slots=True)
class Answer:
    """What later calls may refer to."""

    choices: int
    asked: Sequence[Message]
    reply: Reply
    """The first choice."""


class Guest:
    """A rollout that may call."""

    def __init__(self, calls: Calls, seats: Sequence[str]) -> None:
        self.calls, self.seats = calls, tuple(seats)
        self.key = f"sk-{secrets.token_urlsafe(24)}"
        self.answers: dict[str, Answer] = {}

    def seat(self, model: str) -> str:
        """The seat that a model's name stands for; without seats, every name is the policy's."""
        if not self.seats:
            return ""
        name = model or self.seats[0]
        if name not in self.seats:
            raise CallError(
                404,
                "model_not_found",
                f"got the model {name!r}, expected a seat of this rollout: {', '.join(self.seats)}",
            )
        return name

    def find(self, answer_id: Any, key: str, status: int) -> Answer:
        """An answer of this rollout; raises CallError with this status."""
        answer = self.answers.get(answer_id) if isinstance(answer_id, str) else None
        if answer is None:
            message = f"{key}: got {answer_id!r}, which is not an answer of this rollout"
            raise CallError(status, f"{key}_not_found", message)
        return answer

    def whole(self, request: Request) -> Request:
        """The request with the history that the endpoint keeps."""
        if not request.previous:
            return request
        earlier = self.find(request.previous, "previous_response_id", 400)
        return replace(request, messages=[*earlier.asked, earlier.reply.message, *request.messages])
