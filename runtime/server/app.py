"""The HTTP application: its routes, and how a handler's answer becomes a response."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from ... import __version__
from ..errors import InternalError, UserError
from ..output import TokenTexts
from . import manage, metrics, responses
from .errors import ApiError, as_api_error, error_response
from .generate import Answer, chat_completions, completions
from .messages import count_tokens, messages
from .openai import DetokenizeRequest, TokenizeChat, TokenizePrompt, parse, parse_json, render_messages
from .openapi import openapi
from .page import page as show_page
from .peers import FROM_PEER
from .render import DONE, event, json_response
from .service import Service
from .token_api import generate_tokens, render_chat, render_completion

MAX_BODY_BYTES = 16 * 2**20

Handler = Callable[[Service, dict[str, Any]], Awaitable[Answer]]
"""Takes a body."""
Plain = Callable[[Service, Request], Awaitable[Response]]
"""Takes none."""


def create_app(service: Service, *, max_body_bytes: int = MAX_BODY_BYTES, page: bool = True) -> Starlette:
    """The application of one service; with `page`, the built-in page is at `/`."""

    def post(path: str, handler: Handler) -> Route:
        return Route(path, PostEndpoint(service, handler, max_body_bytes), methods=["POST"])

    def get(path: str, handler: Plain, method: str = "GET") -> Route:
        async def endpoint(request: Request) -> Response:
            return await handler(service, request)

        return Route(path, endpoint, methods=[method])

    action = partial(get, method="POST")

    routes = [
        post("/v1/chat/completions", chat_completions),
        post("/v1/completions", completions),
        post("/v1/responses", responses.responses),
        get("/v1/responses/{response}", responses.retrieve),
        get("/v1/responses/{response}/input_items", responses.input_items),
        action("/v1/responses/{response}/cancel", responses.cancel),
        get("/v1/responses/{response}", responses.delete, "DELETE"),
        post("/v1/messages", messages),
        post("/v1/messages/count_tokens", count_tokens),
        get("/v1/models", models),
        get("/v1/models/{model:path}", model),
        post("/tokenize", tokenize),
        post("/detokenize", detokenize),
        get("/tokenizer_info", tokenizer_info),
        get("/health", health),
        get("/metrics", metrics_text),
        get("/version", version),
        get("/openapi.json", openapi),
        get("/ready", manage.ready),
        get("/load", manage.load),
        get("/server_info", manage.server_info),
        post("/v1/chat/completions/render", render_chat),
        post("/v1/completions/render", render_completion),
        post("/inference/v1/generate", generate_tokens),
        post("/abort_requests", manage.abort_requests),
        action("/reset_prefix_cache", manage.reset_prefix_cache),
        action("/start_profile", manage.start_profile),
        action("/stop_profile", manage.stop_profile),
        action("/pause", manage.pause),
        action("/resume", manage.resume),
        get("/is_paused", manage.is_paused),
        action("/sleep", manage.sleep),
        action("/wake_up", manage.wake_up),
        get("/is_sleeping", manage.is_sleeping),
        *(post(path, manage.no_embeddings) for path in manage.EMBEDDING_ROUTES),
    ]
    if page:
        routes.append(get("/", show_page))
    kinds: tuple[type[Exception], ...] = (ApiError, UserError, InternalError, HTTPException, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, error_response))


# --- POST -------------------------------------------------------------------------------------------------------------


class PostEndpoint:
    """An ASGI endpoint that takes a JSON object. When the client goes away its work is canceled, in any phase."""

    def __init__(self, service: Service, handler: Handler, max_body_bytes: int) -> None:
        self._service = service
        self._handler = handler
        self._max_body_bytes = max_body_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            data = parse_json(await _read_body(Request(scope, receive), self._max_body_bytes))
        except ClientDisconnect:
            return
        response: Response | None = None
        async with while_connected(receive) as connection:
            answer = await self._handler(self._service, data)
            if isinstance(answer, dict):
                response = json_response(answer)
            else:
                await _send_events(answer, send)
        if connection.gone:
            return
        if response is not None:
            await response(scope, receive, send)
        else:
            await send({"type": "http.response.body", "body": b""})


class Connection:
    """Whether the client went away."""

    gone = False


@asynccontextmanager
async def while_connected(receive: Receive) -> AsyncIterator[Connection]:
    """Cancels its body when the client goes away; the cancellation ends here."""
    connection = Connection()
    task = asyncio.current_task()
    assert task is not None

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        connection.gone = True
        task.cancel()

    watcher = asyncio.create_task(watch())
    try:
        yield connection
    except asyncio.CancelledError:
        if not connection.gone:
            raise
        task.uncancel()
    finally:
        watcher.cancel()


_STREAM_HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]


async def _send_events(chunks: AsyncGenerator[bytes, None], send: Send) -> None:
    """Send a stream. What fails before its first chunk is an error status, what fails later an error event."""
    async with aclosing(chunks):
        first = await anext(chunks)
        await send({"type": "http.response.start", "status": 200, "headers": _STREAM_HEADERS})
        await send({"type": "http.response.body", "body": first, "more_body": True})
        try:
            async for chunk in chunks:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        except Exception as error:
            data = event(as_api_error(error).body()) + DONE
            await send({"type": "http.response.body", "body": data, "more_body": True})


async def _read_body(request: Request, limit: int) -> bytes:
    """The body. Raises ApiError(415) if it is not said to be JSON and ApiError(413) if it is too large."""
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(415, f"The content type must be application/json, not {kind or 'absent'}.")
    too_large = ApiError(413, f"The body is larger than {limit} bytes.")
    length = request.headers.get("content-length", "0")
    if not length.isdecimal() or int(length) > limit:
        raise too_large
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise too_large
    return bytes(body)


# --- the small endpoints ----------------------------------------------------------------------------------------------


def _model_data(service: Service) -> dict[str, Any]:
    return {
        "id": service.model,
        "object": "model",
        "created": service.created,
        "owned_by": "toolkit",
        "root": service.model,
        "parent": None,
        "max_model_len": service.plan.model.max_context,
    }


async def models(service: Service, request: Request) -> Response:
    """`GET /v1/models`."""
    return json_response({"object": "list", "data": [_model_data(service)]})


async def model(service: Service, request: Request) -> Response:
    """`GET /v1/models/NAME`."""
    service.check_model(request.path_params["model"])
    return json_response(_model_data(service))


async def health(service: Service, request: Request) -> Response:
    """`GET /health`: 200 only if the engine turned its loop within the last seconds."""
    problem = service.heart.problem
    if problem:
        raise ApiError(503, problem)
    return json_response({"status": "ok"})


async def metrics_text(service: Service, request: Request) -> Response:
    """`GET /metrics`."""
    text = service.metrics.text(None if FROM_PEER in request.headers else await service.heart.stats())
    return Response(text, headers={"content-type": metrics.CONTENT_TYPE})


async def version(service: Service, request: Request) -> Response:
    """`GET /version`."""
    python = ".".join(map(str, sys.version_info[:3]))
    return json_response({"version": __version__, "python": python, "plan": service.plan.target})


async def tokenize(service: Service, data: dict[str, Any]) -> dict[str, Any]:
    """`POST /tokenize`: the token ids of a prompt or of messages."""
    request = parse(data, TokenizeChat) if "messages" in data else parse(data, TokenizePrompt)
    service.check_model(request.model)
    prompts = await service.prompts()
    text = request.prompt if isinstance(request, TokenizePrompt) else render_messages(request, prompts)
    ids = await service.encode(text, add_special_tokens=request.add_special_tokens)
    texts = TokenTexts(prompts.tokenizer)
    return {
        "count": len(ids),
        "max_model_len": service.plan.model.max_context,
        "tokens": ids,
        "token_strs": [texts(token) for token in ids] if request.return_token_strs else None,
    }


async def detokenize(service: Service, data: dict[str, Any]) -> dict[str, Any]:
    """`POST /detokenize`: the text of token ids."""
    request = parse(data, DetokenizeRequest)
    service.check_model(request.model)
    return {"prompt": (await service.prompts()).decode(request.tokens)}


async def tokenizer_info(service: Service, request: Request) -> Response:
    """`GET /tokenizer_info`: what a client must know beside the two above, as vLLM says it."""
    prompts, plan = await service.prompts(), service.plan
    texts = TokenTexts(prompts.tokenizer)
    return json_response(
        {
            "bos_token": None if plan.bos_token_id is None else texts(plan.bos_token_id),
            "eos_token": texts(plan.eos_token_ids[0]) if plan.eos_token_ids else None,
            "pad_token": None,
            "model_max_length": plan.model.max_context,
            "chat_template": getattr(prompts.template, "source", None),
        }
    )
