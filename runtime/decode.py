"""Decoding JSON that may be damaged: files that were downloaded, copied or edited."""

from __future__ import annotations

from typing import TypeVar

import msgspec

from .errors import brief

T = TypeVar("T")


def decode_json(data: bytes, kind: type[T]) -> T:
    """The value of a JSON text, strictly of a type. Raises ValueError with one line for whatever is wrong with it."""
    try:
        return msgspec.json.decode(data, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(brief(error)) from None
