"""Writing plan.json: the same inputs give the same bytes, so nothing of time, place or order of work goes in."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from ..kernels_templates.catalog import KernelSpec
from ..runtime.plan import (
    MAJOR,
    MINOR,
    CacheResource,
    Kernel,
    Library,
    MemoryPlan,
    Model,
    Plan,
    Report,
    Text,
    TuningFile,
)
from ..runtime.step import ABI_HASH, MAX_TOP, RESULT, ROW
from ..runtime.tuning import TUNING, Tuning, encode_tuning
from .codegen.cpu import kernel_source_hash
from .program import Program
from .shapes import Bounds
from .weights_pack import PackedWeights

PLAN = "plan.json"


def make_plan(
    *,
    model: Model,
    target: str,
    bounds: Bounds,
    program: Program,
    libraries: tuple[Library, ...],
    weights: PackedWeights,
    text: Text | None,
    eos_token_ids: tuple[int, ...],
    bos_token_id: int | None,
    report: Report,
    tuning: TuningFile | None = None,
    deterministic: bool = False,
) -> Plan:
    """The plan of what was compiled."""
    passes = tuple(msgspec.structs.replace(each, seconds=0.0) for each in report.passes)
    return Plan(
        format="toolkit-plan",
        major=MAJOR,
        minor=MINOR,
        abi=ABI_HASH,
        model=model,
        target=target,
        max_batch=bounds.max_sequences,
        buckets=(program.bucket,),
        kernels=_kernels(program.lowered.kernels),
        libraries=libraries,
        weights=dict(weights.entries),
        weight_files=weights.files,
        caches=program.lowered.caches,
        memory=MemoryPlan(
            arena=program.arena,
            weights=sum(entry.bytes for entry in weights.entries.values()),
            host=host_bytes(bounds, program.lowered.caches),
            buffers=program.buffers,
        ),
        text=text,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        report=msgspec.structs.replace(report, passes=passes),
        fills=dict(weights.fills),
        tuning=tuning,
        deterministic=deterministic,
    )


def write_plan(plan: Plan, directory: Path) -> None:
    """Write `directory/plan.json`, keys sorted, with its digest."""
    signed = msgspec.structs.replace(plan, digest=plan.content_digest)
    text = msgspec.json.format(msgspec.json.encode(signed, order="sorted"), indent=1)
    (directory / PLAN).write_bytes(text + b"\n")


def write_tuning(tuning: Tuning, directory: Path) -> TuningFile:
    """Write `directory/tuning.json`."""
    content = encode_tuning(tuning)
    (directory / TUNING).write_bytes(content)
    return TuningFile(TUNING, len(content), hashlib.sha256(content).hexdigest())


def _kernels(kernels: Mapping[str, KernelSpec]) -> dict[str, Kernel]:
    return {
        name: Kernel(spec.family, dict(spec.params), kernel_source_hash(spec), dict(spec.shape), spec.choices)
        for name, spec in sorted(kernels.items())
    }


def host_bytes(bounds: Bounds, caches: Sequence[CacheResource]) -> int:
    """Bytes of the largest step's inputs and results: see `runtime.step`."""
    tokens, sequences, rows = bounds.max_tokens, bounds.max_sequences, bounds.max_rows
    step = 4 * (2 * tokens + 2 * sequences + 1) + rows * (ROW.itemsize + RESULT.itemsize + 8 * MAX_TOP)
    pages = sum(-(-bounds.max_context // cache.page_tokens) for cache in caches)
    return step + 4 * (len(caches) * tokens + sequences * pages)
