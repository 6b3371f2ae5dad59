"""Times of a step's launches: how they are measured, and the file that `inspect --profile` reads."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np

from ..runtime.device.base import Device
from ..runtime.device.open import open_device
from ..runtime.errors import UserError
from ..runtime.layers import without_layer
from ..runtime.load import read_plan
from ..runtime.options import EngineOptions
from ..runtime.plan import Plan
from ..runtime.step import ROW, Int32, StepBatch
from .roofline import Machine, machine_of
from .workload import StepSize, work


class LaunchTime(msgspec.Struct, frozen=True):
    """One launch, timed on its own."""

    op: str
    kernel: str
    seconds: float
    """From its start until all threads are done."""
    occupancy: float
    """Share of that time in which a thread was at work, over all threads."""
    bytes: int
    """What it reads at least: see `workload.Work`."""
    flops: int


class Profile(msgspec.Struct, frozen=True):
    """Median times of one step's launches; `bench kernels --json` prints it."""

    plan: str
    digest: str
    """The plan's `content_digest`."""
    isa: str
    threads: int
    machine: Machine
    size: StepSize
    runs: int
    seconds: float
    """All launches together; a barrier stands after each, which an ordinary step needs less of."""
    launches: tuple[LaunchTime, ...]
    """As in the plan."""


def profile(directory: Path, options: EngineOptions, size: StepSize, runs: int) -> Profile:
    """Median times over `runs` steps.

    Raises UserError if the plan has no bucket for such a step, or the memory does not suffice.
    """
    plan = read_plan(directory)
    size = size.of(plan)
    program, machine = size.bucket(plan).launches, machine_of(plan)[0]
    device = open_device(directory, plan, options)
    try:
        step = make_step(device, size)
        device.profile(step)
        times = np.median([device.profile(step)[1] for _ in range(runs)], axis=0)
    finally:
        device.close()
    launches = []
    for launch, (seconds, *busy) in zip(program, times.tolist(), strict=True):
        occupancy = min(1.0, sum(busy) / (seconds * len(busy))) if seconds else 1.0
        need = work(plan, launch, size)
        launches.append(LaunchTime(launch.op, launch.kernel, seconds, round(occupancy, 4), need.bytes, need.flops))
    return Profile(
        plan=directory.resolve().name,
        digest=plan.content_digest,
        isa=device.isa,
        threads=times.shape[1] - 1,
        machine=machine.best(machine_of(plan)[0]),
        size=size,
        runs=runs,
        seconds=sum(each.seconds for each in launches),
        launches=tuple(launches),
    )


def read_profile(path: Path, directory: Path, plan: Plan) -> Profile:
    """The profile in a file. Raises UserError if there is none, or one of another plan than this, from `directory`."""
    how = f"make one with `toolkit bench kernels {directory} --json > step.json`"
    try:
        found = msgspec.json.decode(path.read_bytes(), type=Profile)
    except OSError as error:
        raise UserError(f"can't read the profile {path}: {error.strerror}; {how}") from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UserError(f"{path} is no profile: {error}; {how}") from None
    if found.digest != plan.content_digest:
        raise UserError(f"{path} was measured with another plan, {found.plan}, not with {directory}: {how}")
    return found


# --- the step ---------------------------------------------------------------------------------------------------------


def make_step(device: Device, size: StepSize) -> StepBatch:
    """A step of random tokens, one greedy row a sequence, over pages of its own."""
    batch, tokens, context = size.batch, size.tokens, size.context
    rng = np.random.default_rng(0)
    positions = np.tile(np.arange(context - tokens, context, dtype=np.int32), batch)
    rows = np.zeros(batch, ROW)
    rows["token"] = np.arange(tokens - 1, size.rows, tokens)
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
        tokens=rng.integers(0, device.plan.model.vocab_size, size.rows, dtype=np.int32),
        positions=positions,
        lengths=np.full(size.rows, context, np.int32),
        seq_start=np.arange(0, size.rows + 1, tokens, dtype=np.int32),
        context=np.full(batch, context, np.int32),
        rows=rows,
        slots=slots,
        pages=pages,
    )


def _slots(table: Int32, positions: Int32, tokens: int, page_tokens: int) -> Int32:
    sequences = np.repeat(np.arange(len(table)), tokens)
    return (table[sequences, positions // page_tokens] * page_tokens + positions % page_tokens).astype(np.int32)


# --- printing ---------------------------------------------------------------------------------------------------------


def print_profile(result: Profile) -> None:
    """Print it as a table: launches that differ only in their layer's number summed up, the slowest first."""
    from rich.table import Table

    from .console import report_console

    groups: dict[tuple[str, str], list[LaunchTime]] = defaultdict(list)
    for launch in result.launches:
        groups[without_layer(launch.op), launch.kernel].append(launch)
    console, size = report_console(), result.size
    console.print(
        f"[bold]{result.plan}[/]: {size.batch} sequences × {size.tokens} new tokens, context {size.context}: "
        f"{result.seconds * 1e3:.2f} ms in kernels, each timed on its own; {result.isa}, {result.threads} threads"
    )
    table = Table(box=None, pad_edge=False, header_style="dim")
    for column in ("op", "launches", "µs", "share", "GB/s", "GFLOP/s", "busy", "kernel"):
        table.add_column(column, justify="left" if column in ("op", "kernel") else "right")
    for (op, kernel), group in sorted(groups.items(), key=lambda item: -_seconds(item[1])):
        seconds = _seconds(group) or float("inf")
        cells = (
            str(len(group)),
            f"{seconds * 1e6:.1f}",
            f"{seconds / result.seconds:.1%}",
            f"{sum(each.bytes for each in group) / seconds / 1e9:.2f}",
            f"{sum(each.flops for each in group) / seconds / 1e9:.1f}",
            f"{sum(each.occupancy * each.seconds for each in group) / seconds:.0%}",
        )
        table.add_row(op, *cells, kernel)
    console.print(table)


def _seconds(group: list[LaunchTime]) -> float:
    return sum(each.seconds for each in group)
