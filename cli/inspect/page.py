"""The HTML page: what its template and script are given."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import jinja2
import msgspec

from ...kernels_templates.catalog import ArgSpec
from ...kernels_templates.registry import families
from ...runtime.layers import split_layers, without_layer
from ...runtime.plan import ArenaArg, Arg, Buffer, CacheArg, ConstArg, DimArg, InputArg, Launch, Plan, WeightArg
from ..profile import Profile
from ..requirements import sentences
from ..units import duration, size
from ..workload import named_args
from .examine import Inspection, params_text
from .text import describe_code

_SHARED = Path(__file__).parents[2] / "runtime/server/page"
"""What this page has from the server's: how elements are made, and colors."""
_COLORS = 9
"""Families with a color of their own; the others share the last."""


class WeightKind(msgspec.Struct, frozen=True):
    """Weights that differ only in the number of their layer."""

    name: str
    count: int
    encodings: str
    layouts: str
    shapes: str
    bytes: int


def render_page(plan: Plan, inspection: Inspection, profile: Profile | None) -> str:
    """One self-contained page about a plan and a step of it."""
    program = inspection.size.bucket(plan).launches
    live = live_bytes(inspection.buffers, len(program))
    return (
        _environment()
        .get_template("page.html.j2")
        .render(
            plan=plan,
            data=inspection,
            profile=profile,
            colors=_colors(inspection),
            kinds=_weight_kinds(plan),
            live=max(live, default=0),
            needs=list(sentences(inspection.requirements, plan)),
            json=_script_json(_script_data(plan, inspection, program, live)),
        )
    )


def live_bytes(buffers: Iterable[Buffer], launches: int) -> list[int]:
    """For each launch, the bytes of activations that are alive: no arena can be smaller than the most."""
    steps = [0] * (launches + 1)
    for buffer in buffers:
        steps[buffer.first] += buffer.bytes
        steps[buffer.last + 1] -= buffer.bytes
    return list(accumulate(steps))[:-1]


def _environment() -> jinja2.Environment:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([Path(__file__).parent / "page", _SHARED]),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {"size": size, "duration": duration, "params": params_text, "code": describe_code}
    return environment


def _colors(inspection: Inspection) -> dict[str, int]:
    """A color's number for each kernel family, the slowest first."""
    families = {kernel.name: kernel.family for kernel in inspection.kernels}
    times: dict[str, float] = defaultdict(float)
    for launch in inspection.launches:
        times[families[launch.kernel]] += launch.time
    return {
        family: min(rank, _COLORS) for rank, family in enumerate(sorted(times, key=times.__getitem__, reverse=True))
    }


def _weight_kinds(plan: Plan) -> list[WeightKind]:
    groups: dict[str, list[str]] = defaultdict(list)
    for name in plan.weights:
        groups[without_layer(name)].append(name)
    kinds = []
    for kind, names in groups.items():
        entries = [plan.weights[name] for name in names]
        encodings = Counter(entry.encoding.name for entry in entries)
        shown = [f"{name} × {count}" if len(encodings) > 1 else name for name, count in encodings.most_common()]
        shapes = dict.fromkeys(" × ".join(map(str, entry.shape)) for entry in entries)
        layouts = dict.fromkeys(entry.layout for entry in entries)
        total = sum(entry.bytes for entry in entries)
        kinds.append(WeightKind(kind, len(names), ", ".join(shown), ", ".join(layouts), ", ".join(shapes), total))
    return sorted(kinds, key=lambda kind: -kind.bytes)


# --- for the script ---------------------------------------------------------------------------------------------------


def _script_json(data: Mapping[str, Any]) -> str:
    """JSON that may stand in a script element: nothing in it can end the element."""
    return msgspec.json.encode(data).decode().replace("<", "\\u003c")


def _script_data(plan: Plan, inspection: Inspection, program: Sequence[Launch], live: list[int]) -> dict[str, Any]:
    """What the graph, the timeline, the memory map and the details are drawn from; long lists are tables of rows."""
    numbers = {name: number for number, name in enumerate(plan.kernels)}
    colors, known = _colors(inspection), families(plan.kind)
    return {
        "launches": _table(
            ("op", "kernel", "args", "barrier", "bytes", "flops", "seconds", "memoryBound", "measured", "occupancy"),
            (
                (
                    launch.op,
                    numbers[launch.kernel],
                    [_arg(arg) for arg in launch.args],
                    launch.barrier,
                    report.bytes,
                    report.flops,
                    report.seconds,
                    report.bound == "memory",
                    report.measured,
                    report.occupancy,
                )
                for launch, report in zip(program, inspection.launches, strict=True)
            ),
        ),
        "kernels": [
            {
                "name": name,
                "family": kernel.family,
                "color": colors.get(kernel.family, _COLORS),
                "params": params_text(kernel.params),
                "epilogue": kernel.params.get("epilogue", ""),
                "doc": known[kernel.family].doc if kernel.family in known else "",
                "args": _arg_names(plan, program, name),
            }
            for name, kernel in plan.kernels.items()
        ],
        "parts": [
            {"name": part.name, "layers": part.layers, "launches": part.launches}
            for part in split_layers(plan, program)
        ],
        "weights": _table(
            ("name", "encoding", "layout", "shape", "bytes", "sources"),
            (
                (name, entry.encoding.name, entry.layout, entry.shape, entry.bytes, entry.sources)
                for name, entry in plan.weights.items()
            ),
        ),
        "buffers": _table(
            ("value", "offset", "bytes", "first", "last"),
            ((each.value, each.offset, each.bytes, each.first, each.last) for each in inspection.buffers),
        ),
        "caches": [{"layers": cache.layers, "dtype": cache.dtype, "window": cache.window} for cache in plan.caches],
        "live": live,
        "arena": plan.memory.arena,
        "machine": inspection.machine,
        "capacity": {
            "fixed": [["weights", plan.memory.weights], ["activations", plan.memory.arena], ["host", plan.memory.host]],
            "kv": plan.kv_bytes_per_token,
            "context": plan.model.max_context,
            "sequences": plan.max_batch,
        },
    }


def _table(columns: Sequence[str], rows: Iterable[Sequence[Any]]) -> dict[str, Any]:
    return {"columns": columns, "rows": list(rows)}


def _arg(arg: Arg) -> list[str | int] | int | float:
    match arg:
        case ArenaArg():
            return ["arena", arg.value, arg.offset, arg.bytes]
        case WeightArg():
            return ["weight", arg.name]
        case CacheArg():
            return ["cache", arg.group, arg.slot]
        case InputArg():
            return ["input", arg.name, arg.group]
        case DimArg():
            return ["dim", arg.name, arg.factor]
        case ConstArg():
            return arg.value


def _arg_names(plan: Plan, program: Sequence[Launch], kernel: str) -> list[tuple[str, bool]]:
    """Name of each argument, and whether the kernel writes it; nothing, if the catalog has no such kernel any more."""
    launch = next((launch for launch in program if launch.kernel == kernel), None)
    return [] if launch is None else [(spec.name, _is_written(spec)) for spec, _ in named_args(plan, launch)]


def _is_written(spec: ArgSpec) -> bool:
    return spec.role in ("out", "scratch") or (spec.role == "cache" and not spec.ctype.startswith("const"))
