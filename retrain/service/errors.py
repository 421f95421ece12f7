"""The errors that the service returns to clients."""

from __future__ import annotations

from retrain.errors import RetrainError

_CODES = {
    401: "unauthorized",
    403: "forbidden",
    404: "not_found",
    409: "conflict",
    410: "gone",
    413: "too_large",
    415: "unsupported_encoding",
    500: "internal",
    503: "stopped",
}


class ServiceError(RetrainError):
    """An error with its HTTP status; in a failed job, a status below 500 is the user's error."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.code = _CODES.get(status, "invalid_request")
        """One word for programs."""


def invalid(message: str) -> ServiceError:
    """400: the request has an invalid value."""
    return ServiceError(400, message)


def diverged() -> ServiceError:
    return invalid("the model's log-probs are not finite: its weights have diverged")


def missing(what: str) -> ServiceError:
    """404: the service has no `what`."""
    return ServiceError(404, f"{what} is not on this service")


def conflict(message: str) -> ServiceError:
    """409: the request contradicts an earlier one."""
    return ServiceError(409, message)
