"""A connection between two processes of one server: messages over a Unix socket, each behind its length.

A stream of its own rather than ZeroMQ: that has a thread at each end, whose being woken costs more than the message.
"""

from __future__ import annotations

import select
import socket
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import asyncio

_PREFIX = 4
"""Bytes of a message's length, little-endian."""
_PIECE = 1 << 18
"""Most bytes that are read at once."""


class Channel:
    """One end. Messages queue without limit, and nothing blocks but `wait`. The other end's death is no error here."""

    def __init__(self, end: socket.socket) -> None:
        """Takes the socket over."""
        end.setblocking(False)
        end.set_inheritable(False)
        self._socket = end
        self._received = bytearray()
        self._unsent = bytearray()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.ended = False
        """Whether the other end is gone."""

    @classmethod
    def pair(cls) -> tuple[Channel, socket.socket]:
        """A channel, and the socket of its other end: for another process, and to be closed in this one."""
        ours, theirs = socket.socketpair()
        return cls(ours), theirs

    @property
    def closed(self) -> bool:
        return self._socket.fileno() < 0

    def attach(self, loop: asyncio.AbstractEventLoop, take: Callable[[bytes], None]) -> None:
        """Have the loop call `take` with each message, from now on."""
        self.detach()
        self._loop = loop

        def receive() -> None:
            for message in self.receive():
                take(message)
            if self.ended:
                loop.remove_reader(self._socket)

        loop.add_reader(self._socket, receive)
        if self._unsent:
            loop.add_writer(self._socket, self.flush)

    def detach(self) -> None:
        """End what `attach` began."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._socket)
            loop.remove_writer(self._socket)

    def send(self, message: bytes) -> None:
        """Pass a message on, now or once there is room. One for a dead end is lost."""
        data = len(message).to_bytes(_PREFIX, "little") + message
        if not self._unsent:
            sent = self._write(data)
            if sent == len(data):
                return
            data = data[sent:]
            if self._loop is not None:
                self._loop.add_writer(self._socket, self.flush)
        self._unsent += data

    def flush(self) -> None:
        """Send of what is unsent as much as there is room for."""
        if self._unsent:
            del self._unsent[: self._write(self._unsent)]
        if self._loop is not None and not self._unsent:
            self._loop.remove_writer(self._socket)

    def _write(self, data: bytes | bytearray) -> int:
        try:
            return self._socket.send(data)
        except BlockingIOError:
            return 0
        except OSError:
            return len(data)

    def receive(self) -> list[bytes]:
        """All messages that are there."""
        received = self._received
        while True:
            try:
                piece = self._socket.recv(_PIECE)
            except BlockingIOError:
                break
            except OSError:
                piece = b""
            if not piece:
                self.ended = True
                break
            received += piece
            if len(piece) < _PIECE:
                break
        messages, start = [], 0
        while (begin := start + _PREFIX) <= len(received):
            end = begin + int.from_bytes(received[start:begin], "little")
            if end > len(received):
                break
            messages.append(bytes(received[begin:end]))
            start = end
        del received[:start]
        return messages

    def wait(self, seconds: float) -> None:
        """Wait until there is something to receive, or room for what is unsent."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._unsent else 0))
        poll.poll(seconds * 1000)

    def close(self, linger: float = 0.0) -> None:
        """Disconnect. What is unsent has so many seconds to leave."""
        self.detach()
        if self._unsent and linger:
            self._socket.settimeout(linger)
            with suppress(OSError):  # nobody waits for it any more
                self._socket.sendall(self._unsent)
        self._socket.close()
