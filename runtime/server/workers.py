"""Several API processes for one engine: `toolkit serve --api-workers N`.

The parent listens, owns the engine, and passes on commands and events; its children take connections from the socket
that they inherit, and do all of HTTP and text (`worker.py`). A child that dies takes its requests with it, and is
started again.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

import msgspec

from ..channel import Channel
from ..client import Stream
from ..errors import InternalError, UserError
from ..options import EngineOptions, TextOptions
from ..process import ProcessEngine
from ..request import Abort, Add, Command, Error, Event, Finished, Ping, Profile, Profiled, Shutdown
from .options import HttpOptions

WORKER = f"{__package__}.worker"
RESTART_SECONDS = 1.0
"""Pause before a worker that died is started again."""
_log = logging.getLogger("toolkit.server")


class WorkerOptions(msgspec.Struct, frozen=True, kw_only=True):
    """All that a worker is told."""

    index: int
    parent: int
    """The parent's process id."""
    folder: Path
    """Where the sockets of all workers are."""
    directory: Path
    """The plan."""
    options: EngineOptions
    http: HttpOptions
    text: TextOptions
    listener: int
    """File descriptor of the socket that all workers accept from."""
    channel: int = -1
    """File descriptor of this worker's end of the connection to the parent."""

    def peer(self, index: int) -> Path:
        """The Unix socket at which a worker answers the others."""
        return self.folder / f"worker-{index}"


class Forward(Stream):
    """Events of one request on their way to its worker."""

    def __init__(self, worker: Worker, request: str) -> None:
        super().__init__()
        self._worker, self._request = worker, request

    def push(self, event: Event) -> None:
        """See `Stream`."""
        self.ended = isinstance(event, Finished | Error)
        self._worker.send(event)
        if self.ended:
            self._worker.ended.append(self._request)


class Worker:
    """One child, from the parent's side."""

    def __init__(self, options: WorkerOptions, engine: ProcessEngine) -> None:
        self._engine = engine
        self._channel, end = Channel.pair()
        options = msgspec.structs.replace(options, channel=end.fileno())
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder = msgspec.msgpack.Decoder(list[Command])
        self._events: list[Event] = []
        self._tasks: set[asyncio.Task[None]] = set()
        self._open: set[str] = set()
        self.ended: list[str] = []
        """Requests that ended since events were sent last."""
        self.asked = asyncio.Event()
        """Set once the child has asked for the engine's state: it is up."""
        command = [sys.executable, "-P", "-m", WORKER]
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        # In a session of its own, so that Ctrl-C in a terminal reaches the parent alone, which tells the workers.
        with end:
            inherited = (options.listener, options.channel)
            self.process = subprocess.Popen(
                command, env=environment, stdin=subprocess.PIPE, pass_fds=inherited, start_new_session=True
            )
        assert self.process.stdin is not None
        with self.process.stdin as told:  # where nobody else sees keys
            told.write(msgspec.json.encode(options, enc_hook=str))
        self._channel.attach(asyncio.get_running_loop(), self._receive)
        self._task(self._greet())

    async def _greet(self) -> None:
        """The first event says that the engine is ready, or why it is not."""
        try:
            self.send(await self._engine.stats())
        except InternalError as error:
            self.send(Error("", str(error), user_fault=False))

    def send(self, event: Event) -> None:
        """Pass an event on, with those of the same turn."""
        if not self._events:
            asyncio.get_running_loop().call_soon(self._flush)
        self._events.append(event)

    def _flush(self) -> None:
        if not self._channel.closed:
            self._channel.send(self._encoder.encode(self._events))
        self._events = []
        for name in self.ended:
            self._engine.forget(name)
            self._open.discard(name)
        self.ended.clear()

    def _receive(self, message: bytes) -> None:
        for command in self._decoder.decode(message):
            self._apply(command)

    def _apply(self, command: Command) -> None:
        match command:
            case Add():
                self._open.add(command.request)
                self._engine.forward(command, Forward(self, command.request))
            case Abort():
                self._engine.abort(command.request)
            case Ping():
                self.asked.set()
                self._task(self._answer(command))
            case Profile():
                self._task(self._profile(command))
            case Shutdown():
                pass  # the parent's own business
            case _:
                self._engine.pass_on(command)

    def _task(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, ping: Ping) -> None:
        try:
            self.send(msgspec.structs.replace(await self._engine.stats(), number=ping.number))
        except InternalError as error:
            self.send(Error("", str(error), user_fault=False))

    async def _profile(self, command: Profile) -> None:
        try:
            self.send(Profiled(command.number, await self._engine.profile(command.steps)))
        except UserError as error:
            self.send(Profiled(command.number, error=str(error)))

    def close(self) -> None:
        """The child is gone: end what it had open."""
        self._channel.close()
        for task in self._tasks:
            task.cancel()
        for name in self._open:
            self._engine.abort(name)


