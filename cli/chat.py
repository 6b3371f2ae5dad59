"""`toolkit chat`: talk to a plan or to a server."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import click
import msgspec

from ..runtime.errors import UserError
from ..runtime.options import EngineOptions
from .client import Client, is_url
from .generate import speed
from .options import engine_options, sampling_options

Message = dict[str, Any]
Answer = Callable[[list[Message]], Iterator[str]]
"""The pieces of an answer to a conversation."""


@click.command("chat")
@click.argument("target", metavar="PLAN|URL")
@click.option("--system", help="Tells the model how to behave.")
@click.option("--model", help="The model to ask a server for.  [default: its first]")
@click.option("--api-key", envvar="OPENAI_API_KEY", help="Key for a server that wants one.")
@sampling_options
@engine_options
def command(
    *,
    target: str,
    system: str | None,
    model: str | None,
    api_key: str | None,
    sampling: dict[str, Any],
    options: EngineOptions,
) -> None:
    """Talk to a plan, or to the server at a URL. An empty line, Ctrl-D or Ctrl-C ends; /new begins anew.

    \b
    Examples:
      toolkit chat smol-plan --system "Answer in one sentence."
      toolkit chat http://127.0.0.1:8000
      echo "What is the capital of France?" | toolkit chat smol-plan --temperature 0
    """
    with ExitStack() as stack:
        if is_url(target):
            answer = _ask_server(Client(target, api_key), model, sampling)
        else:
            answer = _ask_plan(stack, target, sampling, options)
        _talk(answer, [{"role": "system", "content": system}] if system else [])


def _talk(answer: Answer, opening: list[Message]) -> None:
    messages = list(opening)
    for line in _lines():
        if line == "/new":
            messages = list(opening)
            continue
        messages.append({"role": "user", "content": line})
        pieces, arrivals = [], [time.perf_counter()]
        try:
            for piece in answer(messages):
                arrivals.append(time.perf_counter())
                pieces.append(piece)
                click.echo(piece, nl=False)
        except UserError as error:
            if not sys.stdin.isatty():
                raise
            click.echo(f"{error}", err=True)
            messages.pop()
            continue
        click.echo()
        if sys.stdin.isatty():
            click.secho(speed(arrivals), err=True, dim=True)
        messages.append({"role": "assistant", "content": "".join(pieces)})


def _lines() -> Iterator[str]:
    """What the user says, until they end it."""
    if not sys.stdin.isatty():
        yield from filter(None, map(str.strip, sys.stdin))
        return
    import readline  # noqa: F401  line editing and history

    while True:
        try:
            line = input("> ").strip()
        except (EOFError, KeyboardInterrupt):
            click.echo()
            return
        if not line:
            return
        yield line


def _ask_plan(stack: ExitStack, plan: str, sampling: dict[str, Any], options: EngineOptions) -> Answer:
    from ..runtime.llm import LLM

    llm = stack.enter_context(LLM(plan, **msgspec.structs.asdict(options)))
    params = llm.params(**({"max_tokens": None} | sampling))
    return lambda messages: (delta.text for delta in llm.stream_chat(messages, params) if delta.text)


def _ask_server(client: Client, model: str | None, sampling: dict[str, Any]) -> Answer:
    body = {"model": model or asyncio.run(client.get("/v1/models"))["data"][0]["id"], **sampling}

    def answer(messages: list[Message]) -> Iterator[str]:
        with asyncio.Runner() as runner:
            events = client.stream("/v1/chat/completions", {**body, "messages": messages})
            while (event := runner.run(_next(events))) is not None:
                for choice in event["choices"]:
                    if text := choice["delta"].get("content"):
                        yield text

    return answer


async def _next(events: Any) -> dict[str, Any] | None:
    event: dict[str, Any] | None = await anext(events, None)
    return event
