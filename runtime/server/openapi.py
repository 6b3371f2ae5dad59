"""`/openapi.json`: the server's routes and the bodies they take, from the very types that read them."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Route

from ... import __version__
from .manage import AbortRequests
from .messages import CountRequest, MessagesRequest
from .openai import ChatRequest, CompletionRequest, DetokenizeRequest, TokenizeChat, TokenizePrompt
from .render import json_response
from .response_input import ResponsesRequest
from .token_api import GenerateRequest

BODIES: dict[str, Any] = {
    "/v1/chat/completions": ChatRequest,
    "/v1/chat/completions/render": ChatRequest,
    "/v1/completions": CompletionRequest,
    "/v1/completions/render": CompletionRequest,
    "/v1/responses": ResponsesRequest,
    "/v1/messages": MessagesRequest,
    "/v1/messages/count_tokens": CountRequest,
    "/inference/v1/generate": GenerateRequest,
    "/tokenize": (TokenizePrompt, TokenizeChat),
    "/detokenize": DetokenizeRequest,
    "/abort_requests": AbortRequests,
}
"""The body of each route that takes one; the other POST routes take none, or refuse every one."""


async def openapi(service: object, request: Request) -> Response:
    """`GET /openapi.json`."""
    return json_response(describe(request.app.routes))


def describe(routes: Iterable[BaseRoute]) -> dict[str, Any]:
    """The description, in OpenAPI 3.1."""
    kinds = {kind: None for body in BODIES.values() for kind in (body if isinstance(body, tuple) else (body,))}
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    by_kind = dict(zip(kinds, schemas, strict=True))
    paths: dict[str, dict[str, Any]] = {}
    for route in routes:
        if isinstance(route, Route):
            path = re.sub(r"{(\w+):\w+}", r"{\1}", route.path)
            for method in (route.methods or {"POST"}) - {"HEAD"}:
                paths.setdefault(path, {})[method.lower()] = _operation(path, method, by_kind)
    info = {"title": "toolkit", "version": __version__}
    return {"openapi": "3.1.0", "info": info, "paths": paths, "components": {"schemas": components}}


def _operation(path: str, method: str, schemas: dict[Any, dict[str, Any]]) -> dict[str, Any]:
    operation: dict[str, Any] = {"responses": {"default": {"description": "An answer, or an error as JSON."}}}
    names = re.findall(r"{(\w+)}", path)
    if names:
        text = {"type": "string"}
        operation["parameters"] = [{"name": name, "in": "path", "required": True, "schema": text} for name in names]
    body = BODIES.get(path) if method == "POST" else None
    if body is not None:
        kinds = body if isinstance(body, tuple) else (body,)
        schema = schemas[kinds[0]] if len(kinds) == 1 else {"anyOf": [schemas[kind] for kind in kinds]}
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": schema}}}
    return operation
