"""Anthropic's `/v1/messages`: its fields become a chat request, the answer its content blocks and events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, ClassVar, Literal

import msgspec

from ..output import Delta, Output
from ..parsers.body import Call
from .answers import ChoiceReader
from .blocks import Blocks, Event, Kind
from .errors import as_api_error
from .generate import Answer, Job, make_chat
from .openai import MAX_STOPS, ChatRequest, parse, render_messages
from .render import Usage, typed_event
from .service import Service

REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "cache_control": (({"type": "ephemeral"},), "prefixes are cached by themselves"),
    "container": ((), "there are no containers"),
    "diagnostics": ((), "there are none"),
    "inference_geo": ((), "there is one place"),
    "service_tier": (("auto", "standard_only"), "there is one tier"),
    "speed": (("standard",), "there is one speed"),
    "user_profile_id": ((), "the server knows no users"),
    "workspace_id": ((), "the server knows no workspaces"),
}
"""Known fields that can't be honored: the values that ask for nothing, which are taken, and why others are refused."""


class _Block(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    cache_control: dict[str, Any] | None = None
    """Asks for what happens anyway: prefixes are cached."""


class _TextBlock(_Block, tag="text", kw_only=True):
    text: str
    citations: list[dict[str, Any]] | None = None


class _ThinkingBlock(_Block, tag="thinking", kw_only=True):
    thinking: str
    signature: str = ""


class _ToolUseBlock(_Block, tag="tool_use", kw_only=True):
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any] | None = None


class _ToolResultBlock(_Block, tag="tool_result", kw_only=True):
    tool_use_id: str
    content: str | list[_TextBlock] = ""
    is_error: bool = False
    """Tools say in their own words that they failed; templates have no place for more."""


_Content = str | list[_TextBlock]


def _text(content: _Content) -> str:
    return content if isinstance(content, str) else "\n".join(block.text for block in content)


