"""Anthropic's `/v1/messages`: its fields become a chat request, the answer its content blocks and events."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Literal

import msgspec

from ..output import Delta, Output
from .errors import as_api_error
from .generate import Answer, Job
from .openai import MAX_STOPS, ChatRequest, parse, render_messages
from .render import Usage
from .service import Service

_TOOLS = "tool calls are not supported"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "cache_control": (({"type": "ephemeral"},), "prefixes are cached by themselves"),
    "container": ((), "there are no containers"),
    "diagnostics": ((), "there are none"),
    "inference_geo": ((), "there is one place"),
    "output_config": (({},), "structured output is not supported"),
    "service_tier": (("auto", "standard_only"), "there is one tier"),
    "speed": (("standard",), "there is one speed"),
    "thinking": (({"type": "disabled"},), "reasoning is part of the text"),
    "tool_choice": (({"type": "none"}, {"type": "auto"}), _TOOLS),
    "tools": (([],), _TOOLS),
    "user_profile_id": ((), "the server knows no users"),
    "workspace_id": ((), "the server knows no workspaces"),
}
"""Known fields that can't be honored: the values that ask for nothing, which are taken, and why others are refused."""


class _TextBlock(msgspec.Struct, tag="text", forbid_unknown_fields=True):
    text: str
    cache_control: dict[str, Any] | None = None
    """Asks for what happens anyway: prefixes are cached."""
    citations: list[dict[str, Any]] | None = None


_Content = str | list[_TextBlock]


def _text(content: _Content) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: _Content


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """A label, which changes nothing."""

    user_id: str | None = None


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`."""

    messages: list[_Message]
    model: str | None = None
    system: _Content = ""

    def chat(self) -> dict[str, Any]:
        """The chat request's fields. A last message of the assistant's is continued."""
        messages = [{"role": each.role, "content": _text(each.content)} for each in self.messages]
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        prefilled = bool(messages) and messages[-1]["role"] == "assistant"
        return {
            "messages": system + messages,
            "add_generation_prompt": not prefilled,
            "continue_final_message": prefilled,
        }


class MessagesRequest(CountRequest, kw_only=True):
    """`POST /v1/messages`."""

    max_tokens: int
    metadata: _Metadata | None = None
    stop_sequences: list[str] = []
    stream: bool = False
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None

    def __post_init__(self) -> None:
        if len(self.stop_sequences) > MAX_STOPS:
            raise ValueError(f"stop_sequences may hold {MAX_STOPS} strings, not {len(self.stop_sequences)}")

    def chat(self) -> dict[str, Any]:
        same = {name: getattr(self, name) for name in ("max_tokens", "stream", "temperature", "top_k", "top_p")}
        return {**super().chat(), **same, "stop": self.stop_sequences}


class _Chat(ChatRequest, kw_only=True):
    id_prefix: ClassVar[str] = "msg_"


async def _prompt(service: Service, request: CountRequest) -> tuple[_Chat, list[int]]:
    service.check_model(request.model)
    chat = parse(request.chat(), _Chat)
    return chat, await service.encode(render_messages(chat, await service.prompts()), add_special_tokens=False)


async def count_tokens(service: Service, data: dict[str, Any]) -> dict[str, Any]:
    """`POST /v1/messages/count_tokens`."""
    _, ids = await _prompt(service, parse(data, CountRequest, REFUSED))
    return {"input_tokens": len(ids)}


async def messages(service: Service, data: dict[str, Any]) -> Answer:
    """`POST /v1/messages`."""
    chat, ids = await _prompt(service, parse(data, MessagesRequest, REFUSED))
    job = await Job.make(service, chat, [ids], chat.params(await service.prompts()), chat.limit)
    return _stream(job) if chat.stream else await _whole(job)


async def _whole(job: Job) -> dict[str, Any]:
    usage = job.usage()
    (choice,) = await job.collect(usage)
    content = [{"type": "text", "text": choice.text}]
    return {**_head(job), "content": content, **_end(choice), "usage": _usage(usage)}


async def _stream(job: Job) -> AsyncGenerator[bytes, None]:
    usage, started = job.usage(), False
    try:
        async with aclosing(job.deltas()) as deltas:
            async for _, delta in deltas:
                usage.add(delta)
                data = b"" if started else _start(job)
                started = True
                if delta.text:
                    text = {"type": "text_delta", "text": delta.text}
                    data += _event("content_block_delta", index=0, delta=text)
                if delta.finish_reason is not None:
                    data += _event("content_block_stop", index=0)
                    data += _event("message_delta", delta=_end(delta), usage=_usage(usage))
                    data += _event("message_stop")
                if data:
                    yield data
    except Exception as error:
        if not started:
            raise
        yield b"event: error\ndata: " + msgspec.json.encode(as_api_error(error).anthropic_body()) + b"\n\n"


def _start(job: Job) -> bytes:
    end = {"stop_reason": None, "stop_sequence": None}
    message = {**_head(job), "content": [], **end, "usage": _usage(job.usage())}
    block = {"type": "text", "text": ""}
    return _event("message_start", message=message) + _event("content_block_start", index=0, content_block=block)


def _event(kind: str, **fields: Any) -> bytes:
    return b"event: " + kind.encode() + b"\ndata: " + msgspec.json.encode({"type": kind, **fields}) + b"\n\n"


def _head(job: Job) -> dict[str, Any]:
    return {"id": job.id, "type": "message", "role": "assistant", "model": job.service.model}


def _end(last: Delta | Output) -> dict[str, Any]:
    """Why the answer ended. One that was aborted from outside is a paused turn, which a client may continue."""
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    reasons = {"stop": "end_turn", "length": "max_tokens", "abort": "pause_turn"}
    return {"stop_reason": reasons[last.finish_reason or "stop"], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts the tokens found in the cache apart from the others."""
    details = usage.data()["prompt_tokens_details"] or {"cached_tokens": 0}
    cached = details["cached_tokens"]
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
