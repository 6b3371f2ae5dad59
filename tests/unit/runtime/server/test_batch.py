"""Files of requests: what becomes of each line, and how a run continues another."""

from __future__ import annotations

import asyncio
import fcntl
import json
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from unit.runtime.server.fakes import Server

from toolkit.runtime.errors import InternalError, UserError
from toolkit.runtime.request import Error
from toolkit.runtime.server.app import create_app
from toolkit.runtime.server.batch import Batch, Tally
from toolkit.runtime.server.http import guarded
from toolkit.runtime.server.options import HttpOptions

CHAT = "/v1/chat/completions"


@pytest.fixture
def batch(tmp_path: Path) -> Batch:
    return Batch(tmp_path / "in.jsonl", tmp_path / "out.jsonl")


def chat(name: str, **fields: Any) -> dict[str, Any]:
    body = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, **fields}
    return {"custom_id": name, "method": "POST", "url": CHAT, "body": body}


def write(batch: Batch, *lines: dict[str, Any] | str) -> None:
    batch.source.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))


def run(batch: Batch, *, concurrency: int = 4, dead: Iterator[str] | None = None, **engine: Any) -> list[str]:
    """Run a batch; the requests that reached the engine, and through it a new tally."""
    batch.tally = Tally()

    async def main() -> list[str]:
        async with Server() as server:
            for name, value in engine.items():
                setattr(server.engine, name, value)
            app = guarded(create_app(server.service), HttpOptions())
            alive = (lambda: next(dead)) if dead else (lambda: "")
            await batch.run(app, concurrency=concurrency, alive=alive, progress=lambda tally: None)
            return [command.request for command in server.engine.commands]

    return asyncio.run(main())


