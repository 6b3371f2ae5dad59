"""The engine as front ends see it: asynchronous, one stream of events a request.

`ThreadEngine` runs the engine loop in a thread of this process, `process.ProcessEngine` in a process of its own.
"""

from __future__ import annotations

import asyncio
import logging
import queue
import threading
import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

import msgspec

from .errors import InternalError, UserError
from .loop import run_loop
from .options import EngineOptions
from .plan import Plan
from .request import (
    SLEEP_TAGS,
    Abort,
    Add,
    Command,
    Error,
    Event,
    Finished,
    Ping,
    Profile,
    Profiled,
    ResetPrefixCache,
    Shutdown,
    Sleep,
    SleepTag,
    Stats,
    Tokens,
    WakeUp,
)

if TYPE_CHECKING:
    from .engine import Engine

STATS_PATIENCE = 0.5
"""Seconds to wait for the engine's state before answering with the last one known."""

_SLEEP_POLL = 0.02
"""Seconds between looks at whether the engine has fallen asleep, or is awake."""

_log = logging.getLogger("toolkit.engine")
T = TypeVar("T")


class AsyncEngine(Protocol):
    """An engine that runs elsewhere. Its methods belong to one event loop at a time."""

    plan: Plan

    @property
    def starting(self) -> bool:
        """Whether it is being loaded: at first, or again after it died. Requests wait meanwhile."""

    def generate(self, command: Add) -> AsyncGenerator[Event, None]:
        """The events of a request; the last is Finished or Error. Closing the generator earlier aborts the request."""

    def abort(self, request: str) -> None:
        """End a request: its events then end with Finished(reason="abort"). Does nothing if it is not open."""

    async def stats(self) -> Stats:
        """The engine's state, once it is ready. Raises InternalError if it is dead."""

    async def reset_prefix_cache(self) -> None:
        """Forget every cached prefix that no running request uses."""

    async def sleep(self) -> None:
        """End all requests and give back the memory of weights and caches. Later requests wait."""

    async def wake_up(self, tags: Sequence[SleepTag] = SLEEP_TAGS) -> None:
        """Wake parts of what sleeps; requests run once all are awake. Raises InternalError if the engine is dead."""

    async def profile(self, steps: int) -> bytes:
        """Record the next `steps` steps; with 0, end that and return the trace (see `profiler`).

        Raises UserError if it is recording already, or not.
        """

    async def close(self, drain: bool = False) -> None:
        """Stop the engine; with `drain`, once the running requests are done. Requests still open end."""


class Stream:
    """Events of one request on their way to its reader. Tokens that the reader did not fetch yet are merged."""

    def __init__(self) -> None:
        self._events: list[Event] = []
        self._waiter: asyncio.Future[None] | None = None
        self.ended = False

    def push(self, event: Event) -> None:
        """Add an event."""
        self.ended = isinstance(event, Finished | Error)
        last = self._events[-1] if self._events else None
        if isinstance(event, Tokens) and isinstance(last, Tokens):
            last.tokens.extend(event.tokens)
            if last.logprobs is not None:
                last.logprobs.extend(event.logprobs or ())
        else:
            self._events.append(event)
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def next(self) -> Event:
        """The next event, once it is there."""
        if not self._events:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
        return self._events.pop(0)


