"""What is known of an HTTP request while it is answered: what its log line and its trace are made of."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field, replace

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from .errors import route_path
from .metrics import RequestTimer

REQUEST_ID = "x-request-id"
CLIENT_GONE = 499
"""The status of requests whose client left before there was one, as nginx has it."""
_MAX_ID = 128


Observer = Callable[["Record"], None]
"""Is told of each request when it has ended."""


@dataclass
class Record:
    """One HTTP request, from its first byte to its last."""

    id: str
    method: str
    route: str
    headers: Headers
    wall_ns: int = field(default_factory=time.time_ns)
    """The wall clock's nanoseconds at `began`; other times count from there, whatever that clock does meanwhile."""
    began: float = field(default_factory=time.monotonic)
    ended: float = 0.0
    status: int = CLIENT_GONE
    observers: Sequence[Observer] = ()
    answer: str = ""
    """The id in the answer's body."""
    choices: list[RequestTimer] = field(default_factory=list)
    """What was generated for it."""

    def end(self) -> None:
        """The HTTP request has ended. What is still generated for it in the background is told when that has."""
        self.choices = [choice for choice in self.choices if choice.seconds]
        self._tell()

    def end_choice(self, choice: RequestTimer) -> None:
        """A choice has ended."""
        if self.ended:
            replace(self, choices=[choice])._tell()

    def _tell(self) -> None:
        self.ended = time.monotonic()
        for observer in self.observers:
            observer(self)

    @property
    def prompt_tokens(self) -> int:
        """Of all prompts; choices of one share it."""
        return sum({id(choice.command.prompt): len(choice.command.prompt) for choice in self.choices}.values())

    @property
    def output_tokens(self) -> int:
        return sum(choice.tokens for choice in self.choices)

    @property
    def finish_reasons(self) -> list[str]:
        return [choice.reason for choice in self.choices if choice.reason is not None]


current_record: ContextVar[Record | None] = ContextVar("record", default=None)
"""The request that the running code works for."""


class Recorded:
    """Keeps a record of every request, answers it with its `x-request-id` (the client's own, else a new one), and shows
    the record to observers at the end."""

    def __init__(self, app: ASGIApp, observers: Sequence[Observer] = ()) -> None:
        self._app = app
        self._observers = observers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        given = headers.get(REQUEST_ID, "")
        identity = given if given and len(given) <= _MAX_ID else uuid.uuid4().hex
        record = Record(identity, scope["method"], route_path(scope), headers, observers=self._observers)

        async def labeled(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID] = identity
            await send(message)

        token = current_record.set(record)
        try:
            await self._app(scope, receive, labeled)
        finally:
            current_record.reset(token)
            record.end()
