"""The engine in a process of its own, behind a ZeroMQ socket with msgpack messages: the front end's side.

The front end binds a socket in a private folder and starts the child, `python -m toolkit.runtime.child`, which
connects. Both send lists: commands one way, events the other. The child's first events say that it is ready (Stats) or
why it can't start (Error). Neither outlives the other unnoticed: the kernel kills the child when its parent ends, and a
thread of the parent waits for the child's end.

A child that dies after it was ready takes its open requests with it, and is started again. One that keeps dying is not.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import weakref
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

import msgspec
import zmq

from .client import EngineClient
from .errors import InternalError
from .load import read_plan
from .options import EngineOptions
from .plan import Plan
from .request import Command, Event, Shutdown, Stats
from .sockets import close_socket, open_socket, readable

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
        self._unsent: list[Command] = []
        self._closing = False
        self._deaths: list[float] = []
        self._command = [sys.executable, "-P", "-m", child, "", str(os.getpid()), str(directory.absolute())]
        self._command.append(msgspec.json.encode(options).decode())
        self._start()

    def _start(self) -> None:
        """Bind a socket and start a child. Raises InternalError if there can't be another process."""
        folder = tempfile.mkdtemp(prefix="toolkit-")
        self._remove_folder = weakref.finalize(self, shutil.rmtree, folder, ignore_errors=True)
        address = f"ipc://{folder}/engine"
        self._socket = open_socket()
        self._socket.bind(address)
        self._exit_code: int | None = None
        command = [*self._command[:4], address, *self._command[5:]]
        started: Future[subprocess.Popen[bytes]] = Future()
        # To the kernel the child's parent is the thread that started it; this one lives as long as the child.
        self._watcher = threading.Thread(target=self._watch, args=(command, started), name="engine-watch", daemon=True)
        self._watcher.start()
        self._process = started.result()

    @property
    def pid(self) -> int:
        """The child's process id."""
        return self._process.pid

    def _watch(self, command: list[str], started: Future[subprocess.Popen[bytes]]) -> None:
        # The child finds modules where this process does. It needs no threads besides the kernels' own.
        path = os.pathsep.join(filter(None, sys.path))
        environment = os.environ | {"PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        try:
            process = subprocess.Popen(command, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        except OSError as error:
            started.set_exception(InternalError(f"can't start the engine process: {error}"))
            return
        started.set_result(process)
        self._exit_code = process.wait()
        self._call(ProcessEngine._note_exit, self)

    def _note_exit(self) -> None:
        self._receive()
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
        self._loop.remove_reader(self._socket)
        close_socket(self._socket)
        try:
            self._start()
        except InternalError as error:
            self._fail(error)
            return
        self._loop.add_reader(self._socket, self._receive)

    def _attach(self) -> asyncio.AbstractEventLoop:
        previous = self._loop
        loop = super()._attach()
        if loop is not previous and not self._socket.closed:
            if previous is not None and not previous.is_closed():
                previous.remove_reader(self._socket)
            loop.add_reader(self._socket, self._receive)
            self._note_exit()
        return loop

    def _receive(self) -> None:
        """Take in everything that is there: the socket only signals that something came, not that more is left."""
        while readable(self._socket):
            self._dispatch(self._decoder.decode(self._socket.recv(zmq.NOBLOCK)))

    def _take_stats(self, stats: Stats) -> None:
        if self._state is None:
            # Both ends are connected: the socket takes messages now, and its name is not needed any more.
            self._remove_folder()
            self._transmit(self._unsent)
            self._unsent.clear()
        super()._take_stats(stats)

    def _send(self, command: Command) -> None:
        if self._state is None:
            self._unsent.append(command)
        elif not self._socket.closed:
            self._transmit([command])
            self._receive()  # sending may swallow the signal for what came meanwhile

    def _transmit(self, commands: list[Command]) -> None:
        with suppress(zmq.Again):  # the child is gone, which the watcher is about to say
            self._socket.send(self._encoder.encode(commands), zmq.NOBLOCK)

    def kill(self) -> None:
        """End the process at once."""
        self._process.kill()

    async def close(self, drain: bool = False) -> None:
        """See `AsyncEngine`."""
        loop = self._attach()
        if self._socket.closed:
            return
        self._closing = True
        if self._state is None:
            self.kill()
        self._send(Shutdown(drain))
        await asyncio.to_thread(self._watcher.join, None if drain else CLOSE_SECONDS)
        self.kill()
        await asyncio.to_thread(self._watcher.join)
        self._note_exit()
        loop.remove_reader(self._socket)
        close_socket(self._socket)
        self._remove_folder()
