"""The program of one API process of several: `python -m toolkit.runtime.server.worker` (see `workers`)."""

from __future__ import annotations

import asyncio
import socket
import sys

import msgspec

from ..channel import Channel
from ..client import EngineClient
from ..errors import InternalError
from ..load import read_plan
from ..parent import die_with
from ..plan import Plan
from ..request import Command, Error, Event
from .run import run_service
from .workers import WorkerOptions


class RelayedEngine(EngineClient):
    """The parent's engine (see `client.AsyncEngine`)."""

    def __init__(self, plan: Plan, channel: Channel) -> None:
        super().__init__(plan)
        self._channel = channel
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Event])

    def _attach(self) -> asyncio.AbstractEventLoop:
        previous, loop = self._loop, super()._attach()
        if loop is not previous:
            self._channel.attach(loop, self._take)
        return loop

    def _take(self, message: bytes) -> None:
        self._dispatch(self._decoder.decode(message))

    def _send(self, command: Command) -> None:
        if not self._channel.closed:
            self._channel.send(self._encoder.encode([command]))

    def _take_error(self, error: Error) -> None:
        """The parent speaks of the engine only when it is dead for good."""
        self._fail(InternalError(error.message))

    async def close(self, drain: bool = False) -> None:
        """Leave the engine, which is the parent's."""
        self._channel.close()
        self._fail(InternalError("the engine is closed"))


def main() -> None:
    """Serve as standard input says, until SIGTERM or until the parent is gone."""
    told = msgspec.json.decode(sys.stdin.buffer.read(), type=WorkerOptions, dec_hook=lambda kind, value: kind(value))
    die_with(told.parent)
    engine = RelayedEngine(read_plan(told.directory), Channel(socket.socket(fileno=told.channel)))
    listener = socket.socket(fileno=told.listener)
    run_service(
        engine,
        listener,
        directory=told.directory,
        options=told.options,
        http=told.http,
        text=told.text,
        worker=told,
    )


if __name__ == "__main__":
    main()
