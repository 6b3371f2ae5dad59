"""Damage: a valid file's bytes become an input that no reader may fall over. Everything follows from the seed."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from typing import Any

_HUGE = (2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63 - 1, 2**63, 2**64 - 1)
_WORDS = (0, 1, 0x7F, 0x80, 0xFF, 0x7FFF, 0x8000, 0xFFFF, *_HUGE)
_NUMBERS: tuple[Any, ...] = (0, -1, 1, 3, 65537, 10**7, *_HUGE, -(2**63), 10**400, 0.5, -0.0, 1e308)
_NUMBERS += (float("nan"), float("inf"), float("-inf"))
_TEXTS = ("", " ", "x" * 100_000, "\ud800", "\x00", "a\nb", "{{", "(a+)+$", "../..", "/etc/passwd", "[PAD]", "é" * 9)
_BAD_UTF8 = (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80", b"\x00")


Change = Callable[[bytes, random.Random], bytes]


def damage(data: bytes, source: random.Random) -> bytes:
    """One to three random changes, of kinds that fit the data."""
    for _ in range(source.choice((1, 1, 1, 2, 3))):
        data = source.choice(_kinds(data))(data, source)
    return data


def _kinds(data: bytes) -> list[Change]:
    kinds: list[Change] = [_flip, _overwrite, _word, _cut, _drop, _repeat, _insert]
    if data[:1] in b"[{":
        kinds += [_json] * 7 + [_nest, _number]
    return kinds


def _span(data: bytes, source: random.Random) -> tuple[int, int]:
    """A random range, mostly short."""
    start = source.randrange(len(data) + 1)
    return start, min(len(data), start + source.choice((1, 2, 4, 8, 16, 64, 1024, len(data))))


def _flip(data: bytes, source: random.Random) -> bytes:
    content = bytearray(data)
    for _ in range(source.choice((1, 1, 2, 8))):
        if content:
            content[source.randrange(len(content))] ^= 1 << source.randrange(8)
    return bytes(content)


def _overwrite(data: bytes, source: random.Random) -> bytes:
    start, stop = _span(data, source)
    return data[:start] + source.randbytes(stop - start) + data[stop:]


def _word(data: bytes, source: random.Random) -> bytes:
    """A little-endian integer of a notable value."""
    width = source.choice((1, 2, 4, 8))
    start = source.randrange(len(data) + 1)
    value = source.choice(_WORDS) % (1 << 8 * width)
    return data[:start] + value.to_bytes(width, "little") + data[start + width :]


def _cut(data: bytes, source: random.Random) -> bytes:
    return data[: source.randrange(len(data) + 1)]


def _drop(data: bytes, source: random.Random) -> bytes:
    start, stop = _span(data, source)
    return data[:start] + data[stop:]


def _repeat(data: bytes, source: random.Random) -> bytes:
    start, stop = _span(data, source)
    return data[:start] + data[start:stop] * source.choice((2, 2, 3, 100)) + data[stop:]


def _insert(data: bytes, source: random.Random) -> bytes:
    start = source.randrange(len(data) + 1)
    return data[:start] + source.choice((*_BAD_UTF8, source.randbytes(source.randrange(1, 40)))) + data[start:]


# --- JSON -------------------------------------------------------------------------------------------------------------


def _nest(data: bytes, source: random.Random) -> bytes:
    """Something very deep where a value was."""
    depth = source.choice((100, 2_000, 100_000))
    opening, closing = source.choice(((b"[", b"]"), (b'{"a":', b"}")))
    places = [match.end() for match in re.finditer(rb"[:,\[] *", data)] or [0]
    at = source.choice(places)
    return data[:at] + opening * depth + b"1" + closing * source.choice((depth, 0)) + data[at:]


def _number(data: bytes, source: random.Random) -> bytes:
    """Another number where a number was."""
    places = list(re.finditer(rb"-?\d+(\.\d+)?([eE][-+]?\d+)?", data))
    if not places:
        return data
    match = source.choice(places)
    return data[: match.start()] + _text(source.choice(_NUMBERS)) + data[match.end() :]


def _json(data: bytes, source: random.Random) -> bytes:
    """A change of one value in the tree: another type, another value, gone, twice."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return _flip(data, source)
    places = list(_places(tree))
    if not places:
        return _text(_value(source))
    holder, key = source.choice(places)
    action = source.choice(("value", "value", "value", "delete", "swap", "double", "rename"))
    if action == "value":
        holder[key] = _value(source)
    elif action == "delete":
        del holder[key]
    elif action == "swap":
        other, place = source.choice(places)
        holder[key], other[place] = other[place], holder[key]
    elif action == "double":
        holder[key] = [holder[key]] * source.choice((2, 1000))
    elif isinstance(holder, dict):
        holder[source.choice((*_TEXTS, str(key) + "s"))] = holder.pop(key)
    try:
        return _text(tree)
    except (ValueError, RecursionError):  # a swap may have put a value into itself
        return _flip(data, source)


def _places(tree: Any) -> Any:
    """Every (container, key) below a value."""
    pending = [tree]
    while pending:
        holder = pending.pop()
        items = holder.items() if isinstance(holder, dict) else enumerate(holder) if isinstance(holder, list) else ()
        for key, value in items:
            yield holder, key
            pending.append(value)


def _value(source: random.Random) -> Any:
    kinds: tuple[Any, ...] = (None, True, False, *source.choices(_NUMBERS, k=2), source.choice(_TEXTS), [], {})
    value = source.choice(kinds)
    return source.choice((value, value, [value], {"a": value}))


def _text(tree: Any) -> bytes:
    return json.dumps(tree).encode()
