"""SentencePiece's compiled normalization rules, checked before the library that reads them sees them.

blob := trie_bytes:u32 trie[trie_bytes] strings
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterator
from typing import Any

from ..runtime.errors import UserError


def check_charsmap(blob: bytes) -> bytes:
    """The rules again. Raises UserError if their trie does not lie inside: the library would make room for it."""
    size = int.from_bytes(blob[:4], "little")
    if len(blob) < 4 or size % 4 or size > len(blob) - 4:
        raise UserError(
            f"The tokenizer's precompiled_charsmap is damaged: it has {len(blob)} bytes, its table should have {size}."
        )
    return blob


def check_charsmaps(normalizer: Any) -> None:
    """Check all rules in the normalizer of a tokenizer.json."""
    for text in _charsmaps(normalizer):
        try:
            check_charsmap(base64.b64decode(text, validate=True))
        except (binascii.Error, ValueError):
            raise UserError("The tokenizer's precompiled_charsmap is damaged: it is no base64 text.") from None


def _charsmaps(tree: Any) -> Iterator[str]:
    pending = [tree]
    while pending:
        value = pending.pop()
        if isinstance(value, dict):
            if isinstance(text := value.get("precompiled_charsmap"), str):
                yield text
            pending += value.values()
        elif isinstance(value, list):
            pending += value
