"""The program of the engine process: `python -m toolkit.runtime.child CHANNEL PARENT PLAN OPTIONS` (see `process`).

It imports little, since its start is on the way to the first token.
"""

from __future__ import annotations

import faulthandler
import gc
import os
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

import msgspec

from .channel import Channel
from .engine import Engine, open_engine
from .errors import UserError
from .loop import run_loop
from .options import EngineOptions
from .parent import check_parent, die_with
from .request import Command, Error, Event
from .stderr import patient_stderr

LINGER_SECONDS = 2.0
"""How long the last events may take to leave."""

OpenEngine = Callable[[Path, EngineOptions], Engine]


class ChannelPort:
    """The engine's end of the channel (see `loop.Port`)."""

    def __init__(self, channel: Channel, parent: int) -> None:
        self._parent = parent
        self._channel = channel
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Command])

    def receive(self, timeout: float) -> list[Command]:
        """See `loop.Port`. Ends the process if the parent is gone."""
        check_parent(self._parent)
        if timeout:
            self._channel.wait(timeout)
        self._channel.flush()
        commands: list[Command] = []
        for message in self._channel.receive():
            commands += self._decoder.decode(message)
        if self._channel.ended:
            os._exit(1)
        return commands

    def send(self, events: list[Event]) -> None:
        """See `loop.Port`."""
        self._channel.send(self._encoder.encode(events))

    def close(self) -> None:
        """Deliver what was sent, then disconnect."""
        self._channel.close(LINGER_SECONDS)


@patient_stderr()
def main(arguments: list[str], open_engine: OpenEngine = open_engine) -> int:
    """Serve until told to stop; the exit code."""
    channel, parent, directory, options = arguments
    faulthandler.enable()
    die_with(int(parent))
    for number in (signal.SIGINT, signal.SIGTERM):  # for the whole terminal or service: the parent knows what to do
        signal.signal(number, signal.SIG_IGN)
    port = ChannelPort(Channel(socket.socket(fileno=int(channel))), int(parent))
    try:
        chosen = msgspec.structs.replace(msgspec.json.decode(options, type=EngineOptions), whole_process=True)
        engine = open_engine(Path(directory), chosen)
        gc.collect()
        gc.freeze()  # what was loaded stays: later collections need not look at it
        port.send([engine.stats()])
        run_loop(engine, port)
        engine.close()
        return 0
    except UserError as error:
        port.send([Error("", str(error), user_fault=True)])
        return 2
    except Exception as error:
        traceback.print_exc()
        port.send([Error("", f"the engine failed: {error}", user_fault=False)])
        return 1
    finally:
        port.close()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
