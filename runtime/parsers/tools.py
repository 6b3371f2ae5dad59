"""Tool-call formats, each a table of states and a parser of the bodies of calls."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from .body import FAULTS, Body, Parse, Step, dump
from .core import State


@dataclass(frozen=True)
class Format:
    """How a family of models writes tool calls."""

    states: Mapping[str, State]
    parse: Parse
    start: str = "text"
    special: bool = False
    """Whether its markers are special tokens, which must then stay in the text."""


# --- calls in JSON ----------------------------------------------------------------------------------------------------


def json_calls(body: Body) -> Step[None]:
    """Objects, in a list or with commas or semicolons between."""
    listed = yield from body.take("[")
    while (yield from body.peek()) == "{":
        yield from _json_call(body)
        yield from body.take(",", ";")
    if listed:
        yield from body.expect("]")


def _json_call(body: Body) -> Step[None]:
    """An object with a name and arguments, which some call parameters, and others write as a string of JSON."""
    name, identity, text, begun = "", None, "", False
    yield from body.expect("{")
    while not (yield from body.take("}")):
        key = yield from body.value()
        yield from body.expect(":")
        if key in ("arguments", "parameters") and not begun:
            if name and (yield from body.peek()) == "{":
                yield from body.arguments(name, identity)
                begun = True
            else:
                text = yield from body.json_text()
        elif key == "name":
            name = _string((yield from body.value()))
        elif key == "id":
            identity = str((yield from body.value()))
        else:
            yield from body.json_text()
        yield from body.take(",")
    if not begun:
        body.call(name, _object(text), identity)


def _string(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError("no string")
    return value


def _object(text: str) -> str:
    """The object that arguments are, null and nothing being an empty one. Raises ValueError if they are none."""
    value = json.loads(text or "null")
    if isinstance(value, str):
        text = value.strip()
        value = json.loads(text)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise ValueError("no object")
    return text


def _mistral(body: Body) -> Step[None]:
    """A list of objects; newer models write a name, perhaps an id, and arguments."""
    if (yield from body.peek()) == "[":
        yield from json_calls(body)
        return
    name, identity = (yield from body.before("[", "{")), None
    if (yield from body.take("[CALL_ID]")):
        identity = (yield from body.before("[", "{")).strip()
    yield from body.take("[ARGS]")
    yield from body.arguments(name, identity)


def _deepseek(body: Body) -> Step[None]:
    """`function<sep>name` and a fenced block of JSON; from V3.1 on `name<sep>` and JSON."""
    name = yield from body.until("<｜tool▁sep｜>")
    if (yield from body.peek()) in ("{", ""):
        yield from body.arguments(name)
        return
    name = yield from body.until("\n")
    yield from body.expect("```json")
    yield from body.arguments(name)
    yield from body.take("```")


def _kimi(body: Body) -> Step[None]:
    identity = (yield from body.until("<|tool_call_argument_begin|>")).strip()
    yield from body.arguments(re.sub(r":\d+$", "", identity).removeprefix("functions."), identity)


# --- calls in other forms ---------------------------------------------------------------------------------------------


def _pythonic(body: Body) -> Step[None]:
    """Python calls, in a list or not, with literals as keyword arguments."""
    listed = yield from body.take("[")
    while (yield from body.peek()) not in ("", "]"):
        name, begun = (yield from body.until("(")).strip(), False
        if not re.fullmatch(r"[^\W\d][\w.]*", name):
            raise ValueError("no name")
        while not (yield from body.take(")")):
            key = (yield from body.until("=")).strip()
            if not key.isidentifier():
                raise ValueError("no keyword")
            text = yield from _python_value(body)
            try:
                value = dump(_literal(text))
            except FAULTS:
                body.text = f"{key}={text}{body.text}"  # is content
                raise
            if not begun:
                body.begin(name)
                begun = True
            body.give_key(key)
            body.give(value)
            yield from body.take(",")
        if begun:
            body.finish()
        else:
            body.call(name, "{}")
        yield from body.take(",")
    if listed:
        yield from body.expect("]")


def _python_value(body: Body) -> Step[str]:
    """The text up to the comma or bracket after a value."""
    at, depth, quote = 0, 0, ""
    while True:
        text = body.text
        while at < len(text):
            char = text[at]
            if char in "\\'\"" and len(text) < at + 3 and not body.ended:
                break  # it may be one of three quotes
            if quote:
                closed = text.startswith(quote, at)
                at += 2 if char == "\\" else len(quote) if closed else 1
                quote = "" if closed else quote
            elif char in "'\"":
                quote = char * 3 if text.startswith(char * 3, at) else char
                at += len(quote)
            elif depth == 0 and char in ",)]}":
                body.text = text[at:]
                return text[:at]
            else:
                depth += (char in "([{") - (char in ")]}")
                at += 1
        yield from body.more()


_JSON_NAMES = {"true": True, "false": False, "null": None}


def _literal(text: str) -> Any:
    """A Python literal; some models write JSON's names. Raises ValueError, SyntaxError or RecursionError."""
    if text.strip() in _JSON_NAMES:
        return _JSON_NAMES[text.strip()]
    with warnings.catch_warnings(action="ignore"):
        return ast.literal_eval(text.strip())


