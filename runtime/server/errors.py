"""Errors in the shape that OpenAI's clients read: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Scope

from ..errors import InternalError, UserError

logger = logging.getLogger("toolkit.server")

_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}
_ANTHROPIC = {
    401: "authentication_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    504: "timeout_error",
    503: "overloaded_error",
}


class ApiError(Exception):
    """An answer other than 2xx. `param` names the field at fault, `code` is one of OpenAI's where it has one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.headers = headers or {}
        self.status = status
        self.message = message
        self.param = param
        self.code = code

    def body(self) -> dict[str, Any]:
        """The error as JSON data."""
        kind = _TYPES.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def anthropic_body(self) -> dict[str, Any]:
        """The error as Anthropic's clients read it."""
        kind = _ANTHROPIC.get(self.status, "api_error" if self.status >= 500 else "invalid_request_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}


def as_api_error(error: Exception) -> ApiError:
    """What a client is told of an exception: our own faults are logged, and say no more than that they are ours."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, UserError):
        return ApiError(400, str(error))
    if isinstance(error, HTTPException):
        return ApiError(error.status_code, error.detail)
    if isinstance(error, InternalError):
        logger.error("%s", error)
        return ApiError(500, f"The engine failed: {error}")
    logger.error("unexpected error", exc_info=error)
    return ApiError(500, "The server failed; its log says why.")


def route_path(scope: Scope) -> str:
    """The path of a request below the server's root path."""
    path: str = scope["path"]
    return path.removeprefix(scope.get("root_path", "").rstrip("/"))


async def error_response(request: Request, error: Exception) -> Response:
    """Exception handler of the application."""
    answer = as_api_error(error)
    headers = dict(error.headers or {}) if isinstance(error, ApiError | HTTPException) else {}
    if answer.status == 401:
        headers["www-authenticate"] = "Bearer"
    anthropic = route_path(request.scope).startswith("/v1/messages")
    body = answer.anthropic_body() if anthropic else answer.body()
    return Response(msgspec.json.encode(body), answer.status, headers, "application/json")
