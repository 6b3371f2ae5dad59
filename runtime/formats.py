"""The formats that a model writes tool calls and reasoning in, told by its chat template when it is compiled."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

HARMONY = "gpt-oss"


class Formats(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The formats that a model's answers are in, by the names of their parsers; None: it has none that is known."""

    tools: str | None = None
    reasoning: str | None = None


_TOOL_MARKS = (
    ("<|channel|>", HARMONY),
    ("<|tool_calls_section_begin|>", "kimi"),
    ("<｜tool▁calls▁begin｜>", "deepseek"),
    ("<arg_key>", "glm"),
    ("<function=", "qwen3_xml"),
    ("<start_function_call>", "gemma"),
    ("<|tool_call>", "gemma"),
    ("<|tool_call|>", "granite"),
    ("[TOOL_CALLS]", "mistral"),
    ("<|python_start|>", "llama4_pythonic"),
    ("<|python_tag|>", "llama3_json"),
    ("<tool_call>", "hermes"),
)
_REASONING_MARKS = (
    ("<|channel|>", HARMONY),
    ("Here is my thought process", "granite"),
    ("Here's my thought process", "granite"),
)
_THINK_MARKS = (("<｜Assistant｜>", "deepseek_r1"), ("<arg_key>", "glm"), ("</think>", "qwen3"))
"""Of templates with `</think>`."""


def detect_formats(template: str, special: Iterable[str] = ()) -> Formats:
    """What a chat template tells. One that shows tools to the model but no call (Llama 3.2's) leaves it to the
    tokenizer's `special` tokens what calls begin with."""
    tools = _marked(template, _TOOL_MARKS)
    if tools is None and "tools" in template:
        tools = _marked("\n".join(special), _TOOL_MARKS)
    thinks = _THINK_MARKS if "</think>" in template else ()
    return Formats(tools, _marked(template, (*_REASONING_MARKS, *thinks)))


def _marked(text: str, marks: tuple[tuple[str, str], ...]) -> str | None:
    return next((name for mark, name in marks if mark in text), None)
