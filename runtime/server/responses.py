"""`/v1/responses`: a chat whose answer is made of items, told step by step, kept, and continued."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from .answers import ChoiceReader
from .blocks import Event
from .errors import ApiError, as_api_error
from .generate import Answer, Job, make_chat
from .openai import parse
from .render import Usage, chat_logprobs, json_response, typed_event
from .response_input import REFUSED, ResponsesRequest, chat_of, messages_of
from .response_output import Items
from .response_store import Stored
from .service import Service

_ECHOED = (
    *("max_output_tokens", "metadata", "parallel_tool_calls", "previous_response_id", "store", "temperature", "top_p"),
    *("top_logprobs", "background", "user", "safety_identifier", "prompt_cache_key", "tool_choice"),
)


async def responses(service: Service, data: dict[str, Any]) -> Answer:
    """`POST /v1/responses`."""
    request = parse(data, ResponsesRequest, REFUSED)
    service.check_model(request.model)
    before = service.responses[request.previous_response_id].messages if request.previous_response_id else []
    chat = chat_of(request, before)
    job, (reader,) = await make_chat(service, chat)
    run = _Run(service, request, job, reader)
    stored = Stored(run.data, _items(request), [*before, *messages_of(request.input)], job.id)
    if request.store:
        service.responses.put(stored)
    if request.background and not request.stream:
        stored.task = asyncio.create_task(_drain(run, stored))
        return dict(run.data)
    if request.stream:
        return _stream(run, stored)
    await _drain(run, stored)
    if run.failure is not None:
        raise run.failure
    return run.data


class _Run:
    """One response in the making."""

    def __init__(self, service: Service, request: ResponsesRequest, job: Job, reader: ChoiceReader) -> None:
        self._job, self._reader, self._items = job, reader, Items()
        self._with_logprobs = request.with_logprobs
        self._number = 0
        self.failure: Exception | None = None
        echoed = {name: getattr(request, name) for name in _ECHOED}
        self.data: dict[str, Any] = {
            "id": job.id,
            "object": "response",
            "created_at": job.created,
            "status": "queued" if request.background else "in_progress",
            "model": service.model,
            "output": self._items.done,
            "error": None,
            "incomplete_details": None,
            "usage": None,
            "completed_at": None,
            "service_tier": "default",
            "truncation": "disabled",
            "text": {"format": msgspec.to_builtins(request.text.format or {"type": "text"})},
            "tools": [msgspec.to_builtins(tool) for tool in request.tools],
            "reasoning": {"effort": request.reasoning.effort, "summary": request.reasoning.summary},
            **echoed,
            "instructions": request.instructions or None,
        }

    async def events(self) -> AsyncGenerator[list[Event], None]:
        """The events, as many as come at once. What fails before the first token is raised, what fails later told."""
        usage, texts, begun, thought = self._job.usage(), await self._job.texts(), False, 0
        try:
            async with aclosing(self._job.deltas()) as deltas:
                async for _, delta in deltas:
                    usage.add(delta)
                    parts = self._reader.push(delta)
                    thought += len(delta.token_ids) if parts.reasoning and not parts.content else 0
                    events = [] if begun else self._begin()
                    begun = True
                    logprobs = chat_logprobs(delta.logprobs, texts)["content"] if delta.logprobs else []
                    events += self._numbered(self._items.add(parts, logprobs))
                    if delta.finish_reason is not None:
                        events += self._end(delta.finish_reason, usage, thought)
                    if events:
                        yield events
        except Exception as error:
            self.failure = error
            answer = as_api_error(error)
            self.data |= {"status": "failed", "error": {"code": "server_error", "message": answer.message}}
            if not begun:
                raise
            yield self._numbered([*self._items.close("incomplete"), self._snapshot("response.failed")])
        finally:
            if self.data["status"] in {"queued", "in_progress"}:
                self.data["status"] = "cancelled"  # who waited for it went away

    def _begin(self) -> list[Event]:
        self.data["status"] = "in_progress"
        return self._numbered([self._snapshot("response.created"), self._snapshot("response.in_progress")])

    def _end(self, reason: str, usage: Usage, thought: int) -> list[Event]:
        cut = {"length": "incomplete", "abort": "cancelled"}.get(reason, "completed")
        closed = self._items.close("completed" if cut == "completed" else "incomplete")
        self.data |= {"status": cut, "usage": _usage(usage, thought), "completed_at": int(time.time())}
        if cut == "incomplete":
            self.data["incomplete_details"] = {"reason": "max_output_tokens"}
        kind = "completed" if cut == "completed" else "incomplete"
        return self._numbered([*closed, self._snapshot(f"response.{kind}")])

    def _snapshot(self, kind: str) -> Event:
        return {"type": kind, "response": {**self.data, "output": list(self._items.done)}}

    def _numbered(self, events: list[Event]) -> list[Event]:
        first, self._number = self._number, self._number + len(events)
        return [{**event, "sequence_number": first + index} for index, event in enumerate(events)]


def _usage(usage: Usage, thought: int) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }


async def _drain(run: _Run, stored: Stored) -> None:
    """Make a response to its end."""
    try:
        async with aclosing(run.events()) as events:
            async for _ in events:
                pass
    except Exception as error:
        run.failure = error
    finally:
        _finish(run, stored)


async def _stream(run: _Run, stored: Stored) -> AsyncGenerator[bytes, None]:
    try:
        async with aclosing(run.events()) as several:
            async for events in several:
                yield b"".join(map(typed_event, events))
    finally:
        _finish(run, stored)


def _finish(run: _Run, stored: Stored) -> None:
    """A response that has ended can be continued."""
    stored.messages = [*stored.messages, *messages_of(run.data["output"])]
    stored.task = None


def _items(request: ResponsesRequest) -> list[dict[str, Any]]:
    """The input as items with ids."""
    given = request.input
    if isinstance(given, str):
        content = [{"type": "input_text", "text": given}]
        given = [{"type": "message", "role": "user", "content": content}]
    return [
        {"id": f"msg_{index}", "type": "message", "status": "completed", **item} for index, item in enumerate(given)
    ]


# --- stored responses -------------------------------------------------------------------------------------------------


async def retrieve(service: Service, request: Request) -> Response:
    """`GET /v1/responses/ID`."""
    if request.query_params.get("stream", "false").lower() == "true":
        raise ApiError(400, "stream is not supported here: ask again until status is completed.", param="stream")
    return json_response(service.responses[request.path_params["response"]].data)


async def input_items(service: Service, request: Request) -> Response:
    """`GET /v1/responses/ID/input_items`, all on one page, the latest first unless `order=asc`."""
    items = service.responses[request.path_params["response"]].input_items
    if request.query_params.get("order", "desc") != "asc":
        items = items[::-1]
    ends = {"first_id": items[0]["id"], "last_id": items[-1]["id"]} if items else {"first_id": None, "last_id": None}
    return json_response({"object": "list", "data": items, **ends, "has_more": False})


async def cancel(service: Service, request: Request) -> Response:
    """`POST /v1/responses/ID/cancel`: ends a background response; one that has ended stays as it is."""
    stored = service.responses[request.path_params["response"]]
    if not stored.data["background"]:
        raise ApiError(400, "Only background responses can be cancelled.", param="response_id")
    if stored.task is not None:
        service.gate.abort([stored.job])
        if not stored.task.done() and stored.data["status"] == "queued":
            stored.task.cancel()
        await asyncio.wait({stored.task})
    return json_response(stored.data)


async def delete(service: Service, request: Request) -> Response:
    """`DELETE /v1/responses/ID`: ends it if it is in work, and forgets it."""
    identity = request.path_params["response"]
    stored = service.responses[identity]
    if stored.task is not None:
        stored.task.cancel()
        await asyncio.wait({stored.task})
    service.responses.drop(identity)
    return json_response({"id": identity, "object": "response", "deleted": True})
