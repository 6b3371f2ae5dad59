"""Texts as windows of tokens, on which models are measured and weights are calibrated."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from ..runtime.errors import UserError


def read_text(path: Path) -> str:
    """A text file. Raises UserError if it can't be read."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UserError(f"can't read {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UserError(f"{path} is not a text file in UTF-8") from None


def cut(tokens: Sequence[int], window: int, bos: int | None) -> Iterator[list[int]]:
    """Windows of at most so many tokens, and at least 2; each begins with the begin token, if there is one."""
    first = [] if bos is None else [bos]
    step = window - len(first)
    for start in range(0, len(tokens), step):
        part = first + list(tokens[start : start + step])
        if len(part) > 1:
            yield part
