"""The small HTTP client, and the commands that talk to servers, against the application on a real port."""

from __future__ import annotations

import asyncio
import io
import json
import socket
import time
from contextlib import aclosing

import pytest
from unit.runtime.server.fakes import http_server

from toolkit.cli import main
from toolkit.cli.client import Client, is_url
from toolkit.runtime.errors import UserError
from toolkit.runtime.request import Error

REPLY = "Hello, wörld!"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}


async def collect(url: str, path: str = "/v1/chat/completions") -> str:
    pieces = []
    async with aclosing(Client(url).stream(path, CHAT)) as events:
        async for event in events:
            pieces += [choice["delta"].get("content", "") for choice in event["choices"]]
    return "".join(pieces)


def test_answers_are_read() -> None:
    with http_server() as (url, _):
        assert asyncio.run(Client(url).get("/v1/models"))["data"][0]["id"] == "bytes/model"
        for spelled in (url, url + "/", url + "/v1"):
            assert asyncio.run(collect(spelled)) == REPLY


def test_refusals_are_the_users_to_read() -> None:
    with http_server() as (url, engine):
        with pytest.raises(UserError, match="404: The model 'x' does not exist"):
            asyncio.run(Client(url).get("/v1/models/x"))
        engine.error, engine.error_after = Error("", "broke", False), 2
        with pytest.raises(UserError, match="broke"):
            asyncio.run(collect(url))


def test_unreachable_servers() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(UserError, match="is the server running"):
            asyncio.run(Client(f"http://127.0.0.1:{port}").get("/v1/models"))
    with pytest.raises(UserError, match="expected a server's URL"):
        Client("http://")
    assert is_url("https://host/v1")
    assert not is_url("plans/http")


def test_a_broken_connection_is_noticed() -> None:
    async def main() -> None:
        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reader.readuntil(b"\r\n\r\n")
            writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\nda")
            writer.close()

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        with pytest.raises(UserError, match="broke"):
            await collect(f"http://127.0.0.1:{port}")
        server.close()

    asyncio.run(main())


def test_a_client_that_leaves_a_stream_aborts_within_a_second() -> None:
    async def leave(url: str) -> None:
        async with aclosing(Client(url).stream("/v1/chat/completions", CHAT)) as events:
            await anext(events)

    with http_server(stall_after=3) as (url, engine):
        asyncio.run(leave(url))
        left = time.monotonic()
        while not engine.aborted and time.monotonic() < left + 5:
            time.sleep(0.01)
        assert time.monotonic() - left < 1
        assert engine.aborted == [engine.commands[0].request]


def test_chat_with_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    with http_server() as (url, engine):
        monkeypatch.setattr("sys.stdin", io.StringIO("hi\n\nagain\n/new\nfresh\n"))
        assert main.run(["chat", url, "--system", "be kind", "--temperature", "0.5", "--max-tokens", "50"]) == 0
        assert capsys.readouterr().out == f"{REPLY}\n" * 3
        prompts = [bytes(command.prompt).decode() for command in engine.commands]
        assert prompts == [
            "system:be kind\nuser:hi\nassistant:",
            f"system:be kind\nuser:hi\nassistant:{REPLY}\nuser:again\nassistant:",
            "system:be kind\nuser:fresh\nassistant:",
        ]
        assert (engine.commands[0].params.temperature, engine.commands[0].params.max_tokens) == (0.5, 50)


@pytest.mark.parametrize(
    "benchmark", [["latency", "--runs", "2"], ["throughput", "--requests", "3"], ["serve", "--requests", "3"]]
)
def test_benchmarks_of_a_server(benchmark: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with http_server() as (url, engine):
        assert (
            main.run(["bench", *benchmark[:1], url, *benchmark[1:], "--prompt-tokens", "6", "--tokens", "5", "--json"])
            == 0
        )
        report = json.loads(capsys.readouterr().out)
        assert (report["benchmark"], report["target"]) == (benchmark[0], url)
        assert (report["requests"], report["prompt_tokens"], report["output_tokens"]) == (int(benchmark[2]), 6, 5)
        assert 0 < report["first_token"]["p50"] <= report["request"]["p99"] <= report["seconds"]
        assert all(command.params.ignore_eos for command in engine.commands)
        assert main.run(["bench", *benchmark[:1], url, *benchmark[1:], "--tokens", "5"]) == 0
        assert "tokens/s generated" in capsys.readouterr().out
