"""What one of several API processes asks of the others, so that each answers for all.

Every worker answers its peers over a Unix socket with the same application. Requests that are about all of the server's
work (`/metrics`, `/load`, `/pause`, ...) are passed to every peer and the answers are summed up; stored responses are
all the first worker's.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import Any

import msgspec
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .asgi import replayed
from .errors import route_path

HOME = "/v1/responses"
"""Routes under this are the first worker's, who has what is stored."""
FROM_PEER = "x-toolkit-peer"
"""Marks requests of peers: they are about the worker itself."""


def _sum_json(own: bytes, others: Sequence[bytes]) -> bytes:
    """Numbers that count a worker's own work are added up; what is said of the engine is the same from all."""
    answer: dict[str, Any] = msgspec.json.decode(own)
    for name in {"server_load", "aborted"} & answer.keys():
        answer[name] += sum(msgspec.json.decode(other).get(name, 0) for other in others)
    return msgspec.json.encode(answer)


def _sum_metrics(own: bytes, others: Sequence[bytes]) -> bytes:
    """Prometheus texts: samples of what workers count are added up. Peers say nothing of the engine."""
    totals: dict[bytes, float] = {}
    for line in (line for text in others for line in text.splitlines() if not line.startswith(b"#")):
        name, _, value = line.rpartition(b" ")
        totals[name] = totals.get(name, 0) + float(value)
    lines = []
    for line in own.splitlines():
        name, _, value = line.rpartition(b" ")
        lines.append(
            line if line.startswith(b"#") or name not in totals else b"%s %s" % (name, _plus(value, totals[name]))
        )
    return b"\n".join(lines) + b"\n"


def _plus(value: bytes, more: float) -> bytes:
    total = float(value) + more
    return b"%d" % total if b"." not in value and b"e" not in value and total == int(total) else repr(total).encode()


Join = Callable[[bytes, Sequence[bytes]], bytes]
SHARED: dict[str, tuple[str, Join]] = {
    "/metrics": ("/metrics", _sum_metrics),
    "/load": ("/load", _sum_json),
    "/abort_requests": ("/abort_requests", _sum_json),
    "/pause": ("/pause", _sum_json),
    "/resume": ("/resume", _sum_json),
    "/sleep": ("/pause", _sum_json),
    "/wake_up": ("/resume", _sum_json),
}
"""Routes about the whole server: what the peers are asked first, and how the answers become one."""


class Peers:
    """An application that is one of several."""

    def __init__(self, app: ASGIApp, index: int, sockets: Sequence[Path]) -> None:
        self._app, self._index, self._sockets = app, index, sockets

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = route_path(scope)
        asked_by_peer = any(name == FROM_PEER.encode() for name, _ in scope["headers"])
        if asked_by_peer and scope.get("client"):
            asked_by_peer = False  # clients at peers' sockets have no address; others only pretend
        if asked_by_peer:
            await self._app(scope, receive, send)
        elif path in SHARED:
            await self._all(scope, receive, send)
        elif path.startswith(HOME) and self._index != 0:
            await self._home(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    async def _all(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Ask all others, then this worker."""
        path, join = SHARED[route_path(scope)]
        body = await _whole(receive)
        others = [each for index, each in enumerate(self._sockets) if index != self._index]
        answers = await asyncio.gather(*(ask_peer(each, {**scope, "path": path}, body) for each in others))
        start: Message = {}
        own = b""

        async def collect(message: Message) -> None:
            nonlocal own
            if message["type"] == "http.response.start":
                start.update(message)
            else:
                own += message.get("body", b"")

        await self._app(scope, replayed(body), collect)
        if start["status"] == 200:
            own = join(own, [text for status, text in answers if status == 200])
        headers = [(name, value) for name, value in start["headers"] if name != b"content-length"]
        await send({**start, "headers": [*headers, (b"content-length", b"%d" % len(own))]})
        await send({"type": "http.response.body", "body": own})

    async def _home(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the first worker answer, piece by piece; it notices if the client goes away."""
        body = await _whole(receive)

        async def pipe() -> None:
            async with aclosing(request_peer(self._sockets[0], scope, body)) as pieces:
                async for piece in pieces:
                    await send(piece)
            await send({"type": "http.response.body", "body": b""})

        piping = asyncio.create_task(pipe())
        leaving = asyncio.create_task(_gone(receive))
        try:
            await asyncio.wait({piping, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if piping.done():
                piping.result()
        finally:
            piping.cancel()
            leaving.cancel()


async def _whole(receive: Receive) -> bytes:
    body = bytearray()
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            return bytes(body)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def ask_peer(path: Path, scope: Scope, body: bytes) -> tuple[int, bytes]:
    """Status and body of a peer's answer; (503, b"") if it is down."""
    status, text = 503, b""
    try:
        async with aclosing(request_peer(path, scope, body)) as messages:
            async for message in messages:
                status = message.get("status", status)
                text += message.get("body", b"")
    except (OSError, EOFError):
        return 503, b""
    return status, text


async def request_peer(path: Path, scope: Scope, body: bytes) -> AsyncGenerator[Message, None]:
    """Pass a request on; the answer as ASGI messages."""
    reader, writer = await asyncio.open_unix_connection(str(path))
    try:
        query = b"?" + scope["query_string"] if scope["query_string"] else b""
        kept = [
            (name, value)
            for name, value in scope["headers"]
            if name not in (b"connection", b"content-length", b"transfer-encoding", FROM_PEER.encode())
        ]
        kept += [(b"connection", b"close"), (b"content-length", b"%d" % len(body)), (FROM_PEER.encode(), b"1")]
        lines = [b"%s %s%s HTTP/1.1" % (scope["method"].encode(), scope["path"].encode(), query)]
        lines += [b"%s: %s" % pair for pair in kept]
        writer.write(b"\r\n".join(lines) + b"\r\n\r\n" + body)
        first, *rest = (await reader.readuntil(b"\r\n\r\n"))[:-4].split(b"\r\n")
        headers = [(name.strip().lower(), value.strip()) for name, _, value in (line.partition(b":") for line in rest)]
        chunked = (b"transfer-encoding", b"chunked") in headers
        hop = {b"transfer-encoding", b"connection", b"date", b"server"}
        headers = [pair for pair in headers if pair[0] not in hop]
        yield {"type": "http.response.start", "status": int(first.split()[1]), "headers": headers}
        if chunked:
            while size := int(await reader.readuntil(b"\r\n"), 16):
                yield {
                    "type": "http.response.body",
                    "body": (await reader.readexactly(size + 2))[:-2],
                    "more_body": True,
                }
        else:
            while piece := await reader.read(1 << 16):
                yield {"type": "http.response.body", "body": piece, "more_body": True}
    finally:
        writer.close()