def results(batch: Batch) -> dict[str | None, dict[str, Any]]:
    lines = batch.output.read_text().splitlines()
    found = {line["custom_id"]: line for line in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def test_every_endpoint_answers_as_over_http(batch: Batch) -> None:
    completion = {"custom_id": "text", "method": "POST", "url": "/v1/completions", "body": {"prompt": "x"}}
    write(batch, chat("chat"), completion)
    run(batch)
    found = results(batch)
    assert found["chat"]["response"]["status_code"] == 200
    assert found["chat"]["response"]["body"]["choices"][0]["message"]["content"] == "Hello"
    assert found["text"]["response"]["body"]["object"] == "text_completion"
    assert len({line["response"]["request_id"] for line in found.values()}) == 2
    assert len({line["id"] for line in found.values()}) == 2
    assert batch.tally == Tally(answered=2)


def test_a_wrong_line_harms_no_other(batch: Batch) -> None:
    wrong: dict[str, tuple[dict[str, Any], str]] = {
        "field": (chat("field", store=True), "store is not supported"),
        "model": (chat("model", model="other"), "does not exist"),
        "method": (chat("method") | {"method": "GET"}, "method must be POST"),
        "route": (chat("route") | {"url": "/v1/nothing"}, "Not Found"),
        "outside": (chat("outside") | {"url": "/pause"}, "url must be a route"),
        "stream": (chat("stream", stream=True), "stream is not possible"),
        "body": (chat("body") | {"body": [1]}, "must be a JSON object"),
    }
    write(batch, *(line for line, _ in wrong.values()), chat("good"))
    run(batch)
    found = results(batch)
    for name, (_, message) in wrong.items():
        reply = found[name]["response"]
        assert 400 <= reply["status_code"] < 500
        assert message in reply["body"]["error"]["message"]
    assert found["good"]["response"]["status_code"] == 200
    assert batch.tally == Tally(answered=1, refused=len(wrong))


def test_lines_that_are_no_requests_say_where(batch: Batch) -> None:
    write(batch, chat("one"), "{", "", chat("one"), "[" * 5000, '{"url": "/v1/completions", "body": {}}')
    run(batch)
    errors = [json.loads(line) for line in batch.output.read_text().splitlines()]
    said = sorted(line["error"]["message"] for line in errors if line["error"])
    assert [text.split(" ", 2)[1] for text in said] == ["2", "4", "5", "6"]
    assert "custom_id of line 1, 'one'" in said[1]
    assert batch.tally == Tally(answered=1, refused=4)


@given(cut=st.integers(0, 3000))
def test_a_run_continues_one_cut_anywhere(tmp_path_factory: pytest.TempPathFactory, cut: int) -> None:
    folder = tmp_path_factory.mktemp("cut")
    batch = Batch(folder / "in.jsonl", folder / "out.jsonl")
    names = [f"request-{index}" for index in range(4)]
    write(batch, *map(chat, names))
    run(batch)
    data = batch.output.read_bytes()
    batch.output.write_bytes(data[: cut % (len(data) + 1)])
    whole = batch.output.read_bytes().count(b"\n")
    assert len(run(batch)) == 4 - whole
    assert sorted(filter(None, results(batch))) == names
    assert batch.tally == Tally(answered=4 - whole, before=whole)


def test_failures_are_repeated_and_refusals_are_not(batch: Batch) -> None:
    write(batch, chat("a"), chat("b", store=True))
    run(batch, error=Error("", "the device is on fire", user_fault=False))
    assert batch.tally == Tally(refused=1, failed=1)
    assert results(batch)["a"]["response"]["status_code"] == 500
    assert len(run(batch)) == 1
    assert results(batch)["a"]["response"]["status_code"] == 200
    assert batch.tally == Tally(answered=1, before=1)


def test_no_more_requests_run_than_asked(batch: Batch) -> None:
    write(batch, *(chat(str(index)) for index in range(20)))
    most, open_now = 0, 0

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal most, open_now
        open_now += 1
        most = max(most, open_now)
        await asyncio.sleep(0.001)
        open_now -= 1
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    asyncio.run(batch.run(app, concurrency=3, alive=lambda: "", progress=lambda tally: None))
    assert most == 3
    assert batch.tally.answered == 20


def test_a_busy_server_is_asked_again(batch: Batch, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.runtime.server.batch.BUSY_SECONDS", 0.0)
    write(batch, chat("a"))
    statuses = [429, 429, 200]

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": statuses.pop(0), "headers": []})
        await send({"type": "http.response.body", "body": b"{}"})

    asyncio.run(batch.run(app, concurrency=1, alive=lambda: "", progress=lambda tally: None))
    assert batch.tally == Tally(answered=1)


def test_a_dead_engine_ends_the_run(batch: Batch) -> None:
    write(batch, chat("a"), chat("b"))
    with pytest.raises(InternalError, match="the engine is gone"):
        run(batch, concurrency=1, dead=iter(["", "the engine is gone"]))
    assert results(batch).keys() <= {"a"}


def test_files_that_can_not_be_used(batch: Batch) -> None:
    with pytest.raises(UserError, match="can't read"):
        batch.total()
    with pytest.raises(UserError, match="can't open"):
        run(batch)
    write(batch, chat("a"))
    with pytest.raises(UserError, match="input and output"):
        run(Batch(batch.source, batch.source))
    batch.output.write_text("a letter\n")
    with pytest.raises(UserError, match=r"line 1 of .* is no answer"):
        run(batch)
    assert batch.output.read_text() == "a letter\n"
    batch.output.write_text("")
    with batch.output.open("rb") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another run"):
            run(batch)
    with pytest.raises(UserError, match="is no file"):
        run(Batch(batch.source, Path("/dev/null")))


def test_a_full_disk_ends_the_run_and_leaves_what_can_be_continued(batch: Batch) -> None:
    write(batch, *(chat(str(index)) for index in range(9)))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(UserError, match="File too large; make room"):
            run(batch)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert batch.output.stat().st_size == 1000
    run(batch)
    assert len(results(batch)) == 9
    assert batch.tally.before > 0
