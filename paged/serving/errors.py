"""Errors between a client and the engine, in the form of OpenAI's interface.

{"error": {"message": …, "type": …, "param": …, "code": …}}
"""

from __future__ import annotations

import math

from paged.errors import PagedError

INVALID, AUTHENTICATION, PERMISSION = "invalid_request_error", "authentication_error", "permission_error"
MAX_CHARS = 1000
OVERLOADED, SERVER, TIMEOUT = "overloaded_error", "server_error", "timeout_error"


class ApiError(PagedError):
    """An error that a client gets instead of an answer.

    status, kind (its `type`), code, param  as in OpenAI's interface
    retry_after  seconds after which to try again; None: not given
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        retry_after: float | None = None,
    ) -> None:
        # A library's message may quote a whole prompt.
        message = message if len(message) <= MAX_CHARS else f"{message[:MAX_CHARS]} …"
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.code = code
        self.param = param
        self.retry_after = retry_after

    def body(self) -> dict[str, dict[str, str | None]]:
        """The error as a client reads it."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}

    def headers(self) -> dict[str, str]:
        """Return the headers: Retry-After in whole seconds, and in milliseconds, which OpenAI's client prefers."""
        found = {"www-authenticate": "Bearer"} if self.status == 401 else {}
        if self.retry_after is not None:
            found["retry-after"] = str(max(1, math.ceil(self.retry_after)))
            found["retry-after-ms"] = str(max(1, math.ceil(self.retry_after * 1000)))
        return found


def wrong(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """Return the error for a request that can never be answered as it is."""
    return ApiError(400, message, param=param, code=code)


def overloaded(message: str, retry_after: float, code: str = "overloaded") -> ApiError:
    """Return the error for too many requests; `retry_after`: in how many seconds there will be room."""
    return ApiError(429, message, kind=OVERLOADED, code=code, retry_after=retry_after)


def unavailable(message: str, retry_after: float | None, code: str = "engine_unavailable") -> ApiError:
    """Return the error while no request can be answered."""
    return ApiError(503, message, kind=SERVER, code=code, retry_after=retry_after)
