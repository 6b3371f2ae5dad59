"""How much a server lets in at once, and how long a request may take."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from itertools import cycle
from typing import Any

import httpx
import openai
import pytest
from unit.runtime.server.fakes import Server
from unit.runtime.server.test_app import CHAT, REPLY, events, post, sdk, serve
from unit.runtime.server.test_manage import started

from toolkit.runtime.output import Delta
from toolkit.runtime.server.service import merge

PROMPT = {"prompt": "a"}
DEADLINE = {"x-request-timeout": "0.05"}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/messages", "/inference/v1/generate"])
def test_beyond_the_bound_requests_are_told_when_to_come_again(path: str) -> None:
    body: dict[str, Any] = {
        "/v1/completions": PROMPT,
        "/v1/chat/completions": CHAT,
        "/v1/messages": {"model": "bytes/model", "messages": CHAT["messages"], "max_tokens": 20},
        "/inference/v1/generate": {"token_ids": [65], "sampling_params": {"max_tokens": 5}},
    }[path]

    async def test(server: Server) -> None:
        server.engine.stall_after = 1
        first = asyncio.create_task(post(server, "/v1/completions", PROMPT | {"n": 3}))
        await started(server, 3)
        refused = await server.client.post(path, json=body)
        assert refused.status_code == 429, refused.text
        assert 1 <= int(refused.headers["retry-after"]) <= 60
        kind = refused.json()["error"]["type"]
        assert kind == "rate_limit_error"
        assert len(server.engine.commands) == 3, "the refused one never reached the engine"
        await post(server, "/abort_requests", {})
        assert len((await first)["choices"]) == 3, "the one in work is unharmed"
        server.engine.stall_after = -1
        assert (await server.client.post(path, json=body)).status_code == 200

    serve(test, limits={"most_open": 3})


def test_the_sdk_comes_again() -> None:
    async def test(server: Server) -> None:
        server.engine.stall_after = 1
        first = asyncio.create_task(post(server, "/v1/completions", PROMPT))
        await started(server, 1)
        with pytest.raises(openai.RateLimitError) as caught:
            await sdk(server).completions.create(model="bytes/model", prompt="a")
        assert caught.value.code == "rate_limit_exceeded"
        await post(server, "/abort_requests", {})
        await first

    serve(test, limits={"most_open": 1})


def test_a_request_that_alone_is_more_than_the_bound_is_served() -> None:
    async def test(server: Server) -> None:
        assert len((await post(server, "/v1/completions", PROMPT | {"n": 5}))["choices"]) == 5

    serve(test, limits={"most_open": 2})


@pytest.mark.parametrize("who", ["client", "server"])
@pytest.mark.parametrize("stream", [False, True])
def test_what_takes_too_long_is_ended(who: str, stream: bool) -> None:
    async def test(server: Server) -> None:
        server.engine.stall_after = 2
        body = PROMPT | {"stream": stream, "n": 2}
        answer = await server.client.post("/v1/completions", json=body, headers=DEADLINE if who == "client" else {})
        error = events(answer)[-1]["error"] if stream else answer.json()["error"]
        assert answer.status_code == (200 if stream else 504)
        assert (error["code"], error["type"]) == ("deadline_exceeded", "timeout_error")
        assert "within 0.05 s" in error["message"]
        names = {command.request for command in server.engine.commands}
        assert names == server.engine.told, "the engine was told of all outputs"
        assert (await server.client.get("/load")).json()["server_load"] == 0
        server.engine.stall_after = -1
        assert (await post(server, "/v1/completions", PROMPT))["choices"][0]["text"] == REPLY

    serve(test, limits={"request_timeout": 0.05} if who == "server" else None)


def test_time_spent_waiting_counts() -> None:
    async def test(server: Server) -> None:
        await server.client.post("/pause")
        answer = await server.client.post("/v1/completions", json=PROMPT, headers=DEADLINE)
        assert answer.status_code == 504
        assert not server.engine.commands

    serve(test)


def test_clients_can_ask_for_less_time_only() -> None:
    async def test(server: Server) -> None:
        server.engine.stall_after = 0
        headers = {"x-request-timeout": "1000"}
        answer = await server.client.post("/v1/completions", json=PROMPT, headers=headers)
        assert "within 0.05 s" in answer.json()["error"]["message"]

    serve(test, limits={"request_timeout": 0.05})


@pytest.mark.parametrize("value", ["", "soon", "-1", "0", "nan", "inf", "1e999"])
def test_times_that_are_none_are_refused(value: str) -> None:
    async def test(server: Server) -> None:
        answer: httpx.Response = await server.client.post(
            "/v1/completions", json=PROMPT, headers={"x-request-timeout": value}
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "x-request-timeout")

    serve(test)


def test_jumps_of_the_clock_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The wall clock is set a year forth and back between any two readings: nothing ends early, late or unhealthy."""
    monkeypatch.setattr("toolkit.runtime.server.service.HEARTBEAT_SECONDS", 0.01)
    now, year = time.time(), 365 * 24 * 3600.0
    jumps = cycle([now, now + year, now - year])
    monkeypatch.setattr(time, "time", lambda: next(jumps))

    async def test(server: Server) -> None:
        answer = await server.client.post("/v1/completions", json=PROMPT, headers={"x-request-timeout": "15"})
        assert answer.json()["choices"][0]["text"] == REPLY
        await asyncio.sleep(0.05)
        assert (await server.client.get("/health")).status_code == 200
        server.engine.stall_after = 1
        began = time.monotonic()
        assert (await server.client.post("/v1/completions", json=PROMPT, headers=DEADLINE)).status_code == 504
        assert 0.05 <= time.monotonic() - began < 5

    serve(test)


def test_a_reader_that_does_not_read_holds_up_what_it_is_sent() -> None:
    """Of several outputs at once, too: a few deltas wait for it, not all that the engine makes."""

    async def test() -> None:
        made = [0] * 4

        async def output(index: int) -> AsyncGenerator[Delta, None]:
            for _ in range(1000):
                made[index] += 1
                yield Delta("x", [1])
                await asyncio.sleep(0)

        async with aclosing(merge([output(index) for index in range(4)])) as deltas:
            await anext(deltas)
            for _ in range(2000):
                await asyncio.sleep(0)
            assert sum(made) <= 10
            found = [item async for item in deltas]
        assert len(found) == 3999
        assert sum(made) == 4000

    asyncio.run(test())
