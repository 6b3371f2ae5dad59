"""One incremental parser: a machine of states that markers lead in and out of, fed with pieces of text.

Only text that may be the beginning of a marker, white space that a marker may follow, and what is not certain of a
call (`body`) are kept back. Parts joined do not depend on where the text was cut. Nothing that a model writes is an
error: what can't be read as a call is content, and the arguments of a call that has begun are what the model wrote.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from .body import Body, Parse, Parts, Schemas, overlap

Sink = Literal["content", "reasoning", "body", "skip"]


@dataclass(frozen=True)
class State:
    """Where text goes, and which marker leads to which state."""

    sink: Sink
    exits: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    """If set, markers count only at the beginning, after white space; any other text belongs to this state."""


class Machine:
    """Reads one output. Of several markers, that which is complete first counts, and of these the longest."""

    verbatim = True
    """Whether what can't be read as a call shows its markers too."""

    def __init__(
        self,
        states: Mapping[str, State],
        parse: Parse | None = None,
        state: str = "text",
        schemas: Schemas | None = None,
    ) -> None:
        """`parse` reads the bodies of calls; `schemas` are those of the tools."""
        self._states, self._parse, self._schemas = states, parse, schemas or {}
        self._name = state
        self._buffer = ""  # may be the beginning of a marker
        self._space = ""  # white space that is dropped if a marker follows
        self._fresh = states[state].sink == "reasoning"  # whether nothing was shown since the last marker
        self._body = self._open("") if states[state].sink == "body" else None

    def push(self, text: str) -> Parts:
        """What is certain after this piece."""
        self._buffer += text
        parts = Parts()
        while self._step(parts):
            pass
        return parts

    def flush(self) -> Parts:
        """The rest, at the end of the output; a call without its end counts if it is whole."""
        parts = Parts()
        state = self._states[self._name]
        if state.otherwise:
            self._name = state.otherwise
        text, self._buffer = self._buffer, ""
        self._put(text, parts)
        if self._body is not None:
            self._close("", parts)
        elif not self._fresh:
            self._show(self._space, parts)
        self._space = ""
        return parts

    def _step(self, parts: Parts) -> bool:
        """Take in the text up to the next marker; whether there was one."""
        state = self._states[self._name]
        if state.otherwise:
            return self._begin(state)
        found = min(
            (
                (at + len(marker), -len(marker), marker)
                for marker in state.exits
                if (at := self._buffer.find(marker)) >= 0
            ),
            default=None,
        )
        if found is None:
            held = overlap(self._buffer, state.exits)
            certain = len(self._buffer) - held
            text, self._buffer = self._buffer[:certain], self._buffer[certain:]
            self._put(text, parts)
            return False
        end, _, marker = found
        text, self._buffer = self._buffer[: end - len(marker)], self._buffer[end:]
        self._put(text, parts)
        self._enter(marker, state.exits[marker], parts)
        return True

    def _begin(self, state: State) -> bool:
        """Decide at the beginning of a text whether it starts with a marker."""
        text = self._buffer.lstrip()
        marker = max((marker for marker in state.exits if text.startswith(marker)), key=len, default=None)
        if marker is not None:
            self._buffer = text[len(marker) :]
            self._enter(marker, state.exits[marker], Parts())
        elif not any(marker.startswith(text) for marker in state.exits):
            self._name = state.otherwise
        else:
            return False
        return True

    def _enter(self, marker: str, name: str, parts: Parts) -> None:
        if self._body is not None:
            self._close(marker, parts)
        self._space, self._fresh = "", True
        self._name = name
        if self._states[name].sink == "body":
            self._body = self._open(marker if self.verbatim else "")

    def _open(self, opening: str) -> Body:
        assert self._parse is not None
        return Body(self._parse, opening, self._schemas)

    def _close(self, marker: str, parts: Parts) -> None:
        """The body ends here."""
        assert self._body is not None
        if not self._body.end(marker, parts) and self.verbatim:
            parts.content += marker
        self._body = None

    def _put(self, text: str, parts: Parts) -> None:
        sink = self._states[self._name].sink
        if self._body is not None:
            self._body.push(text, parts)
        elif sink != "skip":
            text = self._space + text
            if self._fresh:
                text = text.lstrip()
            shown = text.rstrip()
            self._space = text[len(shown) :]
            self._show(shown, parts)

    def _show(self, text: str, parts: Parts) -> None:
        if text:
            self._fresh = False
        if self._states[self._name].sink == "reasoning":
            parts.reasoning += text
        elif self._states[self._name].sink == "content":
            parts.content += text
