"""The Harmony format of gpt-oss: messages on channels, which are reasoning, calls or the answer."""

from __future__ import annotations

import re

from .body import Body, Parts, Step
from .core import Machine, State

_ENDS = {"<|end|>": "header", "<|call|>": "header", "<|return|>": "header", "<|start|>": "header"}
_STATES = {
    "start": State("content", {"<|channel|>": "header", "<|start|>": "header"}, "final"),
    "header": State("skip", {"<|message|>": "final"}),
    "final": State("content", {**_ENDS, "<|channel|>": "header"}),
    "analysis": State("reasoning", {**_ENDS, "<|channel|>": "header"}),
    "call": State("body", _ENDS),
}


class Harmony(Machine):
    """Reads Harmony; with `tools` false, calls are content."""

    verbatim = False

    def __init__(self, *, tools: bool, reasoning: bool) -> None:
        super().__init__(_STATES, self._arguments, "start")
        self._tools, self._reasoning = tools, reasoning
        self._header = self._recipient = ""

    def _put(self, text: str, parts: Parts) -> None:
        self._header = self._header + text if self._name == "header" else ""
        super()._put(text, parts)

    def _enter(self, marker: str, name: str, parts: Parts) -> None:
        super()._enter(marker, self._route() if self._name == "header" else name, parts)

    def _route(self) -> str:
        """The state of the message that follows: its recipient may come before or after its channel."""
        recipient = re.search(r"to=(?:functions\.)?([^\s<]+)", self._header)
        if recipient and self._tools:
            self._recipient = recipient[1]
            return "call"
        return "analysis" if "analysis" in self._header and self._reasoning else "final"

    def _arguments(self, body: Body) -> Step[None]:
        yield from body.arguments(self._recipient)
