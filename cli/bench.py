"""`toolkit bench`: measure latency, throughput, serving, kernels and quality."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import click
import msgspec
from rich.console import Console

from ..runtime.errors import UserError
from ..runtime.options import EngineOptions
from .client import is_url
from .load import LoadReport, Sample, open_target, plan_name, random_prompts, report, run_load, running_server
from .options import Command, as_json, engine_options, step_size
from .progress import Phases, TerminalPhases
from .workload import StepSize


@click.group("bench")
def command() -> None:
    """Measure a plan or a server.

    \b
    Examples:
      toolkit bench latency smol-plan
      toolkit bench throughput smol-plan --requests 64
      toolkit bench serve http://127.0.0.1:8000 --rate 4
      toolkit bench kernels smol-plan --batch 8 --context 512
      toolkit bench quality smol-plan --reference SmolLM2-135M-Instruct.Q4_1.gguf
    """


def _sizes(prompt_tokens: int, tokens: int) -> Callable[[Command], Command]:
    """`--prompt-tokens` and `--tokens` with these defaults."""

    def decorate(function: Command) -> Command:
        positive = click.IntRange(1)
        function = click.option(
            "--tokens", type=positive, default=tokens, show_default=True, help="Tokens to generate for each."
        )(function)
        return click.option(
            "--prompt-tokens", type=positive, default=prompt_tokens, show_default=True, help="Tokens of each prompt."
        )(function)

    return decorate


@command.command()
@click.argument("target", metavar="PLAN|URL")
@_sizes(128, 128)
@click.option("--runs", type=click.IntRange(1), default=5, show_default=True, help="Requests, one after another.")
@engine_options
@as_json
def latency(*, target: str, prompt_tokens: int, tokens: int, runs: int, options: EngineOptions, as_json: bool) -> None:
    """One request at a time: time to the first token and between tokens.

    \b
    Examples:
      toolkit bench latency smol-plan
      toolkit bench latency smol-plan --prompt-tokens 1000 --tokens 16 --json
    """

    async def measure() -> list[Sample]:
        async with open_target(target, options) as server:
            prompts = random_prompts(runs + 1, prompt_tokens, server.vocabulary)
            return (await run_load(server, prompts, tokens, concurrency=1))[1:]  # the first one warms up

    _show(report("latency", plan_name(target), prompt_tokens, asyncio.run(measure())), as_json)


@command.command()
@click.argument("target", metavar="PLAN|URL")
@_sizes(128, 128)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Requests, all at once.")
@engine_options
@as_json
def throughput(
    *, target: str, prompt_tokens: int, tokens: int, requests: int, options: EngineOptions, as_json: bool
) -> None:
    """Many requests at once: tokens a second in all.

    \b
    Examples:
      toolkit bench throughput smol-plan
      toolkit bench throughput smol-plan --requests 8 --json
    """

    async def measure() -> list[Sample]:
        async with open_target(target, options) as server:
            await run_load(server, random_prompts(1, prompt_tokens, server.vocabulary, seed=1), 2)
            return await run_load(server, random_prompts(requests, prompt_tokens, server.vocabulary), tokens)

    _show(report("throughput", plan_name(target), prompt_tokens, asyncio.run(measure())), as_json)


@command.command()
@click.argument("target", metavar="PLAN|URL")
@_sizes(128, 64)
@click.option("--requests", type=click.IntRange(1), default=32, show_default=True, help="Requests in all.")
@click.option(
    "--rate", type=click.FloatRange(0), default=0.0, help="Requests a second, at random.  [default: all at once]"
)
@click.option("--concurrency", type=click.IntRange(1), help="Most requests at a time.  [default: no limit]")
@as_json
def serve(
    *,
    target: str,
    prompt_tokens: int,
    tokens: int,
    requests: int,
    rate: float,
    concurrency: int | None,
    as_json: bool,
) -> None:
    """Streams over HTTP; for a plan a server is started, and the time from its start to its first token is measured.

    \b
    Examples:
      toolkit bench serve smol-plan
      toolkit bench serve http://127.0.0.1:8000 --requests 100 --rate 2
    """

    async def measure(url: str) -> tuple[Sample, list[Sample]]:
        async with open_target(url, EngineOptions()) as server:
            (first,) = await run_load(server, random_prompts(1, 8, server.vocabulary, seed=1), 2)
            prompts = random_prompts(requests, prompt_tokens, server.vocabulary)
            return first, await run_load(server, prompts, tokens, concurrency=concurrency or 0, rate=rate)

    if is_url(target):
        _, samples = asyncio.run(measure(target))
        start = None
    else:
        with running_server(target) as (url, began):
            first, samples = asyncio.run(measure(url))
        start = first.arrivals[0] - began
    _show(report("serve", plan_name(target), prompt_tokens, samples, start=start), as_json)


@command.command()
@click.argument("target", metavar="PLAN")
@step_size
@click.option("--runs", type=click.IntRange(1), default=20, show_default=True, help="Steps; the median counts.")
@engine_options
@as_json
def kernels(*, target: str, size: StepSize, runs: int, options: EngineOptions, as_json: bool) -> None:
    """Time every launch of a step on its own.

    \b
    Examples:
      toolkit bench kernels smol-plan
      toolkit bench kernels smol-plan --batch 8 --context 1024
      toolkit bench kernels smol-plan --tokens 512 --context 512
      toolkit bench kernels smol-plan --json > step.json
    """
    if is_url(target):
        raise UserError("kernels are measured in this process: give a plan, not a server's URL")
    from .profile import print_profile, profile

    result = profile(Path(target), options, size, runs)
    if as_json:
        click.echo(msgspec.json.encode(result))
    else:
        print_profile(result)


@command.command()
@click.argument("plan", metavar="PLAN", type=click.Path(path_type=Path))
@click.option("--reference", required=True, metavar="MODEL|PLAN", help="What PLAN should be like: a model, or a plan.")
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="Text to predict.  [default: a built-in]")
@click.option("--window", type=click.IntRange(2), default=512, show_default=True, help="Tokens that are run together.")
@engine_options
@as_json
def quality(
    *, plan: Path, reference: str, text: Path | None, window: int, options: EngineOptions, as_json: bool
) -> None:
    """How close a plan is to a reference: perplexity, KL divergence and top-1 agreement over a text.

    A model is run by transformers in float32, which needs the compile extra and the memory for it.

    \b
    Examples:
      toolkit bench quality smol-plan --reference SmolLM2-135M-Instruct.Q4_1.gguf
      toolkit bench quality int4-plan --reference float-plan --text book.txt --json
    """
    from .quality import print_quality
    from .quality import quality as measure

    console = Console(stderr=True)
    shown = TerminalPhases(console) if console.is_terminal and not as_json else Phases()
    with shown as phases, phases.phase("Quality"):
        result = measure(plan, reference, options, text=text, window=window, progress=phases.advance)
    if as_json:
        click.echo(msgspec.json.encode(result))
    else:
        print_quality(result)


def _show(result: LoadReport, as_json: bool) -> None:
    if as_json:
        click.echo(msgspec.json.encode(result))
        return
    click.echo(
        f"{result.benchmark} of {result.target}: {result.requests} requests of {result.prompt_tokens} + "
        f"{result.output_tokens} tokens in {result.seconds:.2f} s"
    )
    if result.start_seconds is not None:
        click.echo(f"  process start to first token  {result.start_seconds:.2f} s")
    click.echo(
        f"  {result.output_tokens_per_second:.1f} tokens/s generated, {result.total_tokens_per_second:.1f} tokens/s in "
        f"all, {result.requests_per_second:.2f} requests/s"
    )
    for name, times in (
        ("first token", result.first_token),
        ("between tokens", result.between_tokens),
        ("whole request", result.request),
    ):
        values = (times.mean, times.p50, times.p90, times.p99)
        shown = "  ".join(
            f"{label} {value * 1e3:8.2f} ms" for label, value in zip(("mean", "p50", "p90", "p99"), values, strict=True)
        )
        click.echo(f"  {name:<15}{shown}")