def _qwen_xml(body: Body) -> Step[None]:
    """`<function=name>`, and `<parameter=key>` with values as plain text in lines of their own."""
    yield from body.expect("<function=")
    name = (yield from body.until(">")).strip()
    body.begin(name)
    while not (yield from body.take("</function>")):
        if (yield from body.peek()) == "" and not body.cut:
            break
        yield from body.expect("<parameter=")
        key = (yield from body.until(">")).strip()
        yield from _skip_newline(body)
        yield from _typed(body, name, key, "</parameter>", "\n")
    body.finish()


def _skip_newline(body: Body) -> Step[None]:
    while not body.text:
        yield from body.more()
    body.text = body.text.removeprefix("\n")


def _glm(body: Body) -> Step[None]:
    """A name, then keys and values in tags."""
    while "<arg_key>" not in body.text and not body.ended:
        yield
    name, mark, rest = body.text.partition("<arg_key>")
    if (body.cut and not mark) or "<" in name or "\n" in name.strip():
        raise ValueError("no name")
    body.text = mark + rest
    body.begin(name)
    while (yield from body.take("<arg_key>")):
        key = (yield from body.until("</arg_key>")).strip()
        yield from body.expect("<arg_value>")
        yield from _typed(body, name.strip(), key, "</arg_value>")
    if body.cut:
        raise ValueError("cut off")
    body.finish()


def _typed(body: Body, name: str, key: str, mark: str, spare: str = "") -> Step[None]:
    """A value that is plain text up to a mark: JSON, unless the tool wants a string or it is no JSON."""
    if _is_string(body.schemas.get(name, {}).get(key)):
        body.give_key(key)
        body.give('"')
        yield from body.flow(mark, body.give_text, spare)
        body.give('"')
    else:
        text = yield from body.until(mark)
        body.give_key(key)
        body.give(_value(text.removesuffix(spare) if spare else text))


def _is_string(schema: Any) -> bool:
    return isinstance(schema, dict) and schema.get("type") == "string"


def _value(text: str) -> str:
    """The JSON text of a value; one that is no JSON is a string."""
    try:
        return dump(json.loads(text))
    except (ValueError, RecursionError):
        return dump(text)


_QUOTES = ("<escape>", '<|"|>')
_DEEPEST = 100


def _gemma(body: Body) -> Step[None]:
    """`call:name{key:value,…}` with bare keys, and strings between marks of their own."""
    yield from body.expect("call:")
    name = yield from body.until("{")
    body.begin(name)
    yield from _gemma_object(body, 0)


