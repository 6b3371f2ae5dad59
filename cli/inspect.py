"""`toolkit inspect`: show what is in a plan."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from ..runtime.load import read_plan
from ..runtime.plan import Bucket, Buffer, CacheResource, Library, MemoryPlan, Model, PassReport, Plan
from .options import as_json
from .roofline import arithmetic_rate, read_bandwidth

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MAP_ROWS, _MAP_COLUMNS = 12, 72


class LaunchEstimate(msgspec.Struct, frozen=True):
    """A launch at T = 1 against the roofline of this machine."""

    op: str
    kernel: str
    bytes: int
    flops: int
    seconds: float
    bound: str
    """memory or arithmetic."""


class KernelUse(msgspec.Struct, frozen=True):
    """A kernel and how often the program calls it."""

    name: str
    family: str
    params: dict[str, int | str | float | bool]
    launches: int


class WeightSum(msgspec.Struct, frozen=True):
    """Weights of one encoding and layout."""

    encoding: str
    layout: str
    count: int
    bytes: int


class CacheSum(msgspec.Struct, frozen=True):
    """A cache group."""

    kind: str
    layers: int
    page_tokens: int
    bytes_per_token: float
    dtype: str
    window: int


class Inspection(msgspec.Struct, frozen=True):
    """What is in a plan; `--json` prints it."""

    model: Model
    target: str
    max_batch: int
    captured_ops: int
    fused_ops: int
    passes: tuple[PassReport, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    bandwidth: float
    """Bytes a second."""
    arithmetic: float
    """Float32 operations a second."""
    launches: list[LaunchEstimate]
    memory: MemoryPlan
    kernels: list[KernelUse]
    libraries: tuple[Library, ...]
    weights: list[WeightSum]
    caches: list[CacheSum]
    kv_bytes_per_token: float
    seconds_per_token: float
    """Decoding one sequence of a short context, by the roofline."""


@click.command("inspect")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--launches", "every_launch", is_flag=True, help="Show every launch instead of sums over layers.")
@as_json
def command(*, plan: Path, every_launch: bool, as_json: bool) -> None:
    """Show what is in PLAN: the model, what the passes did, each launch against this machine's roofline, memory,
    kernels, weights and caches.

    \b
    Examples:
      toolkit inspect smol-plan
      toolkit inspect smol-plan --launches
      toolkit inspect smol-plan --json | jq .seconds_per_token
    """
    inspection = examine(read_plan(plan), read_bandwidth(), arithmetic_rate())
    if as_json:
        click.echo(msgspec.json.encode(inspection))
        return
    from .console import report_console

    _print(report_console(), inspection, every_launch)


def examine(plan: Plan, bandwidth: float, arithmetic: float) -> Inspection:
    """Everything there is to say, given bytes and operations a second."""
    bucket = min(plan.buckets, key=lambda bucket: bucket.max_tokens)
    launches = _estimates(bucket, bandwidth, arithmetic)
    return Inspection(
        model=plan.model,
        target=plan.target,
        max_batch=plan.max_batch,
        captured_ops=plan.report.captured_ops,
        fused_ops=plan.report.fused_ops,
        passes=plan.report.passes,
        notes=plan.report.notes,
        versions=plan.report.versions,
        bandwidth=bandwidth,
        arithmetic=arithmetic,
        launches=launches,
        memory=plan.memory,
        kernels=_kernels(plan, launches),
        libraries=plan.libraries,
        weights=_weights(plan),
        caches=[_cache(cache) for cache in plan.caches],
        kv_bytes_per_token=plan.kv_bytes_per_token,
        seconds_per_token=sum(launch.seconds for launch in launches),
    )


def _estimates(bucket: Bucket, bandwidth: float, arithmetic: float) -> list[LaunchEstimate]:
    estimates = []
    for launch in bucket.launches:
        memory, math = launch.bytes / bandwidth, launch.flops / arithmetic
        bound = "memory" if memory >= math else "arithmetic"
        estimates.append(LaunchEstimate(launch.op, launch.kernel, launch.bytes, launch.flops, max(memory, math), bound))
    return estimates


def _kernels(plan: Plan, launches: Iterable[LaunchEstimate]) -> list[KernelUse]:
    counts: dict[str, int] = defaultdict(int)
    for launch in launches:
        counts[launch.kernel] += 1
    uses = [KernelUse(name, kernel.family, kernel.params, counts[name]) for name, kernel in plan.kernels.items()]
    return sorted(uses, key=lambda use: (use.family, use.name))


def _weights(plan: Plan) -> list[WeightSum]:
    sums: dict[tuple[str, str], list[int]] = defaultdict(lambda: [0, 0])
    for entry in plan.weights.values():
        total = sums[entry.encoding.name, entry.layout]
        total[0] += 1
        total[1] += entry.bytes
    ordered = sorted(sums.items(), key=lambda item: -item[1][1])
    return [WeightSum(encoding, layout, count, size) for (encoding, layout), (count, size) in ordered]


def _cache(cache: CacheResource) -> CacheSum:
    return CacheSum(cache.kind, len(cache.layers), cache.page_tokens, cache.bytes_per_token, cache.dtype, cache.window)


# --- printing ---------------------------------------------------------------------------------------------------------


def _print(console: Console, data: Inspection, every_launch: bool) -> None:
    model = data.model
    console.print(
        f"[bold]{model.name}[/]  {model.architecture}, {model.layers} layers × {model.hidden_size}, vocabulary "
        f"{model.vocab_size}, context {model.max_context}, {model.dtype}, weights {model.quantization}; target "
        f"{data.target}, up to {data.max_batch} sequences"
    )
    _print_passes(console, data)
    _print_launches(console, data, every_launch)
    _print_memory(console, data)
    _print_kernels(console, data)


def _table(*columns: str) -> Table:
    """A table whose first column is text and whose others are numbers."""
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index else "left")
    return table


def _print_passes(console: Console, data: Inspection) -> None:
    console.print(f"\n[bold]{data.captured_ops} ops captured, {data.fused_ops} after fusion[/]")
    table = _table("pass", "matches", "ops after")
    for report in data.passes:
        if report.matches:
            table.add_row(report.name, str(report.matches), str(report.ops_after))
    console.print(table)
    for note in (*data.notes, *(f"{each.name}: {note}" for each in data.passes for note in each.notes)):
        console.print(f"[yellow]![/] {note}")


def _print_launches(console: Console, data: Inspection, every_launch: bool) -> None:
    total = data.seconds_per_token
    console.print(
        f"\n[bold]{len(data.launches)} launches a token, {total * 1e3:.2f} ms by the roofline[/]  "
        f"[dim]{data.bandwidth / 1e9:.1f} GB/s, {data.arithmetic / 1e9:.0f} GFLOP/s[/]"
    )
    table = _table("op", "launches", "MiB read", "µs", "share", "bound by")
    groups: dict[str, list[LaunchEstimate]] = defaultdict(list)
    for number, launch in enumerate(data.launches):
        name = re.sub(r"(?<=[._])\d+", "*", launch.op)
        groups[f"{number:4} {launch.op}" if every_launch else name].append(launch)
    ordered = groups.items() if every_launch else sorted(groups.items(), key=lambda item: -_seconds(item[1]))
    for name, launches in ordered:
        seconds = _seconds(launches)
        size = sum(launch.bytes for launch in launches) / 2**20
        share = f"{seconds / total:.0%}" if total else ""
        table.add_row(name, str(len(launches)), f"{size:.2f}", f"{seconds * 1e6:.1f}", share, launches[0].bound)
    console.print(table)


def _seconds(launches: Iterable[LaunchEstimate]) -> float:
    return sum(launch.seconds for launch in launches)


def _print_memory(console: Console, data: Inspection) -> None:
    memory = data.memory
    console.print("\n[bold]Memory[/]")
    table = _table("", "MiB", "")
    table.add_row("weights", _mib(memory.weights), "")
    for weight in data.weights:
        table.add_row(f"  {weight.encoding} in {weight.layout}", _mib(weight.bytes), f"{weight.count} tensors")
    table.add_row("activations", _mib(memory.arena), f"{len(memory.buffers)} buffers share them")
    table.add_row("host", _mib(memory.host), "")
    table.add_row(
        "KV cache, 1000 tokens", _mib(1000 * data.kv_bytes_per_token), f"{data.kv_bytes_per_token:.0f} B a token"
    )
    for cache in data.caches:
        window = f", window {cache.window}" if cache.window else ""
        name = f"  {cache.layers} layers {cache.dtype}{window}"
        table.add_row(name, _mib(1000 * cache.bytes_per_token), f"pages of {cache.page_tokens} tokens")
    console.print(table)
    if memory.buffers:
        console.print("\n[bold]Activations[/]  [dim]bytes down, launches across[/]")
        console.print(memory_map(memory.buffers, memory.arena))


def _mib(size: float) -> str:
    return f"{size / 2**20:.2f}"


def memory_map(buffers: Iterable[Buffer], arena: int) -> str:
    """A picture of the arena: a row is a band of bytes, a column some launches; full blocks are bytes in use."""
    buffers = list(buffers)
    last = 1 + max(buffer.last for buffer in buffers)
    used = [[0.0] * _MAP_COLUMNS for _ in range(_MAP_ROWS)]
    band, step = arena / _MAP_ROWS, last / _MAP_COLUMNS
    for buffer in buffers:
        for row in range(_MAP_ROWS):
            share = min(buffer.offset + buffer.bytes, (row + 1) * band) - max(buffer.offset, row * band)
            if share <= 0:
                continue
            for column in range(_MAP_COLUMNS):
                if buffer.first < (column + 1) * step and buffer.last + 1 > column * step:
                    used[row][column] = min(1.0, used[row][column] + share / band)
    return "\n".join("".join(" ░▒▓█"[round(4 * value)] for value in row) for row in used)


def _print_kernels(console: Console, data: Inspection) -> None:
    console.print("\n[bold]Kernels[/]")
    table = _table("family", "launches", "parameters")
    for kernel in data.kernels:
        params = ", ".join(f"{name}={value}" for name, value in kernel.params.items() if value not in ("", False))
        table.add_row(kernel.family, str(kernel.launches), params)
    table.columns[2].justify = "left"
    console.print(table)
    for library in data.libraries:
        console.print(f"{library.file}: {library.isa}, {library.bytes / 1024:.0f} KiB", style="dim")
