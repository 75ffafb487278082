"""Errors as OpenAI's clients expect them."""

from __future__ import annotations

from typing import Any

from forerun.errors import CapacityError, ForerunError, InvalidConstraintError, InvalidRequestError
from forerun.serve.driver import ClosingError, EngineFailedError, OverloadedError, RequestTimeoutError


class ApiError(Exception):
    """What a client gets instead of an answer.

    status: HTTP status. kind: OpenAI's `type`. param: the field at fault, if it is one. retry_after: seconds.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.retry_after = retry_after

    @property
    def body(self) -> dict[str, Any]:
        """The answer's body."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def api_error(error: Exception) -> ApiError:
    """What the client is told of an error: its own faults in full, the server's without its insides."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, OverloadedError):
        return ApiError(
            429, str(error), kind="rate_limit_error", code="overloaded", retry_after=error.retry_after
        )  # fmt: skip
    if isinstance(error, ClosingError):
        return ApiError(503, str(error), kind="server_error", code="shutting_down", retry_after=5.0)
    if isinstance(error, EngineFailedError):
        return ApiError(500, str(error), kind="server_error", code="engine_failed")
    if isinstance(error, RequestTimeoutError):
        return ApiError(408, str(error), kind="server_error", code="timeout")
    if isinstance(error, CapacityError):
        return ApiError(400, str(error), code="context_length_exceeded")
    if isinstance(error, InvalidConstraintError):
        return ApiError(400, str(error), code="invalid_constraint", param=error.path)
    if isinstance(error, InvalidRequestError):
        return ApiError(400, str(error))
    if isinstance(error, ForerunError):
        return ApiError(500, str(error), kind="server_error")
    return ApiError(500, "the server failed on this request; its log has the reason", kind="server_error")
