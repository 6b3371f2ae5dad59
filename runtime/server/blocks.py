"""What an answer is made of, one block after the other: reasoning, text, and calls. The wire formats are subclasses."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal

from ..parsers.body import Call, Parts

Event = dict[str, Any]
Kind = Literal["reasoning", "text", "call"]


class Blocks(ABC):
    """Turns an answer's parts, as they come, into blocks, of which one is open at a time, and events that tell all."""

    def __init__(self) -> None:
        self.done: list[dict[str, Any]] = []
        """The blocks, the last of which may still be open."""
        self._kind: Kind | None = None

    def add(self, parts: Parts) -> list[Event]:
        """The events that these parts cause."""
        more = [call.arguments for call in parts.calls[:1] if not call.name]
        events = self._extend("call", more[0]) if more else []
        events += self._text("reasoning", parts.reasoning)
        events += self._text("text", parts.content)
        for call in parts.calls[len(more) :]:
            events += [*self.close(), *self._open("call", call)]
            events += self._extend("call", call.arguments) if call.arguments else []
        return events

    def close(self, status: str = "completed") -> list[Event]:
        """The open block is done, or with another status cut off."""
        if self._kind is None:
            return []
        kind, self._kind = self._kind, None
        return self._end(kind, self.done[-1], status)

    def _text(self, kind: Kind, text: str) -> list[Event]:
        if not text:
            return []
        events = [] if kind == self._kind else [*self.close(), *self._open(kind, None)]
        return events + self._extend(kind, text)

    def _open(self, kind: Kind, call: Call | None) -> list[Event]:
        self._kind = kind
        self.done.append({})
        return self._begin(kind, call)

    @abstractmethod
    def _begin(self, kind: Kind, call: Call | None) -> list[Event]:
        """Fill in the last block, which is new."""

    @abstractmethod
    def _extend(self, kind: Kind, text: str) -> list[Event]:
        """Add text to the last block."""

    @abstractmethod
    def _end(self, kind: Kind, block: dict[str, Any], status: str) -> list[Event]:
        """The block gets no more."""
