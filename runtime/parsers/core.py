"""One incremental parser: a machine of states that markers lead in and out of, fed with pieces of text.

Only text that may be the beginning of a marker, white space that a marker may follow, and the bodies of calls are kept
back. Parts joined do not depend on where the text was cut. Nothing that a model writes is an error: what can't be read
as a call is content.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

Sink = Literal["content", "reasoning", "body", "skip"]


@dataclass(frozen=True)
class Call:
    """A tool call."""

    name: str
    arguments: str
    """JSON text of an object."""
    id: str | None = None
    """If the model gave it one."""


@dataclass
class Parts:
    """What a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def __add__(self, other: Parts) -> Parts:
        return Parts(self.content + other.content, self.reasoning + other.reasoning, self.calls + other.calls)


@dataclass(frozen=True)
class State:
    """Where text goes, and which marker leads to which state."""

    sink: Sink
    exits: Mapping[str, str] = field(default_factory=dict)
    otherwise: str = ""
    """If set, markers count only at the beginning, after white space; any other text belongs to this state."""


Read = Callable[[str], Sequence[Call] | None]
"""The calls of a body; None, or an exception of `FAULTS`, if it is malformed."""

FAULTS = (ValueError, KeyError, TypeError, IndexError, AttributeError, SyntaxError, RecursionError, MemoryError)


class Machine:
    """Reads one output. Of several markers, that which is complete first counts, and of these the longest."""

    def __init__(self, states: Mapping[str, State], read: Read, state: str = "text") -> None:
        self._states, self._read = states, read
        self._name = state
        self._buffer = ""  # may be the beginning of a marker
        self._space = ""  # white space that is dropped if a marker follows
        self._fresh = states[state].sink == "reasoning"  # whether nothing was shown since the last marker
        self._body: list[str] = []
        self._opening = ""

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
        if self._states[self._name].sink == "body":
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
            held = _overlap(self._buffer, state.exits)
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
        if self._states[self._name].sink == "body":
            name = self._close(marker, parts) or name
        self._space, self._fresh = "", True
        self._name, self._opening = name, marker

    def _close(self, marker: str, parts: Parts) -> str:
        """Take in the body that ends here; the next state, if the body chooses it."""
        body = "".join(self._body)
        self._body.clear()
        try:
            calls = self._read(body)
        except FAULTS:
            calls = None
        if calls is None:
            parts.content += self._opening + body + marker
        else:
            parts.calls += calls
        return ""

    def _put(self, text: str, parts: Parts) -> None:
        sink = self._states[self._name].sink
        if sink == "body":
            self._body.append(text)
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


def _overlap(text: str, markers: Mapping[str, str]) -> int:
    """The length of the longest end of the text that is the beginning of a marker."""
    return max((_overlap_of(text, marker) for marker in markers), default=0)


def _overlap_of(text: str, marker: str) -> int:
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


# --- what bodies are made of ------------------------------------------------------------------------------------------


def dump(value: Any) -> str:
    """JSON text. Raises ValueError for numbers that JSON has not."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


def call(name: Any, arguments: Any, identity: Any = None) -> Call:
    """A call with arguments as an object or its JSON text. Raises ValueError if it is none."""
    if isinstance(arguments, str):
        text, arguments = arguments.strip(), json.loads(arguments)
    else:
        text = dump(arguments)
    if not isinstance(name, str) or not name.strip() or not isinstance(arguments, dict):
        raise ValueError("no call")
    return Call(name.strip(), text, identity if isinstance(identity, str) else None)


def call_of_object(data: Any) -> Call:
    """A call of a JSON object with a name and arguments, which some call parameters."""
    arguments = data["arguments"] if "arguments" in data else data.get("parameters")
    return call(data["name"], {} if arguments is None else arguments, data.get("id"))
