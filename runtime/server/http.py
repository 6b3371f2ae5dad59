"""What stands before the application: API keys, records of requests, and origins that browsers may call from."""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from .errors import ApiError, error_response, route_path
from .options import HttpOptions
from .record import REQUEST_ID, Observer, Recorded

OPEN_ROUTES = frozenset({"/", "/health", "/ready"})
"""Routes that need no key: whoever watches the server has none, and the page asks for one."""


def guarded(app: ASGIApp, options: HttpOptions, observers: Sequence[Observer] = ()) -> ASGIApp:
    """The application behind what the options ask for. Preflights of browsers carry no key, so CORS comes first."""
    if options.api_keys:
        app = KeyCheck(app, options.api_keys)
    if options.cors_origins:
        app = CORSMiddleware(
            app,
            allow_origins=options.cors_origins,
            allow_methods=options.cors_methods,
            allow_headers=options.cors_headers,
            allow_credentials=options.cors_credentials,
            expose_headers=[REQUEST_ID],
        )
    return Recorded(app, observers)


class KeyCheck:
    """Lets requests through that carry one of the keys, as `Authorization: Bearer` or `x-api-key`."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._digests = [_digest(key) for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if route_path(scope) in OPEN_ROUTES or self._known(Headers(scope=scope)):
            await self._app(scope, receive, send)
            return
        error = ApiError(401, "The API key is missing or wrong.", code="invalid_api_key")
        await (await error_response(Request(scope), error))(scope, receive, send)

    def _known(self, headers: Headers) -> bool:
        """Whether a key fits. Digests of all keys are compared, each in constant time, so that time tells nothing."""
        kind, _, bearer = headers.get("authorization", "").partition(" ")
        given = _digest(bearer.strip() if kind.lower() == "bearer" else headers.get("x-api-key", ""))
        return sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()
