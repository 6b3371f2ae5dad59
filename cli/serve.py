"""`toolkit serve`: serve a plan over HTTP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from ..runtime.errors import UserError
from ..runtime.options import EngineOptions, KVEventsConfig, TextOptions
from .options import engine_options, parse_config, text_options

_LEVELS = ("debug", "info", "warning", "error", "critical")
_FILE = click.Path(path_type=Path, exists=True, dir_okay=False)


def _read_config(context: click.Context, option: click.Parameter, path: Path | None) -> None:
    """Take the file's options where the command line says nothing."""
    if path is None:
        return
    import yaml

    try:
        given = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except (yaml.YAMLError, ValueError) as error:
        raise UserError(f"{path} is no YAML: {error}") from None
    if not isinstance(given, dict):
        raise UserError(f"{path} must hold options by name, such as `port: 9000`")
    known = {flag.lstrip("-"): each for each in context.command.params for flag in each.opts if each is not option}
    values: dict[str, Any] = {}
    for key, value in given.items():
        each = known.get(str(key).replace("_", "-"))
        if not isinstance(each, click.Option) or each.name is None:
            raise UserError(f"{path}: {key} is no option of serve")
        values[each.name] = [value] if each.multiple and not isinstance(value, list) else value
    context.default_map = values


@click.command("serve")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--config", type=_FILE, is_eager=True, expose_value=False, callback=_read_config, help="YAML of options.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--uds", type=click.Path(path_type=Path), help="Unix socket to listen on in place of a port.")
@click.option("--api-key", multiple=True, envvar="TOOLKIT_API_KEY", help="Key that clients need; may be repeated.")
@click.option("--api-key-file", type=_FILE, help="File of keys, one a line.")
@click.option("--root-path", default="", help="Path under which a proxy shows the server.")
@click.option("--allowed-origins", multiple=True, help="Origin of pages that may call the server; may be repeated.")
@click.option("--allowed-methods", multiple=True, default=("*",), help="Methods that such pages may use.")
@click.option("--allowed-headers", multiple=True, default=("*",), help="Headers that such pages may send.")
@click.option("--allow-credentials", is_flag=True, help="Such pages may send cookies.")
@click.option("--ssl-certfile", type=_FILE, help="Certificate; the server then speaks HTTPS.")
@click.option("--ssl-keyfile", type=_FILE, help="The certificate's key, if that is not in its file.")
@click.option("--ssl-keyfile-password", help="The key's password.")
@click.option("--ssl-ca-certs", type=_FILE, help="Authorities of which clients must have a certificate.")
@click.option(
    "--max-queued-requests",
    type=click.IntRange(0),
    default=2048,
    show_default=True,
    help="Outputs that may wait for a place; more are answered 429. 0 is no limit.",
)
@click.option(
    "--request-timeout", type=click.FloatRange(0), default=0.0, help="Seconds a request may take.  [default: no limit]"
)
@click.option(
    "--shutdown-timeout",
    type=click.FloatRange(0),
    default=30.0,
    show_default=True,
    help="Seconds that running requests may take to end after SIGTERM.",
)
@click.option(
    "--log-format", type=click.Choice(("text", "json")), default="text", show_default=True, help="Form of logs."
)
@click.option("--log-level", type=click.Choice(_LEVELS), default="info", show_default=True, help="Least level of logs.")
@click.option("--enable-log-requests", is_flag=True, help="Log requests' parameters; at level debug also prompts.")
@click.option("--otlp-traces-endpoint", help="URL that OpenTelemetry traces are sent to, over HTTP.")
@click.option("--kv-events-config", metavar="JSON", help="Tell routers what the prefix cache holds, over ZeroMQ.")
@click.option(
    "--api-workers",
    "--api-server-count",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="Processes for HTTP and text, which share the engine.",
)
@click.option("--page/--no-page", default=True, show_default=True, help="Whether there is a page to look at, at /.")
@text_options
@engine_options
def command(
    *,
    plan: Path,
    host: str,
    port: int,
    api_key: tuple[str, ...],
    api_key_file: Path | None,
    allowed_origins: tuple[str, ...],
    allowed_methods: tuple[str, ...],
    allowed_headers: tuple[str, ...],
    allow_credentials: bool,
    kv_events_config: str | None,
    text: TextOptions,
    options: EngineOptions,
    **rest: Any,
) -> None:
    """Serve PLAN over HTTP, with an OpenAI-compatible API.

    \b
    Examples:
      toolkit serve smol-plan
      toolkit serve smol-plan --host 0.0.0.0 --port 9000 --memory 8GiB --api-key-file keys.txt
      curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    Ctrl-C or SIGTERM lets running requests end first, a second one does not.
    """
    from ..runtime.server.options import HttpOptions
    from ..runtime.server.run import serve

    http = HttpOptions(
        api_keys=_keys(api_key, api_key_file),
        cors_origins=allowed_origins,
        cors_methods=allowed_methods,
        cors_headers=allowed_headers,
        cors_credentials=allow_credentials,
        **rest,
    )
    events = parse_config("--kv-events-config", kv_events_config, KVEventsConfig)
    options = msgspec.structs.replace(options, kv_events_config=events)
    serve(plan, options, host=host, port=port, text=text, http=http)


def _keys(given: tuple[str, ...], file: Path | None) -> tuple[str, ...]:
    """All keys. Raises UserError for an empty one, which would open the server to everyone."""
    lines = file.read_text(encoding="utf-8").splitlines() if file else []
    keys = (*given, *(line.strip() for line in lines if line.strip()))
    if not all(keys) or (file and len(keys) == len(given)):
        raise UserError("an API key must not be empty: leave --api-key out for a server without keys")
    return keys