class EngineClient(ABC):
    """What both kinds of engine share: the streams of open requests, and knowing the engine's state and its end."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self._streams: dict[str, Stream] = {}
        self._aborted: set[str] = set()
        self._pings: dict[int, asyncio.Future[Stats]] = {}
        self._profiles: dict[int, asyncio.Future[Profiled]] = {}
        self._numbers = count(1)
        self._waiters: list[asyncio.Future[None]] = []
        self._state: Stats | None = None
        self._heard = 0.0
        self._failure: Exception | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    @abstractmethod
    def _send(self, command: Command) -> None:
        """Pass a command on. Never blocks, never fails: the end of the engine is noticed elsewhere."""

    @abstractmethod
    async def close(self, drain: bool = False) -> None:
        """See `AsyncEngine`."""

    # --- for front ends -----------------------------------------------------------------------------------------------

    @property
    def starting(self) -> bool:
        """See `AsyncEngine`."""
        return self._state is None and self._failure is None

    async def ready(self) -> None:
        """Wait until the engine can serve. Raises UserError or InternalError, saying why, if it can't start or died."""
        loop = self._attach()
        while self._state is None and self._failure is None:
            waiter = loop.create_future()
            self._waiters.append(waiter)
            await waiter
        if self._failure is not None:
            raise self._failure

    async def failed(self) -> Exception:
        """Wait for the engine's end: why it ended for good."""
        loop = self._attach()
        while self._failure is None:
            waiter = loop.create_future()
            self._waiters.append(waiter)
            await waiter
        return self._failure

    async def generate(self, command: Add) -> AsyncGenerator[Event, None]:
        """See `AsyncEngine`. Raises UserError if the request's id is in use."""
        self._attach()
        name = command.request
        if name in self._streams or name in self._aborted:
            raise UserError(f"request id {name!r} is in use")
        stream = self._streams[name] = Stream()
        if self._failure is None:
            self._send(command)
        else:
            stream.push(Error(name, str(self._failure), user_fault=False))
        try:
            while True:
                event = await stream.next()
                yield event
                if isinstance(event, Finished | Error):
                    return
        finally:
            self._streams.pop(name, None)
            if not stream.ended:
                self._abort(name)

    def forward(self, command: Add, stream: Stream) -> None:
        """Start a request for another process: `stream` takes its events. Once it has ended, `forget` it."""
        self._attach()
        if self._failure is None:
            self._streams[command.request] = stream
            self._send(command)
        else:
            stream.push(Error(command.request, str(self._failure), user_fault=False))

    def forget(self, request: str) -> None:
        """See `forward`."""
        self._streams.pop(request, None)

    def pass_on(self, command: Command) -> None:
        """Pass on a command of another process that has no answer."""
        self._attach()
        self._send(command)

    def abort(self, request: str) -> None:
        """See `AsyncEngine`."""
        if self._failure is None and request in self._streams:
            self._send(Abort(request))

    def _abort(self, name: str) -> None:
        """Abort a request that nobody reads any more. Its id can be used again once the engine has confirmed."""
        if self._failure is None:
            self._aborted.add(name)
            self._send(Abort(name))

    async def stats(self) -> Stats:
        """See `AsyncEngine`. During a long step this is the last state known; `last_step` says how old it is."""
        loop = self._attach()
        try:
            await self.ready()
        except UserError as error:
            raise InternalError(str(error)) from None
        number = next(self._numbers)
        answer: asyncio.Future[Stats] = loop.create_future()
        self._pings[number] = answer
        self._send(Ping(number))
        try:
            async with asyncio.timeout(STATS_PATIENCE):
                return await answer
        except TimeoutError:
            assert self._state is not None
            return msgspec.structs.replace(self._state, number=number, last_step=time.monotonic() - self._heard)
        finally:
            del self._pings[number]

    async def reset_prefix_cache(self) -> None:
        """See `AsyncEngine`."""
        self._attach()
        self._send(ResetPrefixCache())

    async def sleep(self) -> None:
        """See `AsyncEngine`."""
        self._attach()
        self._send(Sleep())
        while (await self.stats()).asleep != SLEEP_TAGS:
            await asyncio.sleep(_SLEEP_POLL)

    async def wake_up(self, tags: Sequence[SleepTag] = SLEEP_TAGS) -> None:
        """See `AsyncEngine`."""
        self._attach()
        self._send(WakeUp(tuple(tags)))
        while not set(tags).isdisjoint((await self.stats()).asleep):
            await asyncio.sleep(_SLEEP_POLL)

    async def profile(self, steps: int) -> bytes:
        """See `AsyncEngine`."""
        loop = self._attach()
        await self.ready()
        number = next(self._numbers)
        answer: asyncio.Future[Profiled] = loop.create_future()
        self._profiles[number] = answer
        self._send(Profile(number, steps))
        try:
            profiled = await answer
        finally:
            del self._profiles[number]
        if profiled.error:
            raise UserError(profiled.error)
        return profiled.trace

    # --- for the two kinds --------------------------------------------------------------------------------------------

    def _attach(self) -> asyncio.AbstractEventLoop:
        """The running loop, to which events go from now on. Raises InternalError if another one waits for some."""
        loop = asyncio.get_running_loop()
        if self._loop is not loop:
            if self._loop is not None and not self._loop.is_closed() and self._streams:
                raise InternalError("an engine was used from two event loops at once")
            self._loop = loop
            while self._streams:
                self._abort(self._streams.popitem()[0])
        return loop

    def _call(self, function: Callable[[T], None], argument: T) -> None:
        """Call a function in the event loop's thread; nobody waits for its effect if there is no loop."""
        loop = self._loop
        if loop is not None:
            with suppress(RuntimeError):  # the loop was closed
                loop.call_soon_threadsafe(function, argument)

    def _dispatch(self, events: list[Event]) -> None:
        """Take events in, in the loop's thread."""
        self._heard = time.monotonic()
        for event in events:
            if isinstance(event, Stats):
                self._take_stats(event)
            elif isinstance(event, Profiled):
                if (profile := self._profiles.get(event.number)) is not None:
                    profile.set_result(event)
            elif (stream := self._streams.get(event.request)) is not None:
                stream.push(event)
            elif isinstance(event, Error) and not event.request:
                self._take_error(event)
            elif isinstance(event, Finished | Error):
                self._aborted.discard(event.request)

    def _take_stats(self, stats: Stats) -> None:
        self._state = stats
        self._wake()
        answer = self._pings.get(stats.number)
        if answer is not None and not answer.done():
            answer.set_result(stats)

    def _take_error(self, error: Error) -> None:
        """The engine itself has a problem: before it is ready, that is why it can't start."""
        if self._state is None:
            self._fail((UserError if error.user_fault else InternalError)(error.message))
        else:
            _log.error("%s", error.message)

    def _fail(self, failure: Exception) -> None:
        """End every open request: the engine is gone. The first reason stays."""
        if self._failure is None:
            self._failure = failure
            self._end_requests(failure)

    def _end_requests(self, failure: Exception) -> None:
        for name, stream in self._streams.items():
            if not stream.ended:
                stream.push(Error(name, str(failure), user_fault=False))
        self._aborted.clear()
        answers: list[asyncio.Future[Any]] = [*self._pings.values(), *self._profiles.values()]
        for answer in answers:
            if not answer.done():
                answer.set_exception(InternalError(str(failure)))
        self._wake()

    def _wake(self) -> None:
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_result(None)
        self._waiters.clear()


