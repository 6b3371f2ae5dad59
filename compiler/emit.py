"""Writing plan.json: the same inputs give the same bytes, so nothing of time, place or order of work goes in."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import msgspec

from ..runtime.plan import (
    MAJOR,
    MINOR,
    CacheResource,
    MemoryPlan,
    Model,
    Plan,
    Report,
    Text,
    TuningFile,
)
from ..runtime.step import ABI_HASH, MAX_TOP, RESULT, ROW
from ..runtime.tuning import TUNING, Tuning, encode_tuning
from .code import Code
from .program import Program
from .shapes import Bounds
from .weights_pack import PackedWeights

PLAN = "plan.json"


def make_plan(
    *,
    model: Model,
    target: str,
    bounds: Bounds,
    programs: Sequence[Program],
    code: Code,
    weights: PackedWeights,
    text: Text | None,
    eos_token_ids: tuple[int, ...],
    bos_token_id: int | None,
    report: Report,
    tuning: TuningFile | None = None,
    deterministic: bool = False,
) -> Plan:
    """The plan of what was compiled."""
    largest = max(programs, key=lambda program: program.arena)
    caches, several = largest.lowered.caches, len(programs) > 1
    passes = tuple(msgspec.structs.replace(each, seconds=0.0) for each in report.passes)
    return Plan(
        format="toolkit-plan",
        major=MAJOR,
        minor=MINOR,
        abi=ABI_HASH,
        model=model,
        target=target,
        max_batch=bounds.max_sequences,
        buckets=tuple(
            msgspec.structs.replace(program.bucket, buffers=program.buffers if several else ()) for program in programs
        ),
        kernels=dict(code.kernels),
        libraries=code.libraries,
        weights=dict(weights.entries),
        weight_files=weights.files,
        caches=caches,
        memory=MemoryPlan(
            arena=largest.arena,
            weights=sum(entry.bytes for entry in weights.entries.values()),
            host=host_bytes(bounds, caches),
            buffers=() if several else largest.buffers,
        ),
        text=text,
        eos_token_ids=eos_token_ids,
        bos_token_id=bos_token_id,
        report=msgspec.structs.replace(report, passes=passes, versions=report.versions | dict(code.versions)),
        fills=dict(weights.fills),
        tuning=tuning,
        modules=code.modules,
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


def host_bytes(bounds: Bounds, caches: Sequence[CacheResource]) -> int:
    """Bytes of the largest step's inputs and results: see `runtime.step`."""
    tokens, sequences, rows = bounds.max_tokens, bounds.max_sequences, bounds.max_rows
    step = 4 * (2 * tokens + 2 * sequences + 1) + rows * (ROW.itemsize + RESULT.itemsize + 8 * MAX_TOP)
    pages = sum(-(-bounds.max_context // cache.page_tokens) for cache in caches)
    return step + 4 * (len(caches) * tokens + sequences * pages)
