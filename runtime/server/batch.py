"""`toolkit run-batch`: requests from a file through the server's own application, without HTTP, answers to a file.

Both files are OpenAI's batch format, one JSON object a line. Answers are written as they come, so an interrupted run
leaves a file that the next run continues: a line is final once it holds an answer other than a failure of ours.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import stat
import uuid
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO

import msgspec
from starlette.types import ASGIApp

from ..errors import InternalError, UserError
from .asgi import replayed
from .errors import ApiError
from .record import REQUEST_ID

BUSY_SECONDS = 0.5
"""When to ask again if the server had no room for a request."""


class BatchLine(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """One request."""

    custom_id: str
    method: str = "POST"
    url: str
    body: msgspec.Raw


class Reply(msgspec.Struct, kw_only=True):
    """What the application answered."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct):
    """Why a line is no request."""

    code: str
    message: str


class Result(msgspec.Struct, kw_only=True):
    """One line of the output. Lines that are no request have an error and no custom id."""

    id: str
    custom_id: str | None
    response: Reply | None
    error: LineError | None

    @property
    def final(self) -> bool:
        """Whether a later run should leave it as it is."""
        return self.custom_id is not None and self.response is not None and self.response.status_code < 500


@dataclass
class Tally:
    """How many requests came to what."""

    answered: int = 0
    refused: int = 0
    failed: int = 0
    before: int = 0
    """Done by an earlier run."""

    def count(self, result: Result) -> None:
        status = 400 if result.response is None else result.response.status_code
        if status < 400:
            self.answered += 1
        elif status < 500:
            self.refused += 1
        else:
            self.failed += 1

    @property
    def done(self) -> int:
        return self.answered + self.refused + self.failed + self.before


@dataclass
class Batch:
    """The requests of one file, on their way to another."""

    source: Path
    output: Path
    tally: Tally = field(default_factory=Tally)

    def total(self) -> int:
        """How many lines hold something. Raises UserError if the file can't be read."""
        try:
            with self.source.open("rb") as lines:
                return sum(1 for line in lines if line.strip())
        except OSError as error:
            raise UserError(f"can't read {self.source}: {error.strerror}") from None

    async def run(
        self, app: ASGIApp, *, concurrency: int, alive: Callable[[], str], progress: Callable[[Tally], None]
    ) -> None:
        """Answer what no earlier run has answered, at most `concurrency` requests at a time.

        `alive` says why no more requests can be answered, or "".

        Raises UserError if a file can't be used, InternalError if the engine is dead.
        """
        with _opened(self.source, self.output) as (lines, output):
            finished = _repair(self.output, output)
            slots = asyncio.Semaphore(concurrency)

            async def one(item: BatchLine | LineError) -> None:
                try:
                    result = await _answer(app, item, alive)
                finally:
                    slots.release()
                self._write(output, result)
                progress(self.tally)

            try:
                async with asyncio.TaskGroup() as tasks:
                    for item in _read(lines):
                        if isinstance(item, BatchLine) and item.custom_id in finished:
                            self.tally.before += 1
                            continue
                        await slots.acquire()
                        if problem := alive():
                            raise InternalError(problem)
                        tasks.create_task(one(item))
            except* (UserError, InternalError) as group:
                raise group.exceptions[0] from None

    def _write(self, output: BinaryIO, result: Result) -> None:
        data = msgspec.json.encode(result) + b"\n"
        try:
            while data:  # a disk that is almost full takes a part
                data = data[output.write(data) :]
        except OSError as error:
            raise UserError(f"can't write {self.output}: {error.strerror}; make room and run again to go on") from None
        self.tally.count(result)


