"""`toolkit models`: list the architectures that are tested."""

from __future__ import annotations

import click
import msgspec

from ..models.coverage import PROOFS, Architecture, architectures
from .options import as_json


@click.command("models")
@as_json
def command(as_json: bool) -> None:
    """List the tested architectures and what is proved of each: that its logits equal those of Hugging Face.

    Others compile too, if they are made of known parts; `toolkit compile` says at once what is missing.

    \b
    Examples:
      toolkit models
      toolkit models --json
    """
    found = architectures()
    if as_json:
        click.echo(msgspec.json.encode(found))
    else:
        _print(found)


def _print(found: tuple[Architecture, ...]) -> None:
    from rich.markup import escape
    from rich.table import Table

    from .console import report_console

    table = Table(box=None, pad_edge=False)
    table.add_column("model type", no_wrap=True)
    table.add_column("models", ratio=3)
    for proof in PROOFS:
        table.add_column(proof, justify="center")
    table.add_column("RoPE", ratio=1)
    table.add_column("features", ratio=3)
    for each in found:
        marks = ["[green]✓[/]" if proof in each.proved else "" for proof in PROOFS]
        texts = (each.model_type, each.names, ", ".join(each.rope), ", ".join(each.features))
        kind, names, rope, features = map(escape, texts)
        table.add_row(kind, names, *marks, rope, features)
    report_console().print(table)
