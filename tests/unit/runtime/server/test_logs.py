"""The server's log: fields, formats, and what is not in it."""

from __future__ import annotations

import asyncio
import json
import logging
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest
from unit.runtime.server.fakes import Server
from unit.runtime.server.test_app import REPLY, serve

from toolkit.runtime.request import Error, RequestMetrics
from toolkit.runtime.server.http import guarded
from toolkit.runtime.server.logs import Fields, configure_logs, log_request
from toolkit.runtime.server.options import HttpOptions

BODY: dict[str, Any] = {"prompt": "a secret", "max_tokens": 5}


@dataclass
class Log:
    """What was logged since the last look."""

    capsys: pytest.CaptureFixture[str]

    def text(self) -> str:
        return self.capsys.readouterr().err

    def lines(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.text().splitlines()]


@pytest.fixture
def log(capsys: pytest.CaptureFixture[str]) -> Iterator[Log]:
    """Logging is as before afterwards."""
    root, ours = logging.getLogger(), [logging.getLogger(name) for name in ("toolkit", "toolkit.requests")]
    before = root.handlers, root.level, [each.level for each in ours]
    yield Log(capsys)
    root.handlers, level, levels = before
    root.setLevel(level)
    for each, old in zip(ours, levels, strict=True):
        each.setLevel(old)


def client(server: Server) -> httpx.AsyncClient:
    app = guarded(server.app, HttpOptions(), [log_request])
    return httpx.AsyncClient(transport=httpx.ASGITransport(app, raise_app_exceptions=False), base_url="http://server")


def test_a_request_is_one_line_with_its_figures_and_no_text(log: Log) -> None:
    configure_logs("json", "info")

    async def test(server: Server) -> None:
        times = RequestMetrics(queue=0.25, first_token=0.5, total=2.0, cached_tokens=3)
        server.engine._metrics = lambda command: times  # type: ignore[method-assign]
        async with client(server) as http:
            for path in ("/health", "/metrics"):
                await http.get(path)
            for stream in (False, True):
                await http.post("/v1/completions", json=BODY | {"stream": stream}, headers={"x-request-id": "mine"})
            await http.post("/v1/completions", json=BODY | {"n": 3})

    serve(test)
    text = log.text()
    whole, streamed, several = map(json.loads, text.splitlines())
    for each in (whole, streamed):
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", each.pop("time"))
        assert 0 <= each["e2e_seconds"] <= each["seconds"] < 60
        del each["e2e_seconds"], each["seconds"]
        assert each == {
            "level": "info",
            "logger": "toolkit.http",
            "message": "request",
            "request_id": "mine",
            "route": "POST /v1/completions",
            "status": 200,
            "prompt_tokens": 8,
            "cached_tokens": 3,
            "output_tokens": 5,
            "queue_seconds": 0.25,
            "ttft_seconds": 0.5,
            "finish_reason": "length",
        }
    assert (several["prompt_tokens"], several["output_tokens"]) == (8, 15)
    assert "secret" not in text
    assert REPLY[:5] not in text


def test_what_is_generated_in_the_background_is_told_when_it_has_ended(log: Log) -> None:
    configure_logs("json", "info")

    async def test(server: Server) -> None:
        async with client(server) as http:
            body = {"input": "hi", "background": True, "max_output_tokens": 5}
            answer = (await http.post("/v1/responses", json=body, headers={"x-request-id": "mine"})).json()
            while answer["status"] in ("queued", "in_progress"):
                await asyncio.sleep(0.01)
                answer = (await http.get(f"/v1/responses/{answer['id']}")).json()

    serve(test)
    posts = [line for line in log.lines() if line["route"] == "POST /v1/responses"]
    first, last = posts
    assert first["request_id"] == last["request_id"] == "mine"
    assert "output_tokens" not in first
    assert (last["output_tokens"], last["finish_reason"]) == (5, "length")


def test_refused_and_failed_requests(log: Log) -> None:
    configure_logs("json", "info")

    async def test(server: Server) -> None:
        async with client(server) as http:
            await http.post("/v1/completions", json={"bogus": 1})
            await http.get("/nowhere%0A%1B[31m")
            server.engine.error = Error("", "the kernel exploded", user_fault=False)
            await http.post("/v1/completions", json=BODY)

    serve(test)
    refused, missing, error, failed = log.lines()
    assert (refused["status"], "prompt_tokens" in refused) == (400, False)
    assert (missing["status"], missing["route"]) == (404, "GET /nowhere\n\x1b[31m")
    assert (error["level"], error["message"]) == ("error", "the kernel exploded")
    assert (failed["status"], failed["finish_reason"], failed["output_tokens"]) == (500, "error", 0)


def test_arrivals_are_logged_when_asked_and_prompts_at_debug_only(log: Log) -> None:
    async def test(server: Server) -> None:
        async with client(server) as http:
            await http.post("/v1/completions", json=BODY)

    configure_logs("json", "info", requests=True)
    serve(test)
    arrived, ended = log.lines()
    assert (arrived["message"], ended["message"]) == ("arrived", "request")
    assert arrived["request_id"] == ended["request_id"]
    assert arrived["params"]["max_tokens"] == 5
    assert "prompt" not in arrived
    configure_logs("json", "debug", requests=True)
    serve(test)
    shown = next(line for line in log.lines() if line["message"] == "arrived")
    assert (shown["prompt"], shown["prompt_ids"]) == ("a secret", list(b"a secret"))
    configure_logs("json", "warning")
    serve(test)
    assert log.text() == ""


def test_text_is_a_line_whatever_is_in_it(log: Log) -> None:
    configure_logs("text", "info")
    logger = logging.getLogger("toolkit.http")
    fields = Fields(route="GET /x y", id="a\nb", none=None, number=3, empty="", plain="ü")
    logger.log(logging.INFO, "two\nlines", fields)
    (line,) = log.text().splitlines()
    assert line.split(" ", 1)[1] == r'INFO    two\nlines route="GET /x y" id="a\nb" number=3 empty="" plain=ü'
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    assert re.search(r"it failed\nTraceback .*ValueError: why", log.text(), re.DOTALL)


def test_other_libraries_are_heard_when_they_warn(log: Log) -> None:
    configure_logs("json", "info")
    logging.getLogger("uvicorn.error").info("nothing")
    logging.getLogger("uvicorn.error").warning("%d%% of it", 5)
    (line,) = log.lines()
    assert (line["logger"], line["message"]) == ("uvicorn.error", "5% of it")