@contextmanager
def _opened(source: Path, output: Path) -> Iterator[tuple[BinaryIO, BinaryIO]]:
    """Both files, the output for this process alone. Raises UserError if they can't be had."""
    try:
        with source.open("rb") as lines, output.open("a+b", buffering=0) as results:
            if os.path.samestat(os.fstat(lines.fileno()), os.fstat(results.fileno())):
                raise UserError(f"{source} is input and output: choose another output")
            if not stat.S_ISREG(os.fstat(results.fileno()).st_mode):
                raise UserError(f"{output} is no file, which a later run could continue: choose another output")
            try:
                fcntl.flock(results, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise UserError(f"another run writes {output}: wait for it, or choose another output") from None
            yield lines, results
    except OSError as error:
        raise UserError(f"can't open {error.filename}: {error.strerror}") from None


def _repair(path: Path, output: BinaryIO) -> set[str]:
    """The ids that an earlier run finished. What it left torn or failed is taken out, so that it is done again.

    Raises UserError if the file holds something else.
    """
    output.seek(0)
    finished: set[str] = set()
    kept: list[bytes] = []
    decoder = msgspec.json.Decoder(Result)
    whole = True
    for number, line in enumerate(output, 1):
        try:
            result = decoder.decode(line) if line.endswith(b"\n") else None
        except msgspec.DecodeError:
            raise UserError(f"line {number} of {path} is no answer of a batch: choose another output") from None
        if result is not None and result.final and result.custom_id not in finished:
            finished.add(str(result.custom_id))
            kept.append(line)
        else:
            whole = False
    if not whole:
        output.truncate(0)
        output.write(b"".join(kept))
    return finished


def _read(lines: BinaryIO) -> Iterator[BatchLine | LineError]:
    """The requests; lines that are none say why."""
    decoder = msgspec.json.Decoder(BatchLine)
    seen: dict[str, int] = {}
    for number, text in enumerate(lines, 1):
        if not text.strip():
            continue
        try:
            line = decoder.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            yield LineError("invalid_line", f"line {number} is no request of a batch: {error}")
            continue
        first = seen.setdefault(line.custom_id, number)
        if first == number:
            yield line
        else:
            yield LineError(
                "duplicate_custom_id", f"line {number} has the custom_id of line {first}, {line.custom_id!r}"
            )


class _Streamed(msgspec.Struct):
    stream: bool | None = None


def _problem(line: BatchLine) -> str:
    """Why a request can't be in a batch, or ""."""
    if line.method != "POST":
        return f"method must be POST, not {line.method}"
    if not line.url.startswith("/v1/"):
        return f"url must be a route such as /v1/chat/completions, not {line.url}"
    try:
        streamed = msgspec.json.decode(line.body, type=_Streamed).stream
    except (msgspec.DecodeError, RecursionError):
        return ""  # the application says what is wrong
    return "stream is not possible in a batch" if streamed else ""


async def _answer(app: ASGIApp, item: BatchLine | LineError, alive: Callable[[], str]) -> Result:
    """What comes of a line. One that the server has no room for is asked again."""
    identity = f"batch_req_{uuid.uuid4().hex}"
    if isinstance(item, LineError):
        return Result(id=identity, custom_id=None, response=None, error=item)
    if problem := _problem(item):
        body = msgspec.Raw(msgspec.json.encode(ApiError(400, problem).body()))
        reply = Reply(status_code=400, request_id=identity, body=body)
        return Result(id=identity, custom_id=item.custom_id, response=reply, error=None)
    reply = await ask(app, item.url, bytes(item.body))
    while reply.status_code == 429 and not alive():
        await asyncio.sleep(BUSY_SECONDS)
        reply = await ask(app, item.url, bytes(item.body))
    return Result(id=identity, custom_id=item.custom_id, response=reply, error=None)


async def ask(app: ASGIApp, path: str, body: bytes) -> Reply:
    """POST a JSON body to an application in this process."""
    scope = {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "root_path": "",
        "query_string": b"",
        "headers": [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))],
    }
    head: MutableMapping[str, Any] = {}
    pieces: list[bytes] = []

    async def send(message: MutableMapping[str, Any]) -> None:
        if message["type"] == "http.response.start":
            head.update(message)
        else:
            pieces.append(message.get("body", b""))

    try:
        await app(scope, replayed(body), send)
    except Exception:
        if not head:  # else it was answered with 500, and logged
            raise
    request_id = next((value.decode() for name, value in head["headers"] if name == REQUEST_ID.encode()), "")
    return Reply(status_code=head["status"], request_id=request_id, body=msgspec.Raw(b"".join(pieces)))
