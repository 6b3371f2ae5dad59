"""Reasoning formats, and how an answer begins: whether the prompt has opened or closed the reasoning already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .core import State


@dataclass(frozen=True)
class ReasoningFormat:
    """How a family of models sets reasoning apart."""

    openings: tuple[str, ...]
    closings: tuple[str, ...]
    begins: bool = False
    """Whether an answer begins with reasoning even if nothing says so."""

    def states(self) -> Mapping[str, State]:
        opening = dict.fromkeys(self.openings, "reasoning")
        closing = dict.fromkeys(self.closings, "text")
        return {
            "start": State("content", opening, "text"),
            "begun": State("reasoning", opening, "reasoning"),
            "reasoning": State("reasoning", closing),
            "text": State("content"),
        }

    def start(self, prompt: str) -> str:
        """The state in which the answer to a prompt begins."""
        opened, closed = (max(map(prompt.rfind, marks)) for marks in (self.openings, self.closings))
        ends = prompt.rstrip().endswith((*self.openings, *self.closings))
        if ends:
            return "begun" if opened > closed else "text"
        return "begun" if self.begins else "start"


_THINK = ReasoningFormat(("<think>",), ("</think>",))

FORMATS: dict[str, ReasoningFormat] = {
    "qwen3": _THINK,
    "glm": _THINK,
    "deepseek_r1": ReasoningFormat(("<think>",), ("</think>",), begins=True),
    "granite": ReasoningFormat(
        ("Here is my thought process:", "Here's my thought process:"), ("Here is my response:", "Here's my response:")
    ),
}
