"""The body of tool calls as it is written: what is certain of a call is told at once, not when the call has ended.

A parser of bodies is a generator over a `Body`. It yields where it needs more text, so it reads as a grammar does, and
what it finds does not depend on where the text was cut. Arguments in JSON are passed on as the model writes them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")
Step = Generator[None, None, T]

FAULTS = (ValueError, KeyError, TypeError, IndexError, AttributeError, SyntaxError, RecursionError, MemoryError)
"""What a parser may raise for a body that is malformed."""

Schemas = Mapping[str, Mapping[str, Any]]
"""By the name of a tool: the JSON schemas of its parameters."""

_JSON = re.compile(r'\\.|["{}\[\]]|[^\\"{}\[\]]+', re.DOTALL)
"""Tokens that matter for finding where a value ends."""


@dataclass(frozen=True)
class Call:
    """A tool call, or what a piece of text adds to one."""

    name: str
    """Empty: these are further arguments of the call before."""
    arguments: str
    """JSON text of an object, as far as the model wrote it."""
    id: str | None = None
    """If the model gave it one."""


@dataclass
class Parts:
    """What a piece of text adds to an answer."""

    content: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def __add__(self, other: Parts) -> Parts:
        joined = Parts(self.content + other.content, self.reasoning + other.reasoning, [*self.calls])
        for call in other.calls:
            joined.add_call(call)
        return joined

    def add_call(self, call: Call) -> None:
        """A new call, or more of the last one."""
        if call.name or not self.calls:
            self.calls.append(call)
        else:
            last = self.calls[-1]
            self.calls[-1] = Call(last.name, last.arguments + call.arguments, last.id)


class Body:
    """The text between the markers of a call, or of several, as far as it has come."""

    def __init__(self, parse: Parse, opening: str, schemas: Schemas) -> None:
        """`opening` is the marker before; one that is a bracket belongs to the text."""
        self.text = opening if opening in ("{", "[") else ""
        """What was not read yet."""
        self.ended = False
        self.cut = False
        """Whether it ended with the output, not by a marker."""
        self.schemas = schemas
        self._steps = self._whole(parse)
        self._parts = Parts()
        self._all = opening  # as long as no call has begun
        self._fields = 0
        self._running, self._begun = True, False

    def push(self, text: str, parts: Parts) -> None:
        """Take in text, and add to `parts` what it makes certain."""
        self.text += text
        self._all += "" if self._begun else text
        self._read(parts)

    def end(self, marker: str, parts: Parts) -> bool:
        """The marker after it has come, or with "" the end of the output; whether there was a call."""
        self.ended, self.cut = True, not marker
        self._read(parts)
        if not self._begun:
            parts.content += self._all
        return self._begun

    def _read(self, parts: Parts) -> None:
        self._parts = parts
        try:
            if self._running:
                next(self._steps)
        except (StopIteration, *FAULTS):
            self._running = False
        if self._begun and not self._running and not self.cut:
            parts.content += self.text  # what is no call any more
            self.text = ""

    def _whole(self, parse: Parse) -> Step[None]:
        yield from parse(self)
        if (yield from self.peek()):
            raise ValueError("something follows")

    # --- what parsers tell ---

    def begin(self, name: str, identity: str | None = None) -> None:
        """There is a call of this name; its arguments follow. Raises ValueError if that is no name."""
        name = name.strip()
        if not name or not name.isprintable():
            raise ValueError("no name")
        self._parts.add_call(Call(name, "", identity if identity and identity.isprintable() else None))
        self._begun, self._fields = True, 0

    def call(self, name: str, arguments: str, identity: str | None = None) -> None:
        """There is a call, whole."""
        self.begin(name, identity)
        self.give(arguments)

    def give(self, arguments: str) -> None:
        """More of the arguments' text."""
        if arguments:
            self._parts.add_call(Call("", arguments))

    def give_text(self, text: str) -> None:
        """More of the inside of a string."""
        self.give(dump(text)[1:-1])

    def give_key(self, key: str) -> None:
        """The next key of arguments that the model does not write as JSON."""
        self.give(f"{', ' if self._fields else '{'}{dump(key)}: ")
        self._fields += 1

    def finish(self) -> None:
        """The end of such arguments."""
        self.give("}" if self._fields else "{}")

    # --- what parsers read with ---

    def peek(self) -> Step[str]:
        """The next character that is no space; "" at the end."""
        while True:
            self.text = self.text.lstrip()
            if self.text or self.ended:
                return self.text[:1]
            yield

    def take(self, *marks: str) -> Step[str]:
        """The mark that comes next, after spaces, if one does; else ""."""
        yield from self.peek()
        while not self.ended and any(mark != self.text and mark.startswith(self.text) for mark in marks):
            yield
        found = max((mark for mark in marks if self.text.startswith(mark)), key=len, default="")
        self.text = self.text[len(found) :]
        return found

    def expect(self, *marks: str) -> Step[str]:
        """The mark that comes next. Raises ValueError if none does."""
        found = yield from self.take(*marks)
        if not found:
            raise ValueError(f"no {' or '.join(marks)}")
        return found

    def before(self, *marks: str) -> Step[str]:
        """The text up to the first of these marks. Raises ValueError if none comes."""
        while True:
            ends = [(at + len(mark), at) for mark in marks if (at := self.text.find(mark)) >= 0]
            if ends:
                at = min(ends)[1]
                text, self.text = self.text[:at], self.text[at:]
                return text
            yield from self.more()

    def until(self, mark: str) -> Step[str]:
        """The text up to a mark, which is passed. Raises ValueError if it does not come."""
        text = yield from self.before(mark)
        self.text = self.text[len(mark) :]
        return text

    def flow(self, mark: str, give: Callable[[str], None], spare: str = "") -> Step[None]:
        """Pass on the text up to a mark, and the mark, as it comes; `spare` is left out right before the mark."""
        while (at := self.text.find(mark)) < 0:
            held = overlap(self.text, (spare + mark, mark))
            give(self.text[: len(self.text) - held])
            self.text = self.text[len(self.text) - held :]
            yield from self.more()
        give(self.text[:at].removesuffix(spare) if spare else self.text[:at])
        self.text = self.text[at + len(mark) :]

    def more(self) -> Step[None]:
        """Wait for more text. Raises ValueError if there will be none."""
        if self.ended:
            raise ValueError("cut off")
        yield

    def json(self, give: Callable[[str], None]) -> Step[None]:
        """Pass on the text of a JSON value as it comes. Its brackets and quotes are paired, else it may be anything."""
        if (yield from self.peek()) not in ("{", "[", '"'):
            give((yield from self._scalar()))
            return
        depth, quoted = 0, False
        while True:
            end = 0
            for token in _JSON.finditer(self.text):
                end = token.end()
                if token[0] == '"':
                    quoted = not quoted
                elif not quoted:
                    depth += (token[0] in "{[") - (token[0] in "]}")
                if not depth and not quoted:
                    break
            give(self.text[:end])
            self.text = self.text[end:]
            if end and not depth and not quoted:
                return
            if self.ended:
                give(self.text)  # half an escape
                self.text = ""
            yield from self.more()

    def _scalar(self) -> Step[str]:
        while not (match := re.match(r'[^\s,;:"{}\[\]]*(?=[\s,;:"{}\[\]])', self.text)) and not self.ended:
            yield
        text = match[0] if match else self.text
        self.text = self.text[len(text) :]
        return text

    def json_text(self) -> Step[str]:
        """The text of a whole JSON value, see `json`."""
        pieces: list[str] = []
        yield from self.json(pieces.append)
        return "".join(pieces)

    def value(self) -> Step[Any]:
        """A whole JSON value. Raises ValueError if it is none."""
        return json.loads((yield from self.json_text()))

    def arguments(self, name: str, identity: str | None = None) -> Step[None]:
        """A call's arguments as a JSON object; none at all is an empty one. Raises ValueError for anything else."""
        match (yield from self.peek()):
            case "{":
                self.begin(name, identity)
                yield from self.json(self.give)
            case "" if not self.cut:
                self.call(name, "{}", identity)
            case _:
                raise ValueError("no arguments")


Parse = Callable[[Body], Step[None]]


def overlap(text: str, markers: Iterable[str]) -> int:
    """The length of the longest end of the text that is the beginning of a marker."""
    return max((_overlap_of(text, marker) for marker in markers), default=0)


def _overlap_of(text: str, marker: str) -> int:
    for length in range(min(len(text), len(marker) - 1), 0, -1):
        if text.endswith(marker[:length]):
            return length
    return 0


def dump(value: Any) -> str:
    """JSON text that is valid Unicode. Raises ValueError for numbers that JSON has not."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    return text if text.isascii() or not re.search("[\ud800-\udfff]", text) else json.dumps(value)
