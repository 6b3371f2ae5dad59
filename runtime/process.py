"""The engine in a process of its own, behind a channel with msgpack messages: the front end's side.

The front end starts the child, `python -m toolkit.runtime.child`, which inherits the other end of the channel.
Both send lists: commands one way, events the other. The child's first events say that it is ready (Stats) or
why it can't start (Error). Neither outlives the other unnoticed: the kernel kills the child when its parent ends, and a
thread of the parent waits for the child's end.

A child that dies after it was ready takes its open requests with it, and is started again. One that keeps dying is not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from concurrent.futures import Future
from pathlib import Path

import msgspec

from .channel import Channel
from .client import EngineClient
from .errors import InternalError
from .load import read_plan
from .options import EngineOptions
from .plan import Plan
from .request import Command, Event, Shutdown

CLOSE_SECONDS = 10.0
"""How long an engine that was told to stop at once may take for it before it is killed."""
CHILD = f"{__package__}.child"
RESTARTS, RESTART_SECONDS = 3, 60.0
"""An engine that dies more often than that within so many seconds stays dead: starting it again does not help."""

_log = logging.getLogger("toolkit.engine")


def spawn_engine(directory: Path, options: EngineOptions) -> ProcessEngine:
    """Start the engine of a plan. It loads while the caller goes on: `await engine.ready()` before relying on it.

    Raises UserError if the plan can't be read.
    """
    return ProcessEngine(Path(directory), read_plan(directory), options)


class ProcessEngine(EngineClient):
    """The engine in a child process (see `client.AsyncEngine`)."""

    def __init__(self, directory: Path, plan: Plan, options: EngineOptions, *, child: str = CHILD) -> None:
        """`child` names the module that is the child's program."""
        super().__init__(plan)
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Event])
        self._closing = False
        self._deaths: list[float] = []
        self._command = [sys.executable, "-P", "-m", child, "", str(os.getpid()), str(directory.absolute())]
        self._command.append(msgspec.json.encode(options).decode())
        self._start()

    def _start(self) -> None:
        """Open a channel and start a child. Raises InternalError if there can't be another process."""
        self._channel, end = Channel.pair()
        self._exit_code: int | None = None
        command = [*self._command[:4], str(end.fileno()), *self._command[5:]]
        started: Future[subprocess.Popen[bytes]] = Future()
        # To the kernel the child's parent is the thread that started it; this one lives as long as the child.
        self._watcher = threading.Thread(
            target=self._watch, args=(command, end, started), name="engine-watch", daemon=True
        )
        self._watcher.start()
        self._process = started.result()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def _watch(self, command: list[str], end: socket.socket, started: Future[subprocess.Popen[bytes]]) -> None:
        # The child finds modules where this process does. It needs no threads besides the kernels' own.
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        try:
            with end:
                process = subprocess.Popen(
                    command,
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.DEVNULL,
                    pass_fds=(end.fileno(),),
                )
        except OSError as error:
            started.set_exception(InternalError(f"can't start the engine process: {error}"))
            return
        started.set_result(process)
        self._exit_code = process.wait()
        self._call(ProcessEngine._note_exit, self)

    def _note_exit(self) -> None:
        for message in self._channel.receive():
            self._take(message)
        code = self._exit_code
        if code is None:
            return
        if self._closing:
            self._fail(InternalError("the engine is closed"))
            return
        if code < 0:
            hint = ", perhaps for lack of memory" if code == -signal.SIGKILL else ""
            death = InternalError(f"the engine process was killed by {signal.Signals(-code).name}{hint}")
        else:
            death = InternalError(f"the engine process ended with code {code}")
        now = time.monotonic()
        self._deaths = [*(each for each in self._deaths if each > now - RESTART_SECONDS), now]
        if self._state is None or self._failure is not None:
            self._fail(death)
        elif len(self._deaths) > RESTARTS:
            self._fail(InternalError(f"{death}, {len(self._deaths)} times within {RESTART_SECONDS:.0f} seconds"))
        else:
            self._restart(death)

    def _restart(self, death: InternalError) -> None:
        """End what was open, and start another child; requests that come meanwhile wait for it."""
        _log.error("%s; it is started again", death)
        self._end_requests(death)
        self._state = None
        assert self._loop is not None
        self._channel.close()
        try:
            self._start()
        except InternalError as error:
            self._fail(error)
            return
        self._channel.attach(self._loop, self._take)

    def _attach(self) -> asyncio.AbstractEventLoop:
        previous = self._loop
        loop = super()._attach()
        if loop is not previous and not self._channel.closed:
            self._channel.attach(loop, self._take)
            self._note_exit()
        return loop

    def _take(self, message: bytes) -> None:
        self._dispatch(self._decoder.decode(message))

    def _send(self, command: Command) -> None:
        if not self._channel.closed:
            self._channel.send(self._encoder.encode([command]))

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    async def close(self, drain: bool = False) -> None:
        """See `AsyncEngine`."""
        self._attach()
        if self._channel.closed:
            return
        self._closing = True
        if self._state is None:
            self.kill()
        self._send(Shutdown(drain))
        await asyncio.to_thread(self._watcher.join, None if drain else CLOSE_SECONDS)
        self.kill()
        await asyncio.to_thread(self._watcher.join)
        self._note_exit()
        self._channel.close()
