"""Many random requests against an engine process: refused, failed, abandoned or read slowly, in any order."""

from __future__ import annotations

import asyncio
import random
from contextlib import aclosing
from pathlib import Path

import pytest
from unit.runtime.engine_harness import alone, make_request
from unit.runtime.fake_child import FAIL_TOKEN
from unit.runtime.fake_device import NAN_TOKEN, fake_plan

from toolkit.runtime.client import AsyncEngine
from toolkit.runtime.loop import IDLE_SECONDS
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.process import ProcessEngine
from toolkit.runtime.request import Add, Error, Event, Finished, Tokens

REQUESTS = 200
CLIENTS = 24


def random_request(name: str, rng: random.Random) -> Add:
    """Mostly good requests with shared prefixes, some that must be refused or fail."""
    trunk = [3 + index % 50 for index in range(30)]
    prompt = trunk[: rng.randrange(30)] + [rng.randrange(3, 60) for _ in range(rng.randrange(1, 20))]
    kind = rng.random()
    if kind < 0.05:
        prompt = rng.choice([[], [64], [5] * 64])
    elif kind < 0.10:
        prompt.append(NAN_TOKEN)
    elif kind < 0.12:
        prompt = [FAIL_TOKEN]
    return make_request(
        name,
        prompt,
        priority=rng.randrange(3),
        salt=rng.choice(["", "a"]),
        max_tokens=rng.randrange(1, 20),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.randrange(2**64),
        logprobs=rng.choice([None, 2]),
        prompt_logprobs=rng.choice([None, None, 1, -1]),
    )


async def read(engine: AsyncEngine, request: Add, rng: random.Random) -> list[Event] | None:
    """The request's events; None if the client left before they ended."""
    leaves_after = rng.choice([None, None, None, 0, 1, 5])
    slow = rng.random() < 0.2
    events: list[Event] = []
    async with aclosing(engine.generate(request)) as stream:
        try:
            async with asyncio.timeout(None if leaves_after != 0 else rng.random() * 0.02):
                async for event in stream:
                    events.append(event)
                    if slow:
                        await asyncio.sleep(0.01)
                    if leaves_after and len(events) > leaves_after:
                        return None
        except TimeoutError:
            return None
    return events


def check(request: Add, events: list[Event]) -> None:
    """What ended must have ended rightly."""
    assert all(isinstance(event, Tokens) for event in events[:-1])
    last = events[-1]
    if isinstance(last, Error):
        bad = not request.prompt or len(request.prompt) >= 64 or max(request.prompt) > 63
        assert last.user_fault == bad
        return
    assert isinstance(last, Finished)
    expected = alone(request)
    assert [token for event in events[:-1] if isinstance(event, Tokens) for token in event.tokens] == expected.tokens


def test_soak(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> None:
        rng = random.Random(1)
        engine = ProcessEngine(Path("quick"), fake_plan(), EngineOptions(), child="unit.runtime.fake_child")
        finished: list[tuple[Add, list[Event]]] = []
        left = iter(range(REQUESTS))

        async def client() -> None:
            for number in left:
                request = random_request(str(number), rng)
                events = await read(engine, request, rng)
                if events is not None:
                    finished.append((request, events))

        await asyncio.gather(*(client() for _ in range(CLIENTS)))
        async with asyncio.timeout(5.0):
            while (stats := await engine.stats()).running or stats.waiting or stats.kv_usage:
                await asyncio.sleep(0.01)
        assert len(finished) > REQUESTS / 2
        for request, events in finished:
            check(request, events)
        await asyncio.sleep(2 * IDLE_SECONDS)  # the engine audits its pages when it is idle
        await engine.close()

    asyncio.run(body())
    assert not caplog.records
