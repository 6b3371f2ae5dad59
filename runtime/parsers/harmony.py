"""The Harmony format of gpt-oss: messages on channels, which are reasoning, calls or the answer."""

from __future__ import annotations

import re

from .core import FAULTS, Machine, Parts, State, call

_ENDS = {"<|end|>": "header", "<|call|>": "header", "<|return|>": "header", "<|start|>": "header"}
_STATES = {
    "start": State("content", {"<|channel|>": "header", "<|start|>": "header"}, "final"),
    "header": State("body", {"<|message|>": "final"}),
    "final": State("content", {**_ENDS, "<|channel|>": "header"}),
    "analysis": State("reasoning", {**_ENDS, "<|channel|>": "header"}),
    "call": State("body", _ENDS),
}


class Harmony(Machine):
    """Reads Harmony; with `tools` false, calls are content."""

    def __init__(self, *, tools: bool, reasoning: bool) -> None:
        super().__init__(_STATES, lambda body: None, "start")
        self._tools, self._reasoning = tools, reasoning
        self._recipient = ""

    def _close(self, marker: str, parts: Parts) -> str:
        body = "".join(self._body)
        self._body.clear()
        if self._name == "header":
            return self._route(body) if marker else ""
        try:
            parts.calls.append(call(self._recipient, body))
        except FAULTS:
            parts.content += body
        return ""

    def _route(self, header: str) -> str:
        """The state of the message that follows: its recipient may come before or after its channel."""
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", header)
        if recipient and self._tools:
            self._recipient = recipient[1]
            return "call"
        return "analysis" if "analysis" in header and self._reasoning else "final"
