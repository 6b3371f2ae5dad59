"""`toolkit generate`: complete one prompt, streaming."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import click
import msgspec

from ..runtime.errors import UserError
from ..runtime.options import EngineOptions
from ..runtime.output import Delta, Output
from .options import as_json, engine_options, sampling_options


@click.command("generate")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--prompt", help="Text to complete; - reads standard input.")
@click.option("--tokens", metavar="ID,ID,…", help="Token ids to complete, instead of text; prints token ids.")
@sampling_options
@engine_options
@as_json
def command(
    *,
    plan: Path,
    prompt: str | None,
    tokens: str | None,
    sampling: dict[str, Any],
    options: EngineOptions,
    as_json: bool,
) -> None:
    """Complete one prompt with PLAN and print the text as it comes.

    \b
    Examples:
      toolkit generate smol-plan --prompt "The capital of France is" --max-tokens 20
      toolkit generate smol-plan --prompt - --temperature 0 < prompt.txt
      toolkit generate tokens-only-plan --tokens 1,15,27 --json
    """
    from ..runtime.llm import LLM

    asked = _prompt(prompt, tokens)
    with LLM(plan, **msgspec.structs.asdict(options)) as llm:
        stream = llm.stream(asked, llm.params(**({"max_tokens": None} | sampling)))
        output, arrivals = Output(), [time.perf_counter()]
        for delta in stream:
            output.add(delta)
            arrivals += [time.perf_counter()] * len(delta.token_ids)
            if not as_json:
                _show(delta, ids=tokens is not None)
    if as_json:
        print_json(output, arrivals)
    else:
        click.echo()
        click.echo(speed(arrivals), err=True)


def _prompt(prompt: str | None, tokens: str | None) -> str | list[int]:
    if (prompt is None) == (tokens is None):
        raise click.UsageError("give one of --prompt and --tokens")
    if prompt is not None:
        return sys.stdin.read() if prompt == "-" else prompt
    try:
        return [int(token) for token in (tokens or "").split(",")]
    except ValueError:
        raise UserError(f"--tokens must be token ids such as 1,15,27, not {tokens!r}") from None


def _show(delta: Delta, *, ids: bool) -> None:
    if ids:
        click.echo("".join(f"{token} " for token in delta.token_ids), nl=False)
    else:
        click.echo(delta.text, nl=False)


def print_json(output: Output, arrivals: list[float]) -> None:
    """The whole answer with its times."""
    data = {
        "text": output.text,
        "token_ids": output.token_ids,
        "finish_reason": output.finish_reason,
        "stop_reason": output.stop_reason,
        "first_token_seconds": arrivals[1] - arrivals[0] if len(arrivals) > 1 else None,
        "seconds": arrivals[-1] - arrivals[0],
    }
    click.echo(msgspec.json.encode(data))


def speed(arrivals: list[float]) -> str:
    """Tokens a second and time to the first, given when the request began and each token came."""
    count = len(arrivals) - 1
    if not count:
        return "no tokens"
    first, rest = arrivals[1] - arrivals[0], arrivals[-1] - arrivals[1]
    pace = f", {(count - 1) / rest:.0f} tokens/s" if rest > 0 else ""
    return f"{count} tokens{pace}, first token after {first * 1000:.0f} ms"
