"""The server's log: lines for people or JSON for machines, one of them for every request."""

from __future__ import annotations

import json
import logging
import sys
from datetime import UTC, datetime
from typing import Any

import msgspec

from ..prompt import Prompts
from ..request import Add
from .options import LogFormat, LogLevel
from .record import Record

QUIET_ROUTES = frozenset({"/health", "/ready", "/metrics", "/load", "/is_paused"})
"""Routes that are asked every few seconds: their lines are shown at level `debug` only."""

_log = logging.getLogger("toolkit.http")
_requests = logging.getLogger("toolkit.requests")


class Fields(dict[str, Any]):
    """What a line says besides its message: passed as the argument of a logging call."""


def configure_logs(form: LogFormat, level: LogLevel, *, requests: bool = False) -> None:
    """Send everything logged to standard error. `requests`: also each request's parameters when it arrives."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Json() if form == "json" else _Text())
    root = logging.getLogger()
    root.handlers = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("toolkit").setLevel(level.upper())
    _requests.setLevel(logging.NOTSET if requests else logging.WARNING)


def log_serving(model: str, address: str, seconds: float) -> None:
    """Say that requests are answered: in a sentence for people, which programs that start servers wait for."""
    if isinstance(logging.getLogger().handlers[0].formatter, _Json):
        _log.info("serving", Fields(model=model, address=address, seconds=round(seconds, 2)))
    else:
        print(f"Serving {model} at {address} after {seconds:.2f} s", file=sys.stderr)


def log_request(record: Record) -> None:
    """The line of a request that has ended (a `record.Observer`)."""
    level = logging.DEBUG if record.route in QUIET_ROUTES else logging.INFO
    if not _log.isEnabledFor(level):
        return
    fields = Fields(
        request_id=record.id,
        route=f"{record.method} {record.route}",
        status=record.status,
        seconds=_rounded(record.ended - record.began),
    )
    if record.choices:
        fields |= _outputs(record)
    _log.log(level, "request", fields)


def _outputs(record: Record) -> dict[str, Any]:
    """Times of the choice that took longest to come to them, in seconds since it arrived."""
    told = [choice.engine for choice in record.choices if choice.engine is not None]
    return {
        "prompt_tokens": record.prompt_tokens,
        "cached_tokens": max((engine.cached_tokens for engine in told), default=0),
        "output_tokens": record.output_tokens,
        "queue_seconds": _rounded(max((engine.queue for engine in told), default=None)),
        "ttft_seconds": _rounded(max((engine.first_token for engine in told), default=None)),
        "e2e_seconds": _rounded(max(choice.seconds for choice in record.choices)),
        "finish_reason": ",".join(dict.fromkeys(record.finish_reasons)),
    }


def log_arrival(identity: str, command: Add, prompts: Prompts) -> None:
    """A choice's parameters; at level `debug` also its prompt."""
    params = msgspec.to_builtins(command.params)
    fields = Fields(request_id=identity, engine_id=command.request, prompt_tokens=len(command.prompt), params=params)
    if _requests.isEnabledFor(logging.DEBUG):
        fields |= {
            "prompt": prompts.decode(command.prompt) if prompts.tokenizer else None,
            "prompt_ids": command.prompt,
        }
    _requests.info("arrived", fields)


def wants_arrivals() -> bool:
    """Whether arrivals are logged."""
    return _requests.isEnabledFor(logging.INFO)


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 6)


# --- formats ----------------------------------------------------------------------------------------------------------


def _parts(record: logging.LogRecord) -> tuple[str, str, Fields]:
    """Time, message and fields."""
    fields = record.args if isinstance(record.args, Fields) else Fields()
    message = record.msg if isinstance(record.args, Fields) else record.getMessage()
    moment = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
    return moment.replace("+00:00", "Z"), str(message), fields


class _Json(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        moment, message, fields = _parts(record)
        data = {"time": moment, "level": record.levelname.lower(), "logger": record.name, "message": message, **fields}
        if record.exc_info:
            data["exception"] = self.formatException(record.exc_info)
        return json.dumps(data, ensure_ascii=False, default=str)


class _Text(logging.Formatter):
    """Time, level, message, and fields as name=value; one line, but for tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        moment, message, fields = _parts(record)
        words = [moment, f"{record.levelname:<7}", message.replace("\n", "\\n")]
        words += [f"{name}={_word(value)}" for name, value in fields.items() if value is not None]
        line = " ".join(words)
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


def _word(value: object) -> str:
    """A value without spaces or quotes as it is, another one as JSON."""
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    plain = text.isprintable() and not set(text) & set(' "=') and text
    return text if plain else json.dumps(value, ensure_ascii=False)
