"""A served plan without a model: a tokenizer of bytes, a template, and an engine that says what the test scripted."""

from __future__ import annotations

import asyncio
import codecs
import threading
from collections.abc import AsyncGenerator, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import msgspec
import uvicorn
from starlette.applications import Starlette
from unit.runtime.sample_plan import sample_plan

from toolkit.runtime.errors import InternalError, UserError
from toolkit.runtime.formats import Formats
from toolkit.runtime.output import IncrementalDecoder
from toolkit.runtime.plan import Plan
from toolkit.runtime.prompt import Prompts
from toolkit.runtime.request import (
    SLEEP_TAGS,
    Add,
    Error,
    Event,
    Finished,
    FinishReason,
    RequestMetrics,
    SleepTag,
    Stats,
    TokenLogprob,
    Tokens,
)
from toolkit.runtime.server.app import create_app
from toolkit.runtime.server.http import guarded
from toolkit.runtime.server.options import HttpOptions
from toolkit.runtime.server.run import listen
from toolkit.runtime.server.service import Service

EOS = 256


class ByteDecoder:
    """Bytes to text, piece by piece."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Sequence[int]) -> str:
        return self._decoder.decode(bytes(token for token in ids if token < EOS))

    def flush(self) -> str:
        return self._decoder.decode(b"", final=True)


class ByteTokenizer:
    """A token is a byte."""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(token for token in ids if token < EOS).decode("utf-8", "replace")

    def incremental(self, skip_special_tokens: bool = True) -> IncrementalDecoder:
        return ByteDecoder()

    def token_bytes(self, token: int) -> bytes:
        return bytes([token]) if token < EOS else b"<eos>"


class RoleTemplate:
    """`role:content` by line."""

    def render(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[dict[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **kwargs: Any,
    ) -> str:
        text = "".join(f"{message['role']}:{message['content']}\n" for message in messages)
        return (
            text + "".join(f"[{name}={value}]" for name, value in kwargs.items()) + "assistant:" * add_generation_prompt
        )


@dataclass
class FakeEngine:
    """Answers each request with the bytes of `reply`, then end of text, one token an event, as the parameters allow."""

    plan: Plan
    reply: str = "Hello, wörld!"
    error: Error | None = None
    error_after: int = 0
    dead: str = ""
    stall_after: int = -1
    """Say nothing more after so many tokens, until closed."""
    commands: list[Add] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    stats_delay: float = 0.0
    resets: int = 0
    asleep: tuple[SleepTag, ...] = ()
    profiling: bool = False
    told: set[str] = field(default_factory=set)
    """Requests told to abort."""

    async def generate(self, command: Add) -> AsyncGenerator[Event, None]:
        self.commands.append(command)
        ended = False
        try:
            async for event in self._events(command):
                ended = isinstance(event, Finished | Error)
                yield event
        finally:
            if not ended:
                self.aborted.append(command.request)

    async def _events(self, command: Add) -> AsyncGenerator[Event, None]:
        params, name = command.params, command.request
        tokens = [*self.reply.encode(), EOS]
        if params.ignore_eos:
            tokens = (tokens[:-1] * (params.max_tokens or 1))[: params.max_tokens]
        tokens = tokens[: params.max_tokens]
        for index, token in enumerate(tokens):
            await asyncio.sleep(0)
            if index == self.stall_after:
                while name not in self.told:
                    await asyncio.sleep(0.001)
                yield Finished(name, "abort", None, self._metrics(command))
                return
            if self.error is not None and index == self.error_after:
                yield self.error
                return
            logprobs = None if params.logprobs is None else [self._logprob(token, params.logprobs)]
            first = index == 0
            prompt_logprobs = self._prompt_logprobs(command) if first else None
            yield Tokens(name, [token], logprobs, prompt_logprobs, self._metrics(command) if first else None)
            if token in params.stop_token_ids:
                yield Finished(name, "stop", token, self._metrics(command))
                return
        reason: FinishReason = "stop" if tokens[-1] == EOS and not params.ignore_eos else "length"
        yield Finished(name, reason, EOS if reason == "stop" else None, self._metrics(command))

    def _logprob(self, token: int, top: int) -> TokenLogprob:
        return TokenLogprob(token, -0.5, 1, [(token + other, -0.5 - other) for other in range(top)])

    def _prompt_logprobs(self, command: Add) -> list[TokenLogprob | None] | None:
        if command.params.prompt_logprobs is None:
            return None
        return [None, *(self._logprob(token, command.params.prompt_logprobs) for token in command.prompt[1:])]

    def _metrics(self, command: Add) -> RequestMetrics:
        return RequestMetrics(queue=0.001, first_token=0.01, total=0.1, cached_tokens=len(command.prompt) // 2)

    async def stats(self) -> Stats:
        await asyncio.sleep(self.stats_delay)
        if self.dead:
            raise InternalError(self.dead)
        return Stats(0, 1, 2, 0.25, 10, 5, 0, 0, 0, 7, 0.0, asleep=self.asleep)

    async def sleep(self) -> None:
        self.asleep = SLEEP_TAGS

    async def wake_up(self, tags: Sequence[SleepTag] = SLEEP_TAGS) -> None:
        self.asleep = tuple(tag for tag in self.asleep if tag not in tags)

    async def profile(self, steps: int) -> bytes:
        if bool(steps) == self.profiling:
            raise UserError("a profile is being recorded already" if steps else "no profile is being recorded")
        self.profiling = bool(steps)
        return b"" if steps else b'{"traceEvents": []}'

    @property
    def starting(self) -> bool:
        return False

    async def reset_prefix_cache(self) -> None:
        self.resets += 1

    def abort(self, request: str) -> None:
        self.told.add(request)

    async def close(self, drain: bool = False) -> None:
        pass


def make_plan(*, text: bool = True, max_context: int = 256) -> Plan:
    """A plan whose model has a token a byte."""
    plan = sample_plan(b"library", b"weights", b"{}")
    model = msgspec.structs.replace(plan.model, name="bytes/model", vocab_size=1000, max_context=max_context)
    return msgspec.structs.replace(plan, model=model, text=plan.text if text else None, eos_token_ids=(EOS,))


class Server:
    """The application over a fake engine, and a client in the same event loop."""

    def __init__(
        self,
        *,
        text: bool = True,
        defaults: dict[str, Any] | None = None,
        formats: Formats | None = None,
        limits: dict[str, Any] | None = None,
    ) -> None:
        """`limits` are options of `Service`."""
        self.plan = make_plan(text=text)
        self.engine = FakeEngine(self.plan)
        self._limits = limits or {}
        self._defaults = defaults
        self._formats = formats
        self.service: Service
        self.app: Starlette
        self.client: httpx.AsyncClient

    def _prompts(self) -> Prompts:
        text = self.plan.text is not None
        return Prompts(
            self.plan,
            ByteTokenizer() if text else None,
            RoleTemplate() if text else None,
            self._defaults,
            self._formats,
        )

    async def __aenter__(self) -> Server:
        self.service = Service(self.plan, self.engine, self._prompts, **self._limits)
        self.service.start()
        self.app = create_app(self.service, max_body_bytes=100_000)
        transport = httpx.ASGITransport(guarded(self.app, HttpOptions()), raise_app_exceptions=False)
        self.client = httpx.AsyncClient(transport=transport, base_url="http://server")
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.client.aclose()
        await self.service.stop()


@contextmanager
def http_server(options: HttpOptions | None = None, **engine: Any) -> Iterator[tuple[str, FakeEngine]]:
    """The application on a real port, in a thread with an event loop of its own: its URL and its engine."""
    listener = listen("127.0.0.1", 0)
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Event, FakeEngine]] = Future()

    async def main() -> None:
        done = asyncio.Event()
        async with Server() as server:
            for name, value in engine.items():
                setattr(server.engine, name, value)
            app = guarded(server.app, options or HttpOptions())
            config = uvicorn.Config(app, lifespan="off", log_config=None, ws="none")
            http = uvicorn.Server(config)
            serving = asyncio.create_task(http.serve(sockets=[listener]))
            started.set_result((asyncio.get_running_loop(), done, server.engine))
            await done.wait()
            http.should_exit = True
            await serving

    thread = threading.Thread(target=asyncio.run, args=(main(),))
    thread.start()
    loop, done, fake = started.result(20)
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}", fake
    finally:
        loop.call_soon_threadsafe(done.set)
        thread.join(20)
