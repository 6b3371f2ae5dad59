"""Requests of the Responses API, and the chat requests that they amount to."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import msgspec

from .errors import ApiError
from .openai import ChatRequest, parse

LOGPROBS = "message.output_text.logprobs"
"""What `include` may ask for."""
_NOT_HERE = "the server has no such tools"
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "access_programs": ((), "there are none"),
    "background_options": (({},), "background responses run at once"),
    "context_management": (([],), "contexts are not compacted"),
    "conversation": ((), "use previous_response_id"),
    "image": ((), "this model reads and writes text only"),
    "max_tool_calls": ((), _NOT_HERE),
    "moderation": ((), "there is no moderation model"),
    "prompt": ((), "the server stores no prompts"),
    "prompt_cache_options": ((), "use cache_salt"),
    "prompt_cache_retention": (("in_memory", "in-memory"), "prefixes are cached in memory only"),
    "service_tier": (("auto", "default"), "there is one tier"),
    "truncation": (("disabled",), "what does not fit is refused: leave items out of the input"),
}
"""Known fields that can't be honored: the values that ask for nothing, which are taken, and why others are refused."""


class _Function(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["function"]
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class _Format(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    type: Literal["text", "json_object", "json_schema"]
    name: str = ""
    description: str | None = None
    schema: dict[str, Any] = {}
    strict: bool | None = None


class _Text(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    format: _Format | None = None
    verbosity: Literal["medium"] | None = None
    """The model has no such control: only the value that asks for nothing is taken."""


class _Reasoning(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    effort: str | None = None
    summary: Literal["auto"] | None = None
    """Reasoning is shown whole, not summed up."""
    generate_summary: Literal["auto"] | None = None


class _StreamOptions(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    include_obfuscation: bool = False
    """Chunks are not padded; a client that wants that is served all the same."""


class ResponsesRequest(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """`POST /v1/responses`, with some of vLLM's extras at the end."""

    input: str | list[dict[str, Any]] = ""
    model: str | None = None
    instructions: str = ""
    previous_response_id: str | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[_Function] = []
    tool_choice: str | dict[str, Any] = "auto"
    parallel_tool_calls: bool = True
    text: _Text = _Text()
    reasoning: _Reasoning = _Reasoning()
    include: list[Literal["message.output_text.logprobs"]] = []
    top_logprobs: int | None = None
    store: bool = True
    background: bool = False
    stream: bool = False
    stream_options: _StreamOptions | None = None
    metadata: dict[str, str] = {}
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None

    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    stop: str | list[str] = []
    ignore_eos: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    priority: int = 0
    cache_salt: str = ""

    def __post_init__(self) -> None:
        if self.background and not self.store:
            raise ValueError("background needs store to be true: else there is no way to the response")
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options needs stream to be true")

    @property
    def with_logprobs(self) -> bool:
        return bool(self.include) or bool(self.top_logprobs)


class ResponseChat(ChatRequest, kw_only=True):
    """The chat request behind a response."""

    id_prefix: ClassVar[str] = "resp_"
    prompt_field: ClassVar[str] = "input"


_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "seed", "stop", "ignore_eos"),
    *("parallel_tool_calls", "priority", "cache_salt", "chat_template_kwargs"),
)


def chat_of(request: ResponsesRequest, before: list[dict[str, Any]]) -> ResponseChat:
    """The chat request that continues the messages `before`. Raises ApiError(400) naming the field at fault."""
    system = [{"role": "system", "content": request.instructions}] if request.instructions else []
    fields: dict[str, Any] = {name: getattr(request, name) for name in _SAME}
    fields |= {
        "messages": [*system, *before, *messages_of(request.input)],
        "max_completion_tokens": request.max_output_tokens,
        "tools": [_tool(tool) for tool in request.tools],
        "tool_choice": _tool_choice(request.tool_choice),
        "logprobs": request.with_logprobs,
        "top_logprobs": request.top_logprobs,
        "reasoning_effort": request.reasoning.effort,
    }
    wanted = request.text.format
    if wanted is not None and wanted.type == "json_schema":
        schema = {"name": wanted.name, "schema": wanted.schema}
        fields["response_format"] = {"type": "json_schema", "json_schema": schema}
    elif wanted is not None:
        fields["response_format"] = {"type": wanted.type}
    return parse(fields, ResponseChat)


def _tool(tool: _Function) -> dict[str, Any]:
    function = {name: value for name, value in msgspec.structs.asdict(tool).items() if value is not None}
    return {"type": function.pop("type"), "function": function}


def _tool_choice(choice: str | dict[str, Any]) -> str | dict[str, Any]:
    """`{"type": "function", "name": ...}` as chats have it."""
    if isinstance(choice, str):
        return choice
    return {"type": choice.get("type"), "function": {"name": choice.get("name")}}


def messages_of(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Input or output items as chat messages; calls and reasoning belong to one message with the text beside them.

    Raises ApiError(400) for an item that is none, or whose kind this model can't read.
    """
    if isinstance(given, str):
        return [{"role": "user", "content": given}]
    messages: list[dict[str, Any]] = []
    for index, item in enumerate(given):
        try:
            _add_item(messages, item)
        except (KeyError, TypeError) as error:
            raise ApiError(400, f"input[{index}] lacks {error}, or has it in another form.", param="input") from None
    return messages


def _add_item(messages: list[dict[str, Any]], item: dict[str, Any]) -> None:
    match item.get("type", "message"):
        case "message" if item["role"] == "assistant":
            said = _assistant(messages)
            said["content"] = said.get("content", "") + _joined(item["content"])
        case "message":
            messages.append({"role": item["role"], "content": _joined(item["content"])})
        case "function_call":
            function = {"name": item["name"], "arguments": item["arguments"]}
            call = {"id": item["call_id"], "type": "function", "function": function}
            _assistant(messages).setdefault("tool_calls", []).append(call)
        case "function_call_output":
            output = _joined(item["output"])
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": output})
        case "reasoning":
            parts = item.get("content") or item.get("summary") or []
            thought = "\n".join(part["text"] for part in parts)
            if thought:
                messages.append({"role": "assistant", "reasoning_content": thought})
        case kind:
            raise ApiError(400, f"input items of type {str(kind)[:80]!r} are not supported.", param="input")


def _assistant(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The assistant's message that an item belongs to: the last one if it is still the assistant's turn."""
    if not messages or messages[-1]["role"] != "assistant":
        messages.append({"role": "assistant"})
    return messages[-1]


def _joined(content: Any) -> str:
    """The text of a message's content. Raises ApiError(400) for pictures, files and sound."""
    if isinstance(content, str):
        return content
    texts = []
    for part in content:
        if part["type"] not in {"input_text", "output_text", "text", "refusal"}:
            kind = str(part["type"])[:80]
            raise ApiError(400, f"{kind} is not supported: this model reads and writes text only.", param="input")
        texts.append(part["refusal"] if part["type"] == "refusal" else part["text"])
    return "\n".join(texts)
