"""What the HTTP handlers share: the engine, the plan's text, the metrics, and the running of requests."""

from __future__ import annotations

import asyncio
import hashlib
import logging
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TYPE_CHECKING

from ..errors import InternalError, UserError
from ..output import Delta, OutputStream, TokenTexts
from ..plan import Plan
from ..prompt import Prompt, Prompts
from ..request import Add, Stats
from .errors import ApiError
from .logs import log_arrival, wants_arrivals
from .metrics import Metrics, RequestTimer
from .record import current_record

if TYPE_CHECKING:
    from ..client import AsyncEngine

logger = logging.getLogger("toolkit.server")

HEARTBEAT_SECONDS = 1.0
STALE_SECONDS = 10.0
"""An engine that has not turned its loop for so long is not healthy. A step of the largest bucket takes far less."""
_INLINE_CHARACTERS = 20_000
"""A longer text is tokenized in a thread, so that other requests' tokens flow meanwhile."""


class Service:
    """One served plan. It can be made, and take requests, while the engine and the tokenizer are still loading."""

    def __init__(self, plan: Plan, engine: AsyncEngine, open_prompts: Callable[[], Prompts]) -> None:
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
        self.gate = Gate(engine)

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
            await self.heart.stats()
            if self.heart.dead:
                raise ApiError(503, self.heart.problem) from None
            raise
        finally:
            timer.end()


class Gate:
    """What is open, by the id that its client knows, and whether more may start."""

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._emptied = asyncio.Event()
        self._open: dict[str, list[str]] = {}

    def __len__(self) -> int:
        """How many HTTP requests are being answered."""
        return len(self._open)

    @property
    def paused(self) -> bool:
        return not self._resumed.is_set()

    async def enter(self) -> None:
        """Wait while paused."""
        await self._resumed.wait()

    @contextmanager
    def track(self, identity: str, commands: Sequence[Add]) -> Iterator[None]:
        """Make the commands of one HTTP request known under its id. Raises ApiError(400) if the id is in use."""
        if identity in self._open:
            raise ApiError(400, f"The request id {identity!r} is in use.", param="request_id")
        self._open[identity] = [command.request for command in commands]
        if (record := current_record.get()) is not None:
            record.answer = identity
        try:
            yield
        finally:
            del self._open[identity]
            if not self._open:
                self._emptied.set()

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
        if self._stats is None:
            return "The engine is still loading."
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
    queue: asyncio.Queue[tuple[int, Delta | Exception | None]] = asyncio.Queue()

    async def pump(index: int, stream: AsyncGenerator[Delta, None]) -> None:
        try:
            async with aclosing(stream):
                async for delta in stream:
                    queue.put_nowait((index, delta))
            queue.put_nowait((index, None))
        except Exception as error:
            queue.put_nowait((index, error))

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
