"""Times of a step's launches, against the roofline."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from ..runtime.device.base import Device
from ..runtime.device.open import open_device
from ..runtime.errors import UserError
from ..runtime.load import read_plan
from ..runtime.options import EngineOptions
from ..runtime.plan import Launch, Plan
from ..runtime.step import ROW, Int32, StepBatch


class KernelTime(msgspec.Struct, frozen=True):
    """One launch, or the same launch of all layers, in one step."""

    op: str
    kernel: str
    launches: int
    seconds: float
    bytes: int
    """Weights and other bytes that do not grow with the step."""

    @property
    def bandwidth(self) -> float:
        """Those bytes a second."""
        return self.bytes / self.seconds if self.seconds else 0.0


class Profile(msgspec.Struct, frozen=True):
    """Times of one step; `--json` prints it."""

    plan: str
    batch: int
    tokens: int
    context: int
    seconds: float
    """All launches together; a barrier stands after each, which an ordinary step needs less of."""
    launches: list[KernelTime]


def profile(directory: Path, options: EngineOptions, *, batch: int, tokens: int, context: int, runs: int) -> Profile:
    """Median times over `runs` steps of `batch` sequences, which have `context` tokens, `tokens` of them new.

    Raises UserError if the plan has no bucket for such a step, or the memory does not suffice.
    """
    plan = read_plan(directory)
    program = _program(plan, batch, tokens)
    if not tokens <= context <= plan.model.max_context:
        raise UserError(f"--context must be {tokens} to {plan.model.max_context}, not {context}")
    device = open_device(directory, plan, options)
    try:
        step = make_step(device, batch, tokens, context)
        device.profile(step)
        times = np.median([device.profile(step) for _ in range(runs)], axis=0)
    finally:
        device.close()
    return Profile(directory.name, batch, tokens, context, float(times.sum()), _by_layer(program, times))


def _program(plan: Plan, batch: int, tokens: int) -> tuple[Launch, ...]:
    for bucket in plan.buckets:
        if batch * tokens <= bucket.max_tokens and batch <= min(bucket.max_sequences, bucket.max_rows):
            return (*bucket.forward, *bucket.sample)
    largest = plan.buckets[-1]
    raise UserError(
        f"a step of this plan has at most {largest.max_tokens} tokens and {largest.max_sequences} sequences, not "
        f"{batch * tokens} and {batch}: lower --batch or --tokens"
    )


def make_step(device: Device, batch: int, tokens: int, context: int) -> StepBatch:
    """A step of random tokens, one greedy row a sequence, over pages of its own."""
    rng = np.random.default_rng(0)
    total = batch * tokens
    positions = np.tile(np.arange(context - tokens, context, dtype=np.int32), batch)
    rows = np.zeros(batch, ROW)
    rows["token"] = np.arange(tokens - 1, total, tokens)
    rows["sample"], rows["target"], rows["top_p"], rows["repetition_penalty"] = 1, -1, 1.0, 1.0
    slots, pages = [], []
    for limit, cache in zip(device.pages, device.plan.caches, strict=True):
        each = -(-context // cache.page_tokens)
        if batch * each >= limit:
            raise UserError(f"the cache has room for {(limit - 1) // each} such sequences, not {batch}: raise --memory")
        table = np.arange(1, batch * each + 1, dtype=np.int32).reshape(batch, each)
        pages.append(table)
        slots.append(_slots(table, positions, tokens, cache.page_tokens))
    return StepBatch(
        tokens=rng.integers(0, device.plan.model.vocab_size, total, dtype=np.int32),
        positions=positions,
        seq_start=np.arange(0, total + 1, tokens, dtype=np.int32),
        context=np.full(batch, context, np.int32),
        rows=rows,
        slots=slots,
        pages=pages,
    )


def _slots(table: Int32, positions: Int32, tokens: int, page_tokens: int) -> Int32:
    sequences = np.repeat(np.arange(len(table)), tokens)
    return (table[sequences, positions // page_tokens] * page_tokens + positions % page_tokens).astype(np.int32)


def _by_layer(program: tuple[Launch, ...], times: npt.NDArray[np.float64]) -> list[KernelTime]:
    """Launches that differ only in their layer's number, summed up, the slowest first."""
    groups: dict[tuple[str, str], list[tuple[float, int]]] = defaultdict(list)
    for launch, seconds in zip(program, times.tolist(), strict=True):
        groups[re.sub(r"(?<=[._])\d+", "*", launch.op), launch.kernel].append((seconds, launch.bytes))
    sums = [
        KernelTime(op, kernel, len(group), sum(seconds for seconds, _ in group), sum(size for _, size in group))
        for (op, kernel), group in groups.items()
    ]
    return sorted(sums, key=lambda each: -each.seconds)


def print_profile(result: Profile) -> None:
    """Print it as a table."""
    from rich.table import Table

    from .console import report_console

    console = report_console()
    console.print(
        f"[bold]{result.plan}[/]: {result.batch} sequences × {result.tokens} new tokens, context {result.context}: "
        f"{result.seconds * 1e3:.2f} ms in kernels, each timed on its own"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("op", "launches", "µs", "share", "GB/s of weights", "kernel"):
        table.add_column(column, justify="left" if column in ("op", "kernel") else "right")
    for each in result.launches:
        share = f"{each.seconds / result.seconds:.1%}" if result.seconds else ""
        cells = (f"{each.launches}", f"{each.seconds * 1e6:.1f}", share, f"{each.bandwidth / 1e9:.2f}")
        table.add_row(each.op, *cells, each.kernel)
    console.print(table)
