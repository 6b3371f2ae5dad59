"""`toolkit serve`: serve a plan over HTTP."""

from __future__ import annotations

from pathlib import Path

import click

from ..runtime.options import EngineOptions
from .options import engine_options


@click.command("serve")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to listen on; 0.0.0.0 is all.")
@click.option("--port", type=click.IntRange(0, 65535), default=8000, show_default=True, help="0 takes a free one.")
@click.option("--tool-call-parser", help="Form of tool calls, such as hermes; otherwise told by the chat template.")
@click.option("--reasoning-parser", help="Form of reasoning, such as qwen3; otherwise told by the chat template.")
@engine_options
def command(
    *,
    plan: Path,
    host: str,
    port: int,
    tool_call_parser: str | None,
    reasoning_parser: str | None,
    options: EngineOptions,
) -> None:
    """Serve PLAN over HTTP, with an OpenAI-compatible API.

    \b
    Examples:
      toolkit serve smol-plan
      toolkit serve smol-plan --host 0.0.0.0 --port 9000 --memory 8GiB
      curl localhost:8000/v1/chat/completions -H 'content-type: application/json' \\
        -d '{"messages": [{"role": "user", "content": "Hello"}]}'

    Ctrl-C or SIGTERM lets running requests end first, a second one does not.
    """
    from ..runtime.server.run import serve

    serve(plan, options, host=host, port=port, tool_parser=tool_call_parser, reasoning_parser=reasoning_parser)
