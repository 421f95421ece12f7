"""What the service answers when it refuses or fails a request."""

from __future__ import annotations

from retrain.errors import RetrainError


class ServiceError(RetrainError):
    """A refusal with its HTTP status; as a job's failure, a status below 500 is the user's fault.

    `code` is one word for programs, the message says what was got, what was expected and what to
    do. `retryable` promises that nothing was done, and that the same request may succeed later.
    """

    def __init__(self, status: int, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retryable = retryable


def invalid(message: str) -> ServiceError:
    """400: the request's values can't be worked with."""
    return ServiceError(400, "invalid_request", message)


def missing(what: str) -> ServiceError:
    """404: `what` isn't here."""
    return ServiceError(404, "not_found", f"{what} is not on this service")


def conflict(message: str) -> ServiceError:
    """409: the request contradicts an earlier one."""
    return ServiceError(409, "conflict", message)
