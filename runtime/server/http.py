"""What stands before the application: API keys, request ids, and origins that browsers may call from."""

from __future__ import annotations

import hashlib
import hmac
import uuid
from collections.abc import Sequence

from starlette.datastructures import Headers, MutableHeaders
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import ApiError, error_response, route_path
from .options import HttpOptions

OPEN_ROUTES = frozenset({"/health", "/ready"})
"""Routes that need no key: whoever watches the server has none."""
REQUEST_ID = "x-request-id"
_MAX_ID = 128


def guarded(app: ASGIApp, options: HttpOptions) -> ASGIApp:
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
    return RequestIds(app)


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


class RequestIds:
    """Answers every request with its `x-request-id`: the client's own, else a new one."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = Headers(scope=scope).get(REQUEST_ID, "")
        identity = given if given and len(given) <= _MAX_ID else uuid.uuid4().hex

        async def labeled(message: Message) -> None:
            if message["type"] == "http.response.start":
                MutableHeaders(scope=message)[REQUEST_ID] = identity
            await send(message)

        await self._app(scope, receive, labeled)
