"""The errors that the service returns to clients."""

from __future__ import annotations

from retrain.errors import RetrainError


class ServiceError(RetrainError):
    """An error with its HTTP status; in a failed job, a status below 500 is the user's error.

    `code` is one word for programs. `retryable` means that nothing was done and that the same
    request may succeed later.
    """

    def __init__(self, status: int, code: str, message: str, *, retryable: bool = False) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.retryable = retryable


def invalid(message: str) -> ServiceError:
    """400: the request has an invalid value."""
    return ServiceError(400, "invalid_request", message)


def missing(what: str) -> ServiceError:
    """404: the service has no `what`."""
    return ServiceError(404, "not_found", f"{what} is not on this service")


def conflict(message: str) -> ServiceError:
    """409: the request contradicts an earlier one."""
    return ServiceError(409, "conflict", message)