def _gemma_object(body: Body, depth: int) -> Step[None]:
    body.give("{")
    comma = ""
    while not (yield from body.take("}")):
        quote = yield from body.take(*_QUOTES)
        key = yield from body.until(quote or ":")
        if quote:
            yield from body.expect(":")
        body.give(f"{comma}{dump(key.strip())}: ")
        yield from _gemma_value(body, depth + 1)
        comma = ", "
        if not (yield from body.take(",")) and (yield from body.peek()) != "}":
            raise ValueError("no object")
    body.give("}")


def _gemma_list(body: Body, depth: int) -> Step[None]:
    body.give("[")
    comma = ""
    while not (yield from body.take("]")):
        body.give(comma)
        yield from _gemma_value(body, depth + 1)
        comma = ", "
        if not (yield from body.take(",")) and (yield from body.peek()) != "]":
            raise ValueError("no list")
    body.give("]")


def _gemma_value(body: Body, depth: int) -> Step[None]:
    if depth > _DEEPEST:
        raise ValueError("too deep")
    mark = yield from body.take(*_QUOTES, "{", "[")
    if mark == "{":
        yield from _gemma_object(body, depth)
    elif mark == "[":
        yield from _gemma_list(body, depth)
    elif mark:
        body.give('"')
        yield from body.flow(mark, body.give_text)
        body.give('"')
    else:
        body.give(_value((yield from body.before(",", "}", "]")).strip()))


# --- the formats ------------------------------------------------------------------------------------------------------


def _between(opening: str, closing: str) -> dict[str, State]:
    return {"text": State("content", {opening: "call"}), "call": State("body", {closing: "text"})}


def _sections(section: str, section_end: str, opening: str, closing: str) -> dict[str, State]:
    return {
        "text": State("content", {section: "section", opening: "call"}),
        "section": State("skip", {opening: "call", section_end: "text"}),
        "call": State("body", {closing: "section"}),
    }


FORMATS: dict[str, Format] = {
    "hermes": Format(_between("<tool_call>", "</tool_call>"), json_calls),
    "llama3_json": Format(
        {
            "start": State("content", {"{": "call", "<|python_tag|>": "call"}, "text"),
            "text": State("content", {"<|python_tag|>": "call"}),
            "call": State("body"),
        },
        json_calls,
        "start",
        special=True,
    ),
    "llama4_pythonic": Format(
        {
            "start": State("content", {"[": "call", "<|python_start|>": "call"}, "text"),
            "text": State("content", {"<|python_start|>": "call"}),
            "call": State("body", {"<|python_end|>": "text"}),
        },
        _pythonic,
        "start",
        special=True,
    ),
    "mistral": Format(
        {"text": State("content", {"[TOOL_CALLS]": "call"}), "call": State("body", {"[TOOL_CALLS]": "call"})},
        _mistral,
        special=True,
    ),
    "deepseek": Format(
        _sections("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>", "<｜tool▁call▁begin｜>", "<｜tool▁call▁end｜>"),
        _deepseek,
        special=True,
    ),
    "qwen3_xml": Format(_between("<tool_call>", "</tool_call>"), _qwen_xml),
    "glm": Format(_between("<tool_call>", "</tool_call>"), _glm),
    "kimi": Format(
        _sections(
            *("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
            *("<|tool_call_begin|>", "<|tool_call_end|>"),
        ),
        _kimi,
        special=True,
    ),
    "granite": Format(
        {
            "text": State("content", {"<|tool_call|>": "call", "<tool_call>": "call"}),
            "call": State("body", {"</tool_call>": "text"}),
        },
        json_calls,
        special=True,
    ),
    "gemma": Format(
        {
            "text": State("content", {"<start_function_call>": "call", "<|tool_call>": "call"}),
            "call": State("body", {"<end_function_call>": "text", "<tool_call|>": "text"}),
        },
        _gemma,
        special=True,
    ),
}
"""By the names that vLLM's users know."""
