"""Special tokens in what users write are text: `<|im_start|>` in a question starts no message.

Before a conversation is rendered, the text of each special token in what users and tools say gets a seam, a character
that no text has. Where the rendered prompt is encoded, it is cut at the seams: no piece holds the whole token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

SEAM = "\ufdd0"
"""A noncharacter: Unicode reserves it for uses like this, and never for text."""
UNTRUSTED = ("user", "tool")
"""Roles whose words come from outside. What the assistant says may hold its own tokens."""


def seamed(message: dict[str, Any], special: Sequence[str]) -> dict[str, Any]:
    """The message with seams in the special tokens of its text, if it is a user's or a tool's."""
    if message.get("role") not in UNTRUSTED:
        return message
    return {**message, "content": _seamed(message.get("content"), special)}


def _seamed(content: Any, special: Sequence[str]) -> Any:
    if isinstance(content, list):
        return [
            {**part, "text": _seamed(part["text"], special)} if isinstance(part, dict) and "text" in part else part
            for part in content
        ]
    if not isinstance(content, str):
        return content
    content = content.replace(SEAM, "")
    for text in special:
        if len(text) > 1 and text in content:
            content = content.replace(text, text[0] + SEAM + text[1:])
    return content


def pieces(text: str) -> list[str]:
    """The parts of a prompt that are encoded on their own."""
    return [part for part in text.split(SEAM) if part] or [""]
