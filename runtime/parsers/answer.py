"""The parser of an answer: reasoning first, then tool calls in what is left."""

from __future__ import annotations

from ..errors import UserError
from ..formats import HARMONY, Formats
from ..options import TextOptions
from . import reasoning, tools
from .body import Parts, Schemas
from .core import Machine
from .harmony import Harmony

TOOL_PARSERS = (*tools.FORMATS, HARMONY)
REASONING_PARSERS = (*reasoning.FORMATS, HARMONY)
_ALIASES = {"openai": HARMONY, "qwen": "hermes", "qwen3_coder": "qwen3_xml", "pythonic": "llama4_pythonic"}
_ALIASES |= {"openai_gptoss": HARMONY, "deepseek_v3": "deepseek", "kimi_k2": "kimi", "glm45": "glm"}


def chosen_formats(told: Formats, options: TextOptions) -> Formats:
    """What the plan tells, unless the user chose. Raises UserError for a parser that is not known."""
    return Formats(
        _chosen(options.tool_parser, TOOL_PARSERS, "tool-call") or told.tools,
        _chosen(options.reasoning_parser, REASONING_PARSERS, "reasoning") or told.reasoning,
    )


def _chosen(name: str | None, known: tuple[str, ...], kind: str) -> str | None:
    name = _ALIASES.get(name, name) if name is not None else None
    if name is not None and name not in known:
        raise UserError(f"there is no {kind} parser {name!r}: choose one of {', '.join(known)}")
    return name


def needs_special(formats: Formats, *, tools_offered: bool) -> bool:
    """Whether reading an answer needs special tokens in its text."""
    if formats.reasoning == HARMONY:
        return True
    return (
        tools_offered
        and formats.tools is not None
        and (formats.tools == HARMONY or tools.FORMATS[formats.tools].special)
    )


class AnswerParser:
    """Splits the text of one answer, as it comes, into content, reasoning and calls."""

    def __init__(self, formats: Formats, prompt: str, schemas: Schemas | None) -> None:
        self._stages: list[Machine] = []
        calls = formats.tools if schemas is not None else None
        if HARMONY in (calls, formats.reasoning):
            self._stages.append(Harmony(tools=calls == HARMONY, reasoning=formats.reasoning == HARMONY))
        if formats.reasoning in reasoning.FORMATS:
            kind = reasoning.FORMATS[formats.reasoning]
            self._stages.append(Machine(kind.states(), state=kind.start(prompt)))
        if calls in tools.FORMATS:
            syntax = tools.FORMATS[calls]
            self._stages.append(Machine(syntax.states, syntax.parse, syntax.start, schemas))

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
