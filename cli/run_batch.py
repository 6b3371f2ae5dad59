"""`toolkit run-batch`: answer a file of requests."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from pathlib import Path

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from ..runtime.errors import InternalError, UserError
from ..runtime.options import EngineOptions, TextOptions
from ..runtime.server.batch import Batch, Tally
from .options import engine_options, text_options

_PATH = click.Path(path_type=Path, dir_okay=False)


@click.command("run-batch")
@click.option("-i", "--input-file", "source", type=_PATH, required=True, help="Requests, one a line.")
@click.option("-o", "--output-file", "output", type=_PATH, required=True, help="Answers, one a line.")
@click.option("-m", "--model", "--plan", "plan", type=click.Path(path_type=Path), required=True, help="The plan.")
@click.option("--concurrency", type=click.IntRange(1), help="Requests at a time.  [default: twice what runs at once]")
@text_options
@engine_options
def command(
    *,
    source: Path,
    output: Path,
    plan: Path,
    concurrency: int | None,
    text: TextOptions,
    options: EngineOptions,
) -> None:
    """Answer the requests of a file in OpenAI's batch format, without a server.

    A run that was interrupted is continued by the same command: what is answered stays, what failed is asked again.

    \b
    Examples:
      toolkit run-batch -i requests.jsonl -o answers.jsonl -m smol-plan
      toolkit run-batch -i requests.jsonl -o answers.jsonl -m smol-plan --concurrency 8 --memory 4GiB
    """
    batch = Batch(source, output)
    total, began = batch.total(), time.monotonic()
    asyncio.run(_run(batch, total=total, plan=plan, options=options, concurrency=concurrency, text=text))
    _report(batch, time.monotonic() - began)


async def _run(
    batch: Batch,
    *,
    total: int,
    plan: Path,
    options: EngineOptions,
    concurrency: int | None,
    text: TextOptions,
) -> None:
    from ..runtime.process import spawn_engine
    from ..runtime.prompt import Prompts
    from ..runtime.server.app import create_app
    from ..runtime.server.http import guarded
    from ..runtime.server.options import HttpOptions
    from ..runtime.server.service import Service

    engine = spawn_engine(plan, options)
    service = Service(engine.plan, engine, partial(Prompts.open, plan, engine.plan, text))
    service.start()
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        disable=not Console(stderr=True).is_terminal,
    )
    task = bar.add_task("requests", total=total)

    def show(tally: Tally) -> None:
        bar.update(task, completed=tally.done)

    try:
        await service.prompts()
        await engine.ready()
        await service.heart.stats()
        running = options.max_num_seqs or engine.plan.max_batch
        with bar:
            await batch.run(
                guarded(create_app(service), HttpOptions()),
                concurrency=concurrency or 2 * running,
                alive=lambda: service.heart.problem if service.heart.dead else "",
                progress=show,
            )
    finally:
        await service.stop()
        await engine.close()


def _report(batch: Batch, seconds: float) -> None:
    """Say how it went. Raises UserError or InternalError if not all is answered."""
    tally = batch.tally
    parts = [f"{tally.answered} answered", f"{tally.refused} refused", f"{tally.failed} failed"]
    parts += [f"{tally.before} done before"] * bool(tally.before)
    click.echo(f"{', '.join(parts)} in {seconds:.1f} s", err=True)
    if tally.failed:
        raise InternalError(f"{tally.failed} requests failed, as {batch.output} says; run again to repeat them")
    if tally.refused:
        raise UserError(f"{tally.refused} requests were refused: their lines in {batch.output} say why")
