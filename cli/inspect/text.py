"""An inspection as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from ...runtime.plan import Buffer, Plan
from ..console import report_console
from ..requirements import sentences
from ..units import duration
from .examine import Inspection, KernelReport, LaunchReport, OpSum, Resources, params_text

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_MAP_ROWS, _MAP_COLUMNS = 12, 72


def print_inspection(plan: Plan, data: Inspection, every_launch: bool) -> None:
    """Print it; with `every_launch` every launch instead of sums over layers."""
    console, model = report_console(), data.model
    console.print(
        f"[bold]{model.name}[/]  {model.architecture}, {model.layers} layers × {model.hidden_size}, vocabulary "
        f"{model.vocab_size}, context {model.max_context}, {model.dtype}, weights {model.quantization}; target "
        f"{data.target}, up to {data.max_batch} sequences"
    )
    _print_passes(console, data)
    _print_launches(console, data, every_launch)
    _print_memory(console, data)
    for sentence in sentences(data.requirements, plan):
        console.print(f"needs {sentence}")
    _print_map(console, data)
    _print_text(console, data)
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
    size, machine, measured = data.size, data.machine, data.measured is not None
    console.print(
        f"\n[bold]{len(data.launches)} launches, {data.seconds * 1e3:.2f} ms by the roofline"
        + (f", {data.time * 1e3:.2f} ms measured one by one" if measured else "")
        + f"[/]  [dim]{size.batch} sequences × {size.tokens} new tokens, context {size.context}; "
        f"{machine.bandwidth / 1e9:.1f} GB/s, {machine.arithmetic / 1e9:.0f} GFLOP/s, "
        f"8 bits {machine.integer / 1e9:.0f} GOP/s{', measured on an H200' if data.modules else ''}[/]"
    )
    table = _table(
        "op", "launches", "MiB read", "µs", *(("measured", "roofline") if measured else ()), "share", "bound"
    )
    for number, name, each in _rows(data, every_launch):
        more = (f"{each.time * 1e6:.1f}", f"{each.seconds / each.time:.0%}" if each.time else "") if measured else ()
        share = f"{each.time / data.time:.0%}" if data.time else ""
        table.add_row(name, number, f"{each.bytes / 2**20:.2f}", f"{each.seconds * 1e6:.1f}", *more, share, each.bound)
    console.print(table)


def _rows(data: Inspection, every_launch: bool) -> Iterator[tuple[str, str, LaunchReport | OpSum]]:
    """Each row's number of launches, or the launch's number; its name; and its figures."""
    if every_launch:
        yield from ((str(number), launch.op, launch) for number, launch in enumerate(data.launches))
    else:
        yield from ((str(each.launches), each.op, each) for each in data.ops)


def _print_text(console: Console, data: Inspection) -> None:
    if data.text is None:
        console.print("\nno tokenizer: token ids in, token ids out")
    elif data.text.formats is None:
        console.print("\nforms of tool calls and reasoning: told by the chat template when it is served")
    else:
        formats = data.text.formats
        tools, reasoning = formats.tools or "no known form", formats.reasoning or "no known form"
        console.print(f"\ntool calls: {tools}, reasoning: {reasoning}")


def _print_memory(console: Console, data: Inspection) -> None:
    memory = data.memory
    console.print("\n[bold]Memory[/]")
    table = _table("", "MiB", "")
    table.add_row("weights", _mib(memory.weights), "")
    for weight in data.weights:
        table.add_row(f"  {weight.encoding} in {weight.layout}", _mib(weight.bytes), f"{weight.count} tensors")
    table.add_row("activations", _mib(memory.arena), f"{len(data.buffers)} buffers share them")
    table.add_row("host", _mib(memory.host), "")
    table.add_row(
        "KV cache, 1000 tokens", _mib(1000 * data.kv_bytes_per_token), f"{data.kv_bytes_per_token:.0f} B a token"
    )
    for cache in data.caches:
        window = f", window {cache.window}" if cache.window else ""
        name = f"  {cache.layers} layers {cache.dtype}{window}"
        table.add_row(name, _mib(1000 * cache.bytes_per_token), f"pages of {cache.page_tokens} tokens")
    console.print(table)


def _print_map(console: Console, data: Inspection) -> None:
    memory = data.memory
    if data.buffers:
        console.print("\n[bold]Activations[/]  [dim]bytes down, launches across[/]")
        console.print(memory_map(data.buffers, memory.arena))


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
    table = _table("family", "launches", "code", "parameters")
    for kernel in data.kernels:
        params = "; ".join(filter(None, (params_text(kernel.params), params_text(kernel.shape))))
        table.add_row(kernel.family, str(kernel.launches), describe_code(kernel), params)
    for column in table.columns[2:]:
        column.justify = "left"
    console.print(table)
    for library in data.libraries:
        console.print(f"{library.file}: {library.isa}, {library.bytes / 1024:.0f} KiB", style="dim")
    for module in data.modules:
        archs = f"{module.arch} and newer, as PTX" if module.form == "ptx" else module.arch
        console.print(f"{module.file}: {archs}, {module.bytes / 1024:.0f} KiB", style="dim")


def describe_code(kernel: KernelReport) -> str:
    """Whose code runs: a line a race with the winner's time and then the others', else a line a choice; of a CUDA
    kernel what it takes on each architecture."""
    lines = [_resources_text(each) for each in kernel.resources]
    for race in kernel.races:
        others = ", ".join(f"{name} {duration(each)}" for name, each in race.seconds.items() if name != race.chosen)
        won = f"{race.isa}, {_rows_text(race.rows)}: {race.chosen} {duration(race.seconds[race.chosen])}"
        lines.append(f"{won} ({others})" if others else won)
    if not lines:
        lines = [f"{each.isa}, up to {_rows_text(each.rows)}: {each.generator}" for each in kernel.choices]
    return "\n".join(lines) or "C++"


def _resources_text(each: Resources) -> str:
    spilled = f", {each.spilled} B spilled" if each.spilled else ""
    return (
        f"{each.arch}: {each.threads} threads, {each.registers} registers, {each.shared / 1024:.3g} KiB shared{spilled}"
    )


def _rows_text(rows: int) -> str:
    return f"{rows} row{'s' if rows > 1 else ''}"
