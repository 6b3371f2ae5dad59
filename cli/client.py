"""A small client of the OpenAI API, for `chat URL` and `bench URL`: the base install has no HTTP client."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any
from urllib.parse import urlsplit

import msgspec

from ..runtime.errors import UserError

_PORTS = {"http": 80, "https": 443}


def is_url(text: str) -> bool:
    """Whether a command's argument is a server rather than a plan."""
    return text.startswith(("http://", "https://"))


class Client:
    """Asks one server, over a connection a request. Its methods raise UserError if it can't be reached or refuses."""

    def __init__(self, url: str, api_key: str | None = None) -> None:
        """`url` may end in /v1."""
        parts = urlsplit(url)
        if parts.scheme not in _PORTS or not parts.hostname:
            raise UserError(f"expected a server's URL such as http://127.0.0.1:8000, found {url!r}")
        self._url = url
        self._host = parts.hostname
        self._port = parts.port or _PORTS[parts.scheme]
        self._tls = parts.scheme == "https"
        self._path = parts.path.rstrip("/").removesuffix("/v1")
        self._headers = f"Host: {parts.netloc}\r\nConnection: close\r\n"
        if api_key:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def get(self, path: str) -> Any:
        """JSON data of a path."""
        async with aclosing(self._request("GET", path, b"")) as pieces:
            return msgspec.json.decode(b"".join([piece async for piece in pieces]))

    async def stream(self, path: str, body: dict[str, Any]) -> AsyncGenerator[dict[str, Any], None]:
        """The events of a streamed answer."""
        buffer = b""
        async with aclosing(self._request("POST", path, msgspec.json.encode(body | {"stream": True}))) as pieces:
            async for piece in pieces:
                *lines, buffer = (buffer + piece).split(b"\n")
                for line in lines:
                    if line.startswith(b"data:") and line[5:].strip() != b"[DONE]":
                        data: dict[str, Any] = msgspec.json.decode(line[5:])
                        if "error" in data:
                            raise UserError(f"{self._url} failed: {data['error'].get('message')}")
                        yield data

    async def _request(self, method: str, path: str, body: bytes) -> AsyncGenerator[bytes, None]:
        """The pieces of an answer's body, as they arrive."""
        try:
            reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls or None)
        except OSError as error:
            raise UserError(f"can't reach {self._url}: {error.strerror or error}; is the server running?") from None
        try:
            kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
            writer.write(f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}{kind}\r\n".encode() + body)
            status, headers = await _read_head(reader)
            pieces = _read_body(reader, headers)
            if status != 200:
                raise UserError(f"{self._url} answered {status}: {_message([piece async for piece in pieces])}")
            async for piece in pieces:
                yield piece
        except (OSError, EOFError, ValueError) as error:
            raise UserError(f"the connection to {self._url} broke: {error or type(error).__name__}") from None
        finally:
            writer.close()


async def _read_head(reader: asyncio.StreamReader) -> tuple[int, dict[str, str]]:
    lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
    headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines[1:])}
    return int(lines[0].split(" ", 2)[1]), headers


async def _read_body(reader: asyncio.StreamReader, headers: dict[str, str]) -> AsyncGenerator[bytes, None]:
    if headers.get("transfer-encoding", "").lower() == "chunked":
        while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
            yield (await reader.readexactly(size + 2))[:-2]
    elif "content-length" in headers:
        yield await reader.readexactly(int(headers["content-length"]))
    else:
        while piece := await reader.read(1 << 16):
            yield piece


def _message(pieces: list[bytes]) -> str:
    """What an error answer says."""
    body = b"".join(pieces)
    try:
        return str(msgspec.json.decode(body)["error"]["message"])
    except (msgspec.DecodeError, KeyError, TypeError):
        return body[:200].decode("utf-8", "replace")
