"""What differs between two plans."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import msgspec

from ...runtime.layers import without_layer
from ...runtime.plan import Kernel, Plan
from ..console import report_console
from ..roofline import Machine
from ..units import duration
from ..units import size as bytes_text
from ..workload import StepSize
from .examine import Inspection, examine, params_text

Scalar = str | int | float | bool | None
Facts = dict[str, Scalar]


class Change(msgspec.Struct, frozen=True):
    """A fact that is not the same in both plans; None where a plan has no such thing."""

    section: str
    name: str
    before: Scalar
    after: Scalar


def compare(before: Plan, after: Plan, machine: Machine, size: StepSize) -> list[Change]:
    """Everything that differs, by section; nothing if and only if the plans are the same.

    Raises UserError if a plan can't run a step of this size.
    """
    left, right = (dict(_sections(plan, machine, size)) for plan in (before, after))
    changes: list[Change] = []
    for section, facts in left.items():
        names = dict.fromkeys((*facts, *right[section]))
        pairs = ((name, facts.get(name), right[section].get(name)) for name in names)
        changes += [Change(section, name, one, other) for name, one, other in pairs if one != other]
        if section == "launches":
            changes += _kernel_changes(before.kernels, after.kernels)
    if not changes:
        fields = (name for name in before.__struct_fields__ if getattr(before, name) != getattr(after, name))
        changes = [Change("details", name, "one way", "another way") for name in fields if name != "digest"]
    return changes


# --- facts ------------------------------------------------------------------------------------------------------------


def _sections(plan: Plan, machine: Machine, size: StepSize) -> Iterator[tuple[str, Facts]]:
    inspection = examine(plan, machine, size)
    bucket, memory = size.of(plan).bucket(plan), plan.memory
    launches = bucket.launches
    yield "model", _flat(plan.model)
    yield "options", _scalars(plan) | _prefixed((bucket.name, _scalars(bucket)) for bucket in plan.buckets)
    yield "text", _flat(plan.text) if plan.text is not None else {}
    yield "passes", _passes(plan)
    notes = (*plan.report.notes, *(note for each in plan.report.passes for note in each.notes))
    yield "notes", dict.fromkeys(notes, "noted")
    yield "ops", dict(Counter(launch.op.partition(":")[0] for launch in launches))
    uses = ((without_layer(launch.op), _describe(plan.kernels[launch.kernel])) for launch in launches)
    yield "launches", {"launches": len(launches), **_counted(uses)}
    yield "weights", _weights(plan, inspection)
    yield (
        "memory",
        {
            "arena bytes": memory.arena,
            "weights bytes": memory.weights,
            "host bytes": memory.host,
            "activations": len(plan.buffers(bucket)),
        },
    )
    groups = ((f"group {number}", _flat(cache)) for number, cache in enumerate(plan.caches))
    yield "KV cache", {"bytes a token": plan.kv_bytes_per_token, **_prefixed(groups)}
    yield (
        "estimate",
        {
            "bytes read": sum(launch.bytes for launch in inspection.launches),
            "operations": sum(launch.flops for launch in inspection.launches),
            "seconds": inspection.seconds,
        },
    )
    yield "versions", dict(plan.report.versions)
    yield "files", _files(plan)


def _files(plan: Plan) -> Facts:
    hashes: Facts = {file.file: file.sha256 for file in (*plan.code, *plan.weight_files)}
    return hashes if plan.tuning is None else hashes | {plan.tuning.file: plan.tuning.sha256}


def _prefixed(groups: Iterable[tuple[str, Facts]]) -> Facts:
    return {f"{prefix}: {name}": value for prefix, facts in groups for name, value in facts.items()}


def _scalars(record: msgspec.Struct) -> Facts:
    """The fields of a record that hold no records."""
    fields = msgspec.structs.asdict(record).items()
    return {name: _scalar(value) for name, value in fields if _is_plain(value) and name != "digest"}


def _flat(record: msgspec.Struct) -> Facts:
    """The fields of a record, and one for each entry of a mapping."""
    facts: Facts = {}
    for name, value in msgspec.structs.asdict(record).items():
        if isinstance(value, dict):
            facts |= {f"{name}: {key}": _scalar(item) for key, item in value.items()}
        else:
            facts[name] = _scalar(value)
    return facts


def _is_plain(value: object) -> bool:
    return isinstance(value, Scalar) or (isinstance(value, tuple) and all(isinstance(item, Scalar) for item in value))


def _scalar(value: object) -> Scalar:
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    return value if isinstance(value, Scalar) else str(value)


def _passes(plan: Plan) -> Facts:
    runs: Counter[str] = Counter()
    facts: Facts = {}
    for each in plan.report.passes:
        runs[each.name] += 1
        again = f" ({runs[each.name]})" if runs[each.name] > 1 else ""
        facts[each.name + again] = f"{each.matches} matches, {each.ops_before} to {each.ops_after} ops"
    return facts


def _weights(plan: Plan, inspection: Inspection) -> Facts:
    sums: Facts = {f"{each.encoding} in {each.layout}: bytes": each.bytes for each in inspection.weights}
    return sums | _counted(
        (without_layer(name), f"{entry.encoding.name} in {entry.layout}, {' × '.join(map(str, entry.shape))}")
        for name, entry in plan.weights.items()
    )


def _counted(pairs: Iterable[tuple[str, str]]) -> Facts:
    """For each name its values with how often they occur."""
    found: dict[str, Counter[str]] = defaultdict(Counter)
    for name, value in pairs:
        found[name][value] += 1
    return {
        name: "; ".join(f"{times} × {value}" for value, times in sorted(each.items())) for name, each in found.items()
    }


# --- kernels ----------------------------------------------------------------------------------------------------------


def _kernel_changes(before: Mapping[str, Kernel], after: Mapping[str, Kernel]) -> Iterator[Change]:
    """Kernels of both plans whose code changed; then those of one plan, paired with the most similar of its family."""
    for name in sorted(before.keys() & after.keys()):
        yield from _kernel_change(before[name], after[name])
    removed = [before[name] for name in sorted(before.keys() - after.keys())]
    added = [after[name] for name in sorted(after.keys() - before.keys())]
    for old in removed:
        relatives = [new for new in added if new.family == old.family]
        if relatives:
            new = min(relatives, key=lambda each: len(list(_kernel_change(old, each))))
            added.remove(new)
            yield from _kernel_change(old, new)
        else:
            yield Change("kernels", old.family, _describe(old), None)
    yield from (Change("kernels", new.family, None, _describe(new)) for new in added)


def _kernel_change(old: Kernel, new: Kernel) -> Iterator[Change]:
    one, other = _facts_of(old), _facts_of(new)
    names = [name for name in dict.fromkeys((*one, *other)) if one.get(name) != other.get(name)]
    for name in names if len(names) == 1 else [name for name in names if name != "source_hash"]:
        yield Change("kernels", f"{old.family}: {name}", one.get(name), other.get(name))


def _facts_of(kernel: Kernel) -> Facts:
    choices = "; ".join(f"{each.isa} {each.rows} rows: {each.generator}" for each in kernel.choices)
    return {**kernel.params, **kernel.shape, "code": choices or "cpp", "source_hash": kernel.source_hash}


def _describe(kernel: Kernel) -> str:
    return f"{kernel.family}({params_text(kernel.params)})"


# --- printing ---------------------------------------------------------------------------------------------------------


def print_changes(before: Path, after: Path, changes: list[Change]) -> None:
    """Print a table a section."""
    from rich.table import Table

    console = report_console()
    if not changes:
        console.print(f"{before} and {after} are the same")
        return
    console.print(f"[bold]{before}[/] → [bold]{after}[/]: {len(changes)} differences")
    sections: dict[str, list[Change]] = defaultdict(list)
    for change in changes:
        sections[change.section].append(change)
    for section, group in sections.items():
        console.print(f"\n[bold]{section}[/]")
        if section == "notes":
            for change in group:
                console.print(f"{'-' if change.after is None else '+'} {change.name}")
            continue
        table = Table(box=None, pad_edge=False, show_header=False)
        for change in group:
            table.add_row(change.name, _text(change, change.before), "→", _text(change, change.after), _growth(change))
        console.print(table)


def _text(change: Change, value: Scalar) -> str:
    match value:
        case None:
            return "-"
        case bool() | str():
            return re.sub(r"\b([0-9a-f]{12})[0-9a-f]{52}\b", r"\1", str(value))
        case int() | float() if "bytes" in change.name:
            return bytes_text(value)
        case float() if change.name == "seconds":
            return duration(value)
    return f"{value:,}"


def _growth(change: Change) -> str:
    match change.before, change.after:
        case ((int() | float() as before), (int() | float() as after)) if before:
            return f"[dim]{after / before - 1:+.0%}[/]"
    return ""