class _Message(msgspec.Struct, forbid_unknown_fields=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[_TextBlock | _ThinkingBlock | _ToolUseBlock | _ToolResultBlock]

    def chat(self) -> list[dict[str, Any]]:
        """As chat messages: results of tools come before what the user says with them."""
        blocks = [_TextBlock(text=self.content)] if isinstance(self.content, str) else self.content
        text = "\n".join(block.text for block in blocks if isinstance(block, _TextBlock))
        thought = "\n".join(block.thinking for block in blocks if isinstance(block, _ThinkingBlock))
        calls = [_call(block) for block in blocks if isinstance(block, _ToolUseBlock)]
        results = [
            {"role": "tool", "tool_call_id": block.tool_use_id, "content": _text(block.content)}
            for block in blocks
            if isinstance(block, _ToolResultBlock)
        ]
        own: dict[str, Any] = {"role": self.role, "content": text}
        own |= {"reasoning_content": thought} if thought else {}
        own |= {"tool_calls": calls} if calls else {}
        return results if results and not text else [*results, own]


def _call(block: _ToolUseBlock) -> dict[str, Any]:
    arguments = msgspec.json.encode(block.input).decode()
    return {"id": block.id, "type": "function", "function": {"name": block.name, "arguments": arguments}}


class _Metadata(msgspec.Struct, forbid_unknown_fields=True):
    """A label, which changes nothing."""

    user_id: str | None = None


class _Tool(_Block, kw_only=True):
    name: str
    input_schema: dict[str, Any]
    description: str | None = None
    type: Literal["custom"] = "custom"
    strict: bool | None = None

    def chat(self) -> dict[str, Any]:
        """As chats have it."""
        described = {} if self.description is None else {"description": self.description}
        return {"type": "function", "function": {"name": self.name, "parameters": self.input_schema, **described}}


class _ToolChoice(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["auto", "any", "tool", "none"]
    name: str = ""
    disable_parallel_tool_use: bool = False

    def chat(self) -> dict[str, Any]:
        """As fields of chats."""
        choice: Any = {"any": "required"}.get(self.type, self.type)
        if self.type == "tool":
            choice = {"type": "function", "function": {"name": self.name}}
        return {"tool_choice": choice, "parallel_tool_calls": not self.disable_parallel_tool_use}


class _Thinking(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["disabled", "adaptive"]
    """A budget of tokens, which `enabled` has, can't be kept."""
    display: Literal["summarized"] | None = None
    """Thinking is shown whole, which is more."""


class _OutputFormat(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["json_schema"]
    schema: dict[str, Any]


class _OutputConfig(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    effort: str | None = None
    format: _OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/messages/count_tokens`."""

    messages: list[_Message]
    model: str | None = None
    system: _Content = ""
    tools: list[_Tool] = []
    tool_choice: _ToolChoice | None = None
    thinking: _Thinking | None = None
    output_config: _OutputConfig | None = None

    def chat(self) -> dict[str, Any]:
        """The chat request's fields. A last message of the assistant's is continued."""
        messages = [message for each in self.messages for message in each.chat()]
        system = [{"role": "system", "content": _text(self.system)}] if self.system else []
        prefilled = bool(messages) and messages[-1]["role"] == "assistant"
        fields: dict[str, Any] = {
            "messages": system + messages,
            "add_generation_prompt": not prefilled,
            "continue_final_message": prefilled,
            "tools": [tool.chat() for tool in self.tools],
        }
        if self.tool_choice is not None:
            fields |= self.tool_choice.chat()
        if self.thinking is not None and self.thinking.type == "disabled":
            fields["reasoning_effort"] = "none"
        if self.output_config is not None:
            fields["reasoning_effort"] = fields.get("reasoning_effort") or self.output_config.effort
            if self.output_config.format is not None:
                schema = {"name": "output", "schema": self.output_config.format.schema}
                fields["response_format"] = {"type": "json_schema", "json_schema": schema}
        return fields


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


async def count_tokens(service: Service, data: dict[str, Any]) -> dict[str, Any]:
    """`POST /v1/messages/count_tokens`."""
    request = parse(data, CountRequest, REFUSED)
    service.check_model(request.model)
    text = render_messages(parse(request.chat(), _Chat), await service.prompts())
    return {"input_tokens": len(await service.encode(text, add_special_tokens=False))}


async def messages(service: Service, data: dict[str, Any]) -> Answer:
    """`POST /v1/messages`."""
    request = parse(data, MessagesRequest, REFUSED)
    service.check_model(request.model)
    chat = parse(request.chat(), _Chat)
    job, (reader,) = await make_chat(service, chat)
    return _stream(job, reader) if chat.stream else await _whole(job, reader)


async def _whole(job: Job, reader: ChoiceReader) -> dict[str, Any]:
    usage, blocks = job.usage(), _Blocks()
    (choice,) = await job.collect(usage)
    blocks.add(reader.push(Delta(choice.text, [], finish_reason=choice.finish_reason)))
    blocks.close()
    return {**_head(job), "content": blocks.done, **_end(choice, reader), "usage": _usage(usage)}


async def _stream(job: Job, reader: ChoiceReader) -> AsyncGenerator[bytes, None]:
    usage, blocks, started = job.usage(), _Blocks(), False
    try:
        async with aclosing(job.deltas()) as deltas:
            async for _, delta in deltas:
                usage.add(delta)
                events = [] if started else [_start(job)]
                started = True
                events += blocks.add(reader.push(delta))
                if delta.finish_reason is not None:
                    events += blocks.close()
                    events += [{"type": "message_delta", "delta": _end(delta, reader), "usage": _usage(usage)}]
                    events += [{"type": "message_stop"}]
                if events:
                    yield b"".join(map(typed_event, events))
    except Exception as error:
        if not started:
            raise
        yield typed_event(as_api_error(error).anthropic_body())


class _Blocks(Blocks):
    """Content blocks."""

    _TYPES: ClassVar[dict[Kind, str]] = {"reasoning": "thinking", "text": "text", "call": "tool_use"}

    def _begin(self, kind: Kind, call: Call | None) -> list[Event]:
        block, self._input = self.done[-1], ""
        block["type"] = self._TYPES[kind]
        if call is not None:
            block |= {"id": call.id or f"toolu_{uuid.uuid4().hex[:24]}", "name": call.name, "input": {}}
        else:
            block |= {block["type"]: "", **({"signature": ""} if kind == "reasoning" else {})}
        return [{"type": "content_block_start", "index": len(self.done) - 1, "content_block": dict(block)}]

    def _extend(self, kind: Kind, text: str) -> list[Event]:
        block, name = self.done[-1], self._TYPES[kind]
        if kind == "call":
            self._input += text
            delta = {"type": "input_json_delta", "partial_json": text}
        else:
            block[name] += text
            delta = {"type": f"{name}_delta", name: text}
        return [{"type": "content_block_delta", "index": len(self.done) - 1, "delta": delta}]

    def _end(self, kind: Kind, block: dict[str, Any], status: str) -> list[Event]:
        if kind == "call":
            block["input"] = _object(self._input)
        return [{"type": "content_block_stop", "index": len(self.done) - 1}]


def _object(arguments: str) -> dict[str, Any]:
    """The arguments of a call; those that the model did not write as an object, or not to their end, are one string."""
    try:
        found = msgspec.json.decode(arguments)
    except (msgspec.DecodeError, RecursionError):
        found = arguments
    return found if isinstance(found, dict) else {"arguments": found}


def _start(job: Job) -> dict[str, Any]:
    end = {"stop_reason": None, "stop_sequence": None}
    return {"type": "message_start", "message": {**_head(job), "content": [], **end, "usage": _usage(job.usage())}}


def _head(job: Job) -> dict[str, Any]:
    return {"id": job.id, "type": "message", "role": "assistant", "model": job.service.model}


def _end(last: Delta | Output, reader: ChoiceReader) -> dict[str, Any]:
    """Why the answer ended. One that was aborted from outside is a paused turn, which a client may continue."""
    if isinstance(last.stop_reason, str):
        return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
    reasons = {"stop": "end_turn", "length": "max_tokens", "abort": "pause_turn", "tool_calls": "tool_use"}
    return {"stop_reason": reasons[reader.reason(last.finish_reason) or "stop"], "stop_sequence": None}


def _usage(usage: Usage) -> dict[str, Any]:
    """Anthropic counts the tokens found in the cache apart from the others."""
    cached = usage.cached_tokens
    return {
        "input_tokens": usage.prompt_tokens - cached,
        "cache_read_input_tokens": cached,
        "cache_creation_input_tokens": 0,
        "output_tokens": usage.completion_tokens,
    }
