"""The parser of an answer: reasoning first, then tool calls in what is left; and which formats a model uses."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import UserError
from . import reasoning, tools
from .core import Machine, Parts
from .harmony import Harmony
from .tools import Schemas

HARMONY = "gpt-oss"
TOOL_PARSERS = (*tools.FORMATS, HARMONY)
REASONING_PARSERS = (*reasoning.FORMATS, HARMONY)
_ALIASES = {"openai": HARMONY, "qwen": "hermes", "qwen3_coder": "qwen3_xml", "pythonic": "llama4_pythonic"}
_ALIASES |= {"openai_gptoss": HARMONY, "deepseek_v3": "deepseek", "kimi_k2": "kimi", "glm45": "glm"}

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
    ("<｜Assistant｜>", "deepseek_r1"),
    ("<arg_key>", "glm"),
    ("</think>", "qwen3"),
)


@dataclass(frozen=True)
class Formats:
    """The formats that a model's answers are in, by name; None: it has none that is known."""

    tools: str | None = None
    reasoning: str | None = None

    @classmethod
    def of(cls, template: str, tool_parser: str | None = None, reasoning_parser: str | None = None) -> Formats:
        """What a chat template tells, unless the user chose. Raises UserError for a name that is not known."""
        return cls(
            _chosen(tool_parser, TOOL_PARSERS, "tool-call") or _detected(template, _TOOL_MARKS),
            _chosen(reasoning_parser, REASONING_PARSERS, "reasoning") or _detected(template, _REASONING_MARKS),
        )

    def special(self, tools_offered: bool) -> bool:
        """Whether reading an answer needs special tokens in its text."""
        if self.reasoning == HARMONY:
            return True
        return tools_offered and self.tools is not None and (self.tools == HARMONY or tools.FORMATS[self.tools].special)

    def parser(self, prompt: str, schemas: Schemas | None) -> AnswerParser:
        """A parser of one answer to a prompt; without `schemas` of tools, calls are content."""
        return AnswerParser(self, prompt, schemas)


def _detected(template: str, marks: tuple[tuple[str, str], ...]) -> str | None:
    if marks is _REASONING_MARKS and "</think>" not in template:
        marks = marks[:3]
    return next((name for mark, name in marks if mark in template), None)


def _chosen(name: str | None, known: tuple[str, ...], kind: str) -> str | None:
    name = _ALIASES.get(name, name) if name is not None else None
    if name is not None and name not in known:
        raise UserError(f"there is no {kind} parser {name!r}: choose one of {', '.join(known)}")
    return name


class AnswerParser:
    """Splits the text of one answer, as it comes, into content, reasoning and calls."""

    def __init__(self, formats: Formats, prompt: str, schemas: Schemas | None) -> None:
        self._stages: list[Machine] = []
        calls = formats.tools if schemas is not None else None
        if HARMONY in (calls, formats.reasoning):
            self._stages.append(Harmony(tools=calls == HARMONY, reasoning=formats.reasoning == HARMONY))
        if formats.reasoning in reasoning.FORMATS:
            kind = reasoning.FORMATS[formats.reasoning]
            self._stages.append(Machine(kind.states(), lambda body: None, kind.start(prompt)))
        if calls in tools.FORMATS:
            syntax = tools.FORMATS[calls]
            self._stages.append(Machine(syntax.states, syntax.reader(schemas or {}), syntax.start))

    def push(self, text: str) -> Parts:
        """What is certain after this piece."""
        parts = Parts(text)
        for stage in self._stages:
            parts = _through(stage.push(parts.content), parts)
        return parts

    def flush(self) -> Parts:
        """The rest, at the end of the answer."""
        parts = Parts()
        for stage in self._stages:
            parts = _through(stage.push(parts.content) + stage.flush(), parts)
        return parts


def _through(stage: Parts, before: Parts) -> Parts:
    """What a stage made of the content before it, with all that was no content already."""
    return Parts(stage.content, before.reasoning + stage.reasoning, before.calls + stage.calls)
