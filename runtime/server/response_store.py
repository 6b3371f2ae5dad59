"""Responses that can be asked for again, and continued: the latest ones, in memory."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from .errors import ApiError

MOST = 1000
MOST_CHARACTERS = 64 << 20
"""Of all conversations together; a response is forgotten when newer ones need its room."""


@dataclass
class Stored:
    """A response, and the conversation it belongs to."""

    data: dict[str, Any]
    input_items: list[dict[str, Any]]
    messages: list[dict[str, Any]]
    """The conversation as chat messages, without instructions; the response's own come when it has ended."""
    job: str
    """The id under which it is in work."""
    task: asyncio.Task[None] | None = None
    """What makes it, if nobody waits for it."""
    size: int = field(default=0)


class ResponseStore:
    """Responses by id."""

    def __init__(self) -> None:
        self._found: OrderedDict[str, Stored] = OrderedDict()
        self._characters = 0

    def __getitem__(self, identity: str) -> Stored:
        """Raises ApiError(404) if there is none, or none any more."""
        stored = self._found.get(identity)
        if stored is None:
            message = f"There is no response {identity[:80]!r}: it was not stored, or newer ones have taken its place."
            raise ApiError(404, message, param="response_id", code="response_not_found")
        return stored

    def put(self, stored: Stored) -> None:
        """Keep a response, and forget the oldest that are too many."""
        identity = stored.data["id"]
        self.drop(identity)
        stored.size = sum(len(str(message)) for message in stored.messages)
        self._found[identity] = stored
        self._characters += stored.size
        while len(self._found) > 1 and (len(self._found) > MOST or self._characters > MOST_CHARACTERS):
            self.drop(next(iter(self._found)))

    def drop(self, identity: str) -> None:
        """Forget a response, if it is there."""
        stored = self._found.pop(identity, None)
        if stored is not None:
            self._characters -= stored.size