class Workers:
    """All children: started, watched, and told to stop."""

    def __init__(self, count: int, options: WorkerOptions, engine: ProcessEngine) -> None:
        self._options, self._engine = options, engine
        self.stopping = False
        self._signals = 0
        self._workers = [self._start(index) for index in range(count)]

    def _start(self, index: int) -> Worker:
        return Worker(msgspec.structs.replace(self._options, index=index), self._engine)

    def stop(self) -> None:
        """Tell the children to stop as the server does on a signal; told again, they stop at once."""
        self.stopping = True
        for worker in self._workers:
            if worker.process.poll() is None:
                worker.process.send_signal(signal.SIGTERM)

    async def ready(self) -> None:
        """Wait until all of the first children are up. Raises UserError or InternalError if the engine can't start."""
        await self._engine.ready()
        for worker in self._workers:
            await worker.asked.wait()

    async def watch(self) -> None:
        """Start children again that die, until all have stopped as they were told."""
        while True:
            for index, worker in enumerate(self._workers):
                if worker.process.poll() is None or self.stopping:
                    continue
                _log.error("API worker %d ended with %d; it is started again", index, worker.process.returncode)
                worker.close()
                await asyncio.sleep(RESTART_SECONDS)
                self._workers[index] = self._start(index)
            if all(worker.process.poll() is not None for worker in self._workers):
                break
            await asyncio.sleep(0.1)
        for worker in self._workers:
            worker.close()


async def run_workers(options: WorkerOptions, engine: ProcessEngine, address: str, began: float) -> None:
    """Serve with `options.http.api_workers` processes until a signal.

    Raises UserError or InternalError if the engine can't start, or dies for good.
    """
    from .logs import log_serving

    loop = asyncio.get_running_loop()
    workers = Workers(options.http.api_workers, options, engine)
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, workers.stop)
    watching = asyncio.create_task(workers.watch())
    ready = asyncio.create_task(workers.ready())
    failed = asyncio.create_task(engine.failed())
    tasks: Sequence[asyncio.Task[Any]] = (watching, ready, failed)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if ready.done() and ready.exception() is None:
            log_serving(engine.plan.model.name, address, time.monotonic() - began)
        await asyncio.wait({watching, failed}, return_when=asyncio.FIRST_COMPLETED)
        if not watching.done():
            workers.stop()
            await watching
            raise failed.result()
    finally:
        for task in tasks:
            task.cancel()
        await engine.close()


def serve_workers(engine: ProcessEngine, listener: socket.socket, address: str, began: float, **told: Any) -> None:
    """What `run.serve` does if there are several workers; `told` are the rest of `WorkerOptions`."""
    listener.setblocking(False)
    with tempfile.TemporaryDirectory(prefix="toolkit-") as folder:
        options = WorkerOptions(index=0, parent=os.getpid(), folder=Path(folder), listener=listener.fileno(), **told)
        asyncio.run(run_workers(options, engine, address, began))
