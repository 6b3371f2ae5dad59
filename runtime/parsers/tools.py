"""Tool-call formats, each a table of states and a function that reads the body of a call."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from .core import Call, Read, State, call, call_of_object, dump

Schemas = Mapping[str, Mapping[str, Any]]
"""By the name of a tool: the JSON schemas of its parameters."""


@dataclass(frozen=True)
class Format:
    """How a family of models writes tool calls."""

    states: Mapping[str, State]
    reader: Callable[[Schemas], Read]
    start: str = "text"
    special: bool = False
    """Whether its markers are special tokens, which must then stay in the text."""


def json_calls(schemas: Schemas) -> Read:
    """An object, or a list of them."""

    def read(body: str) -> Sequence[Call] | None:
        data = json.loads(body)
        return [call_of_object(item) for item in (data if isinstance(data, list) else [data])]

    return read


def _llama3(schemas: Schemas) -> Read:
    """Objects, one or more, with semicolons between."""

    def read(body: str) -> Sequence[Call] | None:
        text = body if body.lstrip().startswith("{") else "{" + body
        calls, decoder, text = [], json.JSONDecoder(), text.strip()
        while text:
            data, end = decoder.raw_decode(text)
            calls.append(call_of_object(data))
            text = text[end:].lstrip("; \t\r\n")
        return calls

    return read


def _pythonic(schemas: Schemas) -> Read:
    """A list of Python calls with literals as keyword arguments."""

    def read(body: str) -> Sequence[Call] | None:
        text = body.strip()
        text = text if text.startswith("[") else "[" + text
        with warnings.catch_warnings(action="ignore"):
            tree = ast.parse(text, mode="eval").body
        if not isinstance(tree, ast.List) or not tree.elts:
            return None
        return [_python_call(node) for node in tree.elts]

    return read


def _python_call(node: ast.expr) -> Call:
    if not isinstance(node, ast.Call) or node.args or not isinstance(node.func, ast.Name | ast.Attribute):
        raise ValueError("no call")
    arguments = {keyword.arg: ast.literal_eval(keyword.value) for keyword in node.keywords}
    if None in arguments:
        raise ValueError("no keyword")
    return call(ast.unparse(node.func), arguments)


def _mistral(schemas: Schemas) -> Read:
    """A list of objects; newer models write a name, perhaps an id, and arguments."""

    def read(body: str) -> Sequence[Call] | None:
        text = body.strip()
        if text.startswith(("[{", "[ {", "[\n")):
            return [call_of_object(data) for data in json.loads(text)]
        match = re.fullmatch(r"([^\[{]+)(?:\[CALL_ID\]([^\[{]+))?(?:\[ARGS\])?(\{.*)", text, re.DOTALL)
        return [call(match[1], match[3], match[2])] if match else None

    return read


def _deepseek(schemas: Schemas) -> Read:
    """`function<sep>name` and a fenced block of JSON; from V3.1 on `name<sep>` and JSON."""

    def read(body: str) -> Sequence[Call] | None:
        head, _, rest = body.partition("<｜tool▁sep｜>")
        match = re.fullmatch(r"\s*([^\n]+)\n+```json\n(.*?)\n?```\s*", rest, re.DOTALL)
        return [call(match[1], match[2]) if match else call(head, rest)]

    return read


def _kimi(schemas: Schemas) -> Read:
    def read(body: str) -> Sequence[Call] | None:
        head, _, arguments = body.partition("<|tool_call_argument_begin|>")
        identity = head.strip()
        name = re.sub(r":\d+$", "", identity).removeprefix("functions.")
        return [call(name, arguments, identity)]

    return read


def _qwen_xml(schemas: Schemas) -> Read:
    def read(body: str) -> Sequence[Call] | None:
        match = re.fullmatch(r"\s*<function=([^>\n]+)>(.*?)(?:</function>\s*)?", body, re.DOTALL)
        if not match:
            return None
        pairs = re.findall(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", match[2], re.DOTALL)
        return [call(match[1], _typed(match[1].strip(), pairs, schemas))]

    return read


def _glm(schemas: Schemas) -> Read:
    def read(body: str) -> Sequence[Call] | None:
        name, _, _ = body.partition("<arg_key>")
        pattern = r"<arg_key>(.*?)</arg_key>\s*<arg_value>(.*?)</arg_value>"
        pairs = re.findall(pattern, body, re.DOTALL)
        if "<" in name or "\n" in name.strip():
            return None
        return [call(name, _typed(name.strip(), pairs, schemas))]

    return read


def _typed(name: str, pairs: Sequence[tuple[str, str]], schemas: Schemas) -> dict[str, Any]:
    """Values written as plain text: JSON, unless the tool wants a string or they are no JSON."""
    return {key.strip(): _value(text, schemas.get(name, {}).get(key.strip())) for key, text in pairs}


def _value(text: str, schema: Any) -> Any:
    if isinstance(schema, dict) and schema.get("type") == "string":
        return text
    try:
        value = json.loads(text)
        dump(value)
    except (ValueError, RecursionError):
        return text
    return value


def _gemma(schemas: Schemas) -> Read:
    """`call:name{key:value,…}` with bare keys, and strings between marks of their own."""

    def read(body: str) -> Sequence[Call] | None:
        match = re.fullmatch(r"\s*call:([^{]+)(\{.*\})\s*", body, re.DOTALL)
        if not match:
            return None
        value, end = _gemma_value(match[2], 0)
        return [call(match[1], value)] if end == len(match[2]) else None

    return read


_QUOTES = ("<escape>", '<|"|>')


def _gemma_value(text: str, at: int) -> tuple[Any, int]:
    """The value that begins there, and where it ends."""
    for quote in _QUOTES:
        if text.startswith(quote, at):
            end = text.index(quote, at + len(quote))
            return text[at + len(quote) : end], end + len(quote)
    if text[at] == "{":
        return _gemma_object(text, at + 1)
    if text[at] == "[":
        return _gemma_list(text, at + 1)
    match = re.compile(r"[^,\]}]*").match(text, at)
    assert match is not None
    return _value(match[0].strip(), None), match.end()


def _gemma_object(text: str, at: int) -> tuple[dict[str, Any], int]:
    values: dict[str, Any] = {}
    while text[at] != "}":
        at += text[at] == ","
        colon = text.index(":", at)
        key = text[at:colon].strip()
        for quote in _QUOTES:
            key = key.removeprefix(quote).removesuffix(quote)
        values[key], at = _gemma_value(text, colon + 1)
        if text[at] not in ",}":
            raise ValueError("no object")
    return values, at + 1


def _gemma_list(text: str, at: int) -> tuple[list[Any], int]:
    values: list[Any] = []
    while text[at] != "]":
        at += text[at] == ","
        value, at = _gemma_value(text, at)
        values.append(value)
        if text[at] not in ",]":
            raise ValueError("no list")
    return values, at + 1


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
        _llama3,
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