class ThreadEngine(EngineClient):
    """The engine in a thread of this process. The kernels run without the interpreter's lock.

    One that is dropped, or still open when the interpreter exits, is stopped then.
    """

    def __init__(self, engine: Engine) -> None:
        """Takes the engine over, and its device with it."""
        super().__init__(engine.plan)
        self._commands: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._state = engine.stats()
        self._heard = time.monotonic()
        port = _ThreadPort(weakref.ref(self), self._commands)
        self._thread = threading.Thread(target=_run_engine, args=(engine, port), name="engine", daemon=True)
        self._thread.start()
        weakref.finalize(self, _stop_engine, self._thread, self._commands)

    @classmethod
    def open(cls, directory: Path, options: EngineOptions) -> ThreadEngine:
        """Load a plan. Raises UserError if it or an option can't be used."""
        from .engine import open_engine  # what only the engine needs is not loaded beside a `ProcessEngine`

        return cls(open_engine(directory, options))

    def _send(self, command: Command) -> None:
        self._commands.put(command)

    async def close(self, drain: bool = False) -> None:
        """See `AsyncEngine`."""
        self._attach()
        self._send(Shutdown(drain))
        await asyncio.to_thread(self._thread.join)
        self._fail(InternalError("the engine is closed"))


class _ThreadPort:
    """The engine's end of the queue to a `ThreadEngine`, which it does not keep alive (see `loop.Port`)."""

    def __init__(self, client: weakref.ref[ThreadEngine], commands: queue.SimpleQueue[Command]) -> None:
        self._client, self._commands = client, commands

    def receive(self, timeout: float) -> list[Command]:
        commands: list[Command] = []
        try:
            commands.append(self._commands.get(timeout > 0, timeout or None))
            while True:
                commands.append(self._commands.get_nowait())
        except queue.Empty:
            return commands

    def send(self, events: list[Event]) -> None:
        if (client := self._client()) is not None:
            client._call(client._dispatch, events)

    def fail(self, error: Exception) -> None:
        """The engine is dead."""
        if (client := self._client()) is not None:
            client._call(client._fail, error)


def _run_engine(engine: Engine, port: _ThreadPort) -> None:
    """What the thread does."""
    try:
        run_loop(engine, port)
    except Exception as error:
        _log.exception("the engine loop failed")
        port.fail(InternalError(f"the engine failed: {error}"))
    finally:
        engine.close()


def _stop_engine(thread: threading.Thread, commands: queue.SimpleQueue[Command]) -> None:
    commands.put(Shutdown(drain=False))
    if thread is not threading.current_thread():  # which may be the one that collects garbage
        thread.join()
