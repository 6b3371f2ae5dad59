"""What the HTTP handlers share: the engine, the plan's text, the metrics, and the running of requests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import math
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterable, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any

from ..errors import InternalError, UserError
from ..output import Delta, OutputStream, TokenTexts
from ..plan import Plan
from ..prompt import Prompt, Prompts
from ..request import Add, Stats
from .errors import ApiError
from .logs import log_arrival, wants_arrivals
from .metrics import Metrics, RequestTimer
from .picture import plan_picture
from .record import current_record
from .response_store import ResponseStore

if TYPE_CHECKING:
    from ..client import AsyncEngine

logger = logging.getLogger("toolkit.server")

HEARTBEAT_SECONDS = 1.0
STALE_SECONDS = 10.0
"""An engine that has not turned its loop for so long is not healthy. A step of the largest bucket takes far less."""
REQUEST_TIMEOUT = "x-request-timeout"
"""Header: seconds that the client gives its request."""
_COUNTED_SECONDS, _COUNTED_ENDS = 30.0, 256
"""How far back, and how many, ended requests are counted to say when there will be room."""
_INLINE_CHARACTERS = 20_000
"""A longer text is tokenized in a thread, so that other requests' tokens flow meanwhile."""


class Service:
    """One served plan. It can be made, and take requests, while the engine and the tokenizer are still loading."""

    def __init__(
        self,
        plan: Plan,
        engine: AsyncEngine,
        open_prompts: Callable[[], Prompts],
        *,
        most_open: int = 0,
        request_timeout: float = 0.0,
    ) -> None:
        """`most_open` and `request_timeout` are the gate's."""
        self.plan = plan
        self.engine = engine
        self.model = plan.model.name
        self.created = int(time.time())
        self.fingerprint = fingerprint(plan)
        self.metrics = Metrics(plan, self.model)
        self.heart = Heart(engine)
        self._open_prompts = open_prompts
        self._opening: asyncio.Task[Prompts] | None = None
        self._texts: TokenTexts | None = None
        self.gate = Gate(engine, most_open, request_timeout)
        self.responses = ResponseStore()

    def start(self) -> None:
        """Begin to read the text files and to watch the engine."""
        self._opening = asyncio.create_task(asyncio.to_thread(self._open_prompts))
        self.heart.start()

    async def stop(self) -> None:
        """End what `start` began."""
        await self.heart.stop()
        if self._opening is not None:
            await asyncio.wait({self._opening})

    async def prompts(self) -> Prompts:
        """The plan's text, once it is read. Raises UserError if its files can't be used."""
        assert self._opening is not None
        return await asyncio.shield(self._opening)

    async def token_texts(self) -> TokenTexts:
        """The names of tokens in log-probabilities."""
        if self._texts is None:
            self._texts = TokenTexts((await self.prompts()).tokenizer)
        return self._texts

    @cached_property
    def picture(self) -> dict[str, Any]:
        """What `/server_info` tells of the plan for drawing it."""
        return plan_picture(self.plan)

    def check_model(self, name: str | None) -> None:
        """Raises ApiError(404) if a request names another model."""
        if name is not None and name != self.model:
            message = f"The model {name!r} does not exist: this server has {self.model!r}."
            raise ApiError(404, message, param="model", code="model_not_found")

    async def encode(self, prompt: Prompt, *, add_special_tokens: bool) -> list[int]:
        """Token ids of a prompt."""
        prompts = await self.prompts()
        if isinstance(prompt, str) and len(prompt) > _INLINE_CHARACTERS:
            return await asyncio.to_thread(prompts.encode, prompt, add_special_tokens=add_special_tokens)
        return prompts.encode(prompt, add_special_tokens=add_special_tokens)

    async def run(self, command: Add) -> AsyncGenerator[Delta, None]:
        """The deltas of one choice; the last has a finish reason. Closing the generator aborts the request.

        Raises UserError if the engine refuses the request, InternalError or ApiError(503) if it fails or is dead.
        """
        prompts, record = await self.prompts(), current_record.get()
        stream = OutputStream(command, prompts.tokenizer)
        timer = RequestTimer(self.metrics, command)
        if record is not None:
            record.choices.append(timer)
            if wants_arrivals():
                log_arrival(record.id, command, prompts)
        try:
            async with aclosing(self.engine.generate(command)) as events:
                async for event in events:
                    delta = stream.push(event)
                    timer.delta(delta)
                    yield delta
                    if delta.finish_reason is not None:
                        return
            raise InternalError("the engine ended a request without saying why")
        except UserError:
            timer.refused()
            raise
        except InternalError:
            timer.failed()
            if not self.engine.starting:
                await self.heart.stats()
            if self.heart.dead:
                raise ApiError(503, self.heart.problem) from None
            raise
        finally:
            timer.end()
            if record is not None:
                record.end_choice(timer)


class Ticket:
    """An HTTP request that was let in."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.expired = False

    def check(self, delta: Delta) -> None:
        """Raises ApiError(504) if a delta is the last one because the request's time was up."""
        if self.expired and delta.finish_reason == "abort":
            raise _too_late(self.seconds)


