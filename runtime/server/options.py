"""How the server is reached, and what it tells."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import msgspec

LogFormat = Literal["text", "json"]
LogLevel = Literal["debug", "info", "warning", "error", "critical"]


class HttpOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How the server is reached, and what it tells. Names are those of the flags."""

    api_keys: tuple[str, ...] = ()
    """Any of them opens every route; none: all is open."""
    cors_origins: tuple[str, ...] = ()
    """Origins of pages that may call the server, `*` for all; none: browsers' pages may not."""
    cors_methods: tuple[str, ...] = ("*",)
    cors_headers: tuple[str, ...] = ("*",)
    cors_credentials: bool = False
    root_path: str = ""
    """The path under which a proxy shows the server, which it takes off."""
    uds: Path | None = None
    """A Unix socket to listen on in place of a port."""
    ssl_certfile: Path | None = None
    ssl_keyfile: Path | None = None
    ssl_keyfile_password: str | None = None
    ssl_ca_certs: Path | None = None
    """Clients must then have a certificate of these authorities."""
    max_queued_requests: int = 2048
    """Outputs that may wait besides those that run; more are answered 429. 0: no limit."""
    request_timeout: float = 0.0
    """Seconds that a request may take; clients may ask for less. 0: no limit."""
    shutdown_timeout: float = 30.0
    """Seconds that running requests may take to end after SIGTERM or SIGINT; a second signal ends them at once."""
    log_format: LogFormat = "text"
    log_level: LogLevel = "info"
    enable_log_requests: bool = False
    """Log parameters of requests when they arrive; with the level `debug` also prompts."""
    otlp_traces_endpoint: str | None = None
    """Where traces are sent, over HTTP; none: nowhere."""
    api_workers: int = 1
    """Processes that do HTTP and text for the one engine."""
    page: bool = True
    """Whether the built-in page is at `/`."""
