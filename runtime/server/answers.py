"""Chat answers in parts: content, reasoning and tool calls, in OpenAI's shapes."""

from __future__ import annotations

import uuid
from typing import Any

from ..formats import Formats
from ..output import Delta
from ..parsers.answer import AnswerParser
from ..parsers.body import Call, Parts
from ..parsers.core import Machine, State
from ..parsers.tools import json_calls
from .openai import ChatRequest


def forced_parser() -> Machine:
    """Reads calls that a grammar forced: a list in JSON and nothing else, whatever form the model has for calls."""
    return Machine({"text": State("body")}, json_calls)


class ChoiceReader:
    """Reads one choice of a chat as it comes."""

    def __init__(self, formats: Formats, prompt: str, request: ChatRequest, *, constrained: bool) -> None:
        """A `constrained` answer is what its grammar says from the first character on, so it has no other parts."""
        schemas = {
            tool.function.name: (tool.function.parameters or {}).get("properties", {}) for tool in request.offered
        }
        self._parser: Machine | AnswerParser
        if request.forced:
            self._parser = forced_parser()
        elif constrained:
            self._parser = AnswerParser(Formats(), prompt, None)
        else:
            self._parser = AnswerParser(formats, prompt, schemas if request.offered else None)
        self._most = None if request.parallel_tool_calls else 1
        self._begun = 0

    def push(self, delta: Delta) -> Parts:
        """What the delta adds."""
        parts = self._parser.push(delta.text)
        if delta.finish_reason is not None:
            parts += self._parser.flush()
        parts.calls = [call for call in parts.calls if self._is_kept(call)]
        return parts

    def _is_kept(self, call: Call) -> bool:
        self._begun += bool(call.name)
        return self._most is None or self._begun <= self._most

    @property
    def _last(self) -> int:
        """The index of the last call that is kept."""
        return min(self._begun, self._most or self._begun) - 1

    def reason(self, reason: str | None) -> str | None:
        """The finish reason: an output that ended by itself ended for its calls, if it has any."""
        return "tool_calls" if reason == "stop" and self._begun else reason

    def delta(self, parts: Parts) -> dict[str, Any]:
        """The delta of a chunk with these parts, which `push` returned last."""
        data: dict[str, Any] = {}
        if parts.content:
            data["content"] = parts.content
        if parts.reasoning:
            data["reasoning_content"] = parts.reasoning
        if parts.calls:
            index = self._last - sum(bool(call.name) for call in parts.calls)
            data["tool_calls"] = deltas = []
            for call in parts.calls:
                index += bool(call.name)
                deltas.append({"index": index, **(_call(call) if call.name else _more(call))})
        return data


def message(parts: Parts) -> dict[str, Any]:
    """A whole answer."""
    content = None if parts.calls and not parts.content else parts.content
    data: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
    if parts.reasoning:
        data["reasoning_content"] = parts.reasoning
    if parts.calls:
        data["tool_calls"] = [_call(call) for call in parts.calls]
    return data


def _more(call: Call) -> dict[str, Any]:
    return {"function": {"arguments": call.arguments}}


def _call(call: Call) -> dict[str, Any]:
    identity = call.id or f"call_{uuid.uuid4().hex[:24]}"
    return {"id": identity, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