class Gate:
    """What is open, by the id that its client knows, and whether more may start."""

    def __init__(self, engine: AsyncEngine, most_open: int = 0, request_timeout: float = 0.0) -> None:
        """No more start while `most_open` outputs are open, and none may take longer than `request_timeout` seconds; 0
        is no limit."""
        self._engine = engine
        self._most_open, self._timeout = most_open, request_timeout
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._emptied = asyncio.Event()
        self._open: dict[str, list[str]] = {}
        self._ends: deque[float] = deque(maxlen=_COUNTED_ENDS)

    def __len__(self) -> int:
        """How many HTTP requests are being answered."""
        return len(self._open)

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    @asynccontextmanager
    async def admit(self, identity: str, commands: Sequence[Add]) -> AsyncIterator[Ticket]:
        """Make the commands of one HTTP request known under its id, once nothing is paused.

        Raises ApiError(400) if the id is in use, ApiError(429) if too much is open, and ApiError(504) if the request's
        time is up before it starts; later its outputs are aborted then.
        """
        ticket = Ticket(self._seconds())
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ticket.seconds if ticket.seconds else None
        try:
            async with asyncio.timeout_at(deadline):
                await self._resumed.wait()
        except TimeoutError:
            raise _too_late(ticket.seconds) from None
        if identity in self._open:
            raise ApiError(400, f"The request id {identity!r} is in use.", param="request_id")
        self._check_room()
        self._open[identity] = [command.request for command in commands]
        if (record := current_record.get()) is not None:
            record.answer = identity

        def expire() -> None:
            ticket.expired = True
            self.abort([identity])

        timer = loop.call_at(deadline, expire) if deadline is not None else None
        try:
            yield ticket
        finally:
            if timer is not None:
                timer.cancel()
            del self._open[identity]
            self._ends.append(time.monotonic())
            if not self._open:
                self._emptied.set()

    def _seconds(self) -> float:
        """How long the request at hand may take: what its client says, within what the server allows; 0 is no limit."""
        record = current_record.get()
        given = None if record is None else record.headers.get(REQUEST_TIMEOUT)
        if given is None:
            return self._timeout
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < math.inf:
            raise ApiError(
                400, f"{REQUEST_TIMEOUT} must be seconds above 0, not {given[:40]!r}.", param=REQUEST_TIMEOUT
            )
        return min(seconds, self._timeout or seconds)

    def _check_room(self) -> None:
        """Raises ApiError(429) if as many outputs are open as may be, saying when one should end."""
        count = sum(map(len, self._open.values()))
        if not self._most_open or count < self._most_open:
            return
        recent = [each for each in self._ends if each > time.monotonic() - _COUNTED_SECONDS]
        wait = min(60, math.ceil(_COUNTED_SECONDS / len(recent))) if recent else 10
        message = f"The server has {count} outputs in work or waiting, which is all it takes: try again in {wait} s."
        raise ApiError(429, message, code="rate_limit_exceeded", headers={"retry-after": str(wait)})

    def abort(self, identities: Iterable[str] | None = None) -> int:
        """End requests, all by default; their answers end with the finish reason "abort". How many were open."""
        found = [self._open[name] for name in (self._open if identities is None else identities) if name in self._open]
        for names in found:
            for name in names:
                self._engine.abort(name)
        return len(found)

    async def pause(self, *, abort: bool) -> None:
        """Let nothing more start, and end what runs: at once with `abort`, else by itself."""
        self._resumed.clear()
        if abort:
            self.abort()
        else:
            self._emptied.clear()
            if self._open:
                await self._emptied.wait()

    def resume(self) -> None:
        """Let requests start, those that waited first."""
        self._resumed.set()


def _too_late(seconds: float) -> ApiError:
    return ApiError(504, f"The request was not done within {seconds:g} s.", code="deadline_exceeded")


class Heart:
    """Asks the engine for its state every second, so that `/health` answers at once also under load."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._stats: Stats | None = None
        self._seen = 0.0
        self._error: str | None = None
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        self._task = asyncio.create_task(self._beat())

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait({self._task})

    @property
    def dead(self) -> bool:
        """Whether the engine said that it failed."""
        return self._error is not None

    @property
    def problem(self) -> str:
        """Why the engine can't be used; "" if it can."""
        if self._error is not None:
            return f"The engine is dead: {self._error}"
        if self._engine.starting or self._stats is None:
            return (
                "The engine is still loading." if self._stats is None else "The engine died and is being loaded again."
            )
        age = time.monotonic() - self._seen + self._stats.last_step
        return f"The engine has not turned for {age:.0f} s." if age > STALE_SECONDS else ""

    async def stats(self) -> Stats | None:
        """The engine's state now, or as last seen if it does not answer within a second."""
        try:
            async with asyncio.timeout(1.0):
                await self._listen()
        except TimeoutError:
            pass
        return self._stats

    async def _beat(self) -> None:
        while self._error is None:
            await self._listen()
            await asyncio.sleep(HEARTBEAT_SECONDS)

    async def _listen(self) -> None:
        try:
            self._stats = await self._engine.stats()
            self._seen = time.monotonic()
        except InternalError as error:
            if self._engine.starting:
                return
            if self._error is None and self._stats is not None:  # else `run.serve` says why it can't start
                logger.error("the engine is dead: %s", error)
            self._error = str(error)


async def merge(streams: Sequence[AsyncGenerator[Delta, None]]) -> AsyncGenerator[tuple[int, Delta], None]:
    """The deltas of several choices as they come, with the choice's index."""
    if len(streams) == 1:
        async with aclosing(streams[0]) as only:
            async for delta in only:
                yield 0, delta
        return
    # Bounded, so that a reader that does not read holds up what it is sent: tokens are merged before this.
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue(len(streams))

    async def pump(index: int, stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    await queue.put((index, delta))
            await queue.put((index, None))
        except Exception as error:
            await queue.put((index, error))

    tasks = [asyncio.create_task(pump(index, stream)) for index, stream in enumerate(streams)]
    try:
        running = len(tasks)
        while running:
            index, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                running -= 1
            else:
                yield index, item
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)


def fingerprint(plan: Plan) -> str:
    """Names the backend: equal for equal weights and kernels, as `system_fingerprint` wants it."""
    parts = sorted(file.sha256 for file in (*plan.weight_files, *plan.code))
    return "fp_" + hashlib.sha256("".join(parts).encode()).hexdigest()[:10]
