"""Writing plan.json: the same inputs give the same bytes, so nothing of time, place or order of work goes in."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ..kernels_templates.catalog import KernelSpec
from ..runtime.plan import CacheResource, Kernel, PassReport, Plan
from ..runtime.step import MAX_TOP, RESULT, ROW
from .codegen.cpu import kernel_source_hash
from .shapes import Bounds

PLAN = "plan.json"


def write_plan(plan: Plan, directory: Path) -> None:
    """Write `directory/plan.json`."""
    text = msgspec.json.format(msgspec.json.encode(plan, order="sorted"), indent=1)
    (directory / PLAN).write_bytes(text + b"\n")


def kernel_records(kernels: Mapping[str, KernelSpec]) -> dict[str, Kernel]:
    """The plan's kernel index, by symbol."""
    return {
        name: Kernel(spec.family, dict(spec.params), kernel_source_hash(spec)) for name, spec in sorted(kernels.items())
    }


def timeless(reports: Sequence[PassReport]) -> tuple[PassReport, ...]:
    """Pass reports without the times, which differ from run to run."""
    return tuple(msgspec.structs.replace(report, seconds=0.0) for report in reports)


def host_bytes(bounds: Bounds, caches: Sequence[CacheResource]) -> int:
    """Bytes of the largest step's inputs and results: see `runtime.step`."""
    tokens, sequences, rows = bounds.max_tokens, bounds.max_sequences, bounds.max_rows
    step = 4 * (2 * tokens + 2 * sequences + 1) + rows * (ROW.itemsize + RESULT.itemsize + 8 * MAX_TOP)
    pages = sum(-(-bounds.max_context // cache.page_tokens) for cache in caches)
    return step + 4 * (len(caches) * tokens + sequences * pages)
