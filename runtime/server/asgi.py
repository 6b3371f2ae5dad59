"""Calling an application in this process."""

from __future__ import annotations

import asyncio

from starlette.types import Message, Receive


def replayed(body: bytes) -> Receive:
    """What an application receives of a request with this body, whose client does not go away."""
    messages: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        if not messages:
            await asyncio.get_running_loop().create_future()
        return messages.pop()

    return receive
