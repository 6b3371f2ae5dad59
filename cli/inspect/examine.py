"""Everything there is to say about a plan, as data: what `--json` prints and the other forms show."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence

import msgspec

from ...kernels_templates.catalog import KernelSpec
from ...runtime.layers import without_layer
from ...runtime.plan import (
    Buffer,
    CacheResource,
    Choice,
    CudaModule,
    Kernel,
    Library,
    MemoryPlan,
    Model,
    PassReport,
    Plan,
    Text,
)
from ...runtime.tuning import Race, Tuning
from ..profile import Profile
from ..requirements import Requirements, requirements
from ..roofline import Machine
from ..workload import StepSize, work


class LaunchReport(msgspec.Struct, frozen=True):
    """A launch against the roofline."""

    op: str
    kernel: str
    bytes: int
    """What it reads at least."""
    flops: int
    seconds: float
    """By the roofline."""
    bound: str
    """memory or arithmetic."""
    measured: float | None = None
    """Seconds, if the step was profiled."""
    occupancy: float | None = None
    """Share of those in which a thread was at work, over all threads."""

    @property
    def time(self) -> float:
        """Measured, else estimated seconds."""
        return self.seconds if self.measured is None else self.measured


class OpSum(msgspec.Struct, frozen=True):
    """Launches that differ only in the number of their layer, summed up."""

    op: str
    """With `*` for the number."""
    launches: int
    bytes: int
    flops: int
    seconds: float
    measured: float | None
    bound: str

    @property
    def time(self) -> float:
        """Measured, else estimated seconds."""
        return self.seconds if self.measured is None else self.measured


class Resources(msgspec.Struct, frozen=True):
    """What a CUDA kernel takes of a multiprocessor."""

    arch: str
    threads: int
    """A block."""
    registers: int
    """A thread."""
    shared: int
    """Bytes a block."""
    spilled: int
    """Bytes of registers kept in memory, a thread."""


class KernelReport(msgspec.Struct, frozen=True):
    """A kernel, how often the program calls it, and whose code it is."""

    name: str
    family: str
    params: dict[str, int | str | float | bool]
    shape: dict[str, int]
    launches: int
    seconds: float
    """Of all its launches, by the roofline."""
    measured: float | None
    choices: tuple[Choice, ...]
    """C++ where there is none."""
    races: list[Race]
    """The races that the choices rest on."""
    resources: list[Resources] = []
    """On each GPU architecture."""


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
    """What is in a plan."""

    model: Model
    target: str
    max_batch: int
    captured_ops: int
    fused_ops: int
    passes: tuple[PassReport, ...]
    notes: tuple[str, ...]
    versions: dict[str, str]
    machine: Machine
    size: StepSize
    """The step that launches are for."""
    launches: list[LaunchReport]
    ops: list[OpSum]
    """The slowest first."""
    seconds: float
    """The step by the roofline."""
    measured: float | None
    """All launches together, each measured on its own."""
    memory: MemoryPlan
    buffers: tuple[Buffer, ...]
    """Activations of the step."""
    kernels: list[KernelReport]
    libraries: tuple[Library, ...]
    modules: tuple[CudaModule, ...]
    weights: list[WeightSum]
    caches: list[CacheSum]
    kv_bytes_per_token: float
    text: Text | None
    """None: token ids in, token ids out."""
    requirements: Requirements
    """What a machine must have, and what this one has."""

    @property
    def time(self) -> float:
        """Measured, else estimated seconds of the step."""
        return self.seconds if self.measured is None else self.measured


def examine(
    plan: Plan,
    machine: Machine,
    size: StepSize,
    *,
    profile: Profile | None = None,
    tuning: Tuning | None = None,
) -> Inspection:
    """Everything there is to say of a plan and a step of it; `profile` must be of such a step.

    Raises UserError if the plan can't run the step.
    """
    size = size.of(plan)
    launches = _launches(plan, machine, size, profile)
    return Inspection(
        model=plan.model,
        target=plan.target,
        max_batch=plan.max_batch,
        captured_ops=plan.report.captured_ops,
        fused_ops=plan.report.fused_ops,
        passes=plan.report.passes,
        notes=plan.report.notes,
        versions=plan.report.versions,
        machine=machine,
        size=size,
        launches=launches,
        ops=_sums(launches),
        seconds=sum(launch.seconds for launch in launches),
        measured=None if profile is None else profile.seconds,
        memory=plan.memory,
        buffers=plan.buffers(size.bucket(plan)),
        kernels=_kernels(plan, launches, tuning),
        libraries=plan.libraries,
        modules=plan.modules,
        weights=_weights(plan),
        caches=[_cache(cache) for cache in plan.caches],
        kv_bytes_per_token=plan.kv_bytes_per_token,
        text=plan.text,
        requirements=requirements(plan),
    )


def _launches(plan: Plan, machine: Machine, size: StepSize, profile: Profile | None) -> list[LaunchReport]:
    reports = []
    for index, launch in enumerate(size.bucket(plan).launches):
        need = work(plan, launch, size)
        memory, math = machine.seconds(need)
        bound = "memory" if memory >= math else "arithmetic"
        report = LaunchReport(launch.op, launch.kernel, need.bytes, need.flops, max(memory, math), bound)
        if profile is not None:
            time = profile.launches[index]
            report = msgspec.structs.replace(report, measured=time.seconds, occupancy=time.occupancy)
        reports.append(report)
    return reports


def _sums(launches: Sequence[LaunchReport]) -> list[OpSum]:
    groups: dict[str, list[LaunchReport]] = defaultdict(list)
    for launch in launches:
        groups[without_layer(launch.op)].append(launch)
    sums = [
        OpSum(
            op,
            len(group),
            sum(each.bytes for each in group),
            sum(each.flops for each in group),
            sum(each.seconds for each in group),
            _measured(group),
            group[0].bound,
        )
        for op, group in groups.items()
    ]
    return sorted(sums, key=lambda each: -each.time)


def _measured(launches: Sequence[LaunchReport]) -> float | None:
    times = [launch.measured for launch in launches if launch.measured is not None]
    return sum(times) if times else None


def _kernels(plan: Plan, launches: Sequence[LaunchReport], tuning: Tuning | None) -> list[KernelReport]:
    uses: dict[str, list[LaunchReport]] = defaultdict(list)
    for launch in launches:
        uses[launch.kernel].append(launch)
    reports = [
        KernelReport(
            name,
            kernel.family,
            kernel.params,
            kernel.shape,
            len(uses[name]),
            sum(each.seconds for each in uses[name]),
            _measured(uses[name]),
            kernel.choices,
            _races(kernel, tuning),
            _resources(plan, name),
        )
        for name, kernel in plan.kernels.items()
    ]
    return sorted(reports, key=lambda report: (report.family, report.name))


def _resources(plan: Plan, name: str) -> list[Resources]:
    found = ((module.arch, module.kernels.get(name)) for module in plan.modules if module.form == "cubin")
    return [
        Resources(arch, each.threads, each.registers, each.shared + each.static_shared, each.spilled)
        for arch, each in found
        if each is not None
    ]


def _races(kernel: Kernel, tuning: Tuning | None) -> list[Race]:
    symbol = KernelSpec(kernel.family, kernel.params).symbol
    races = tuning.races if tuning is not None else ()
    return [race for race in races if (race.kernel, race.shape) == (symbol, kernel.shape)]


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


def params_text(params: Mapping[str, int | str | float | bool]) -> str:
    """Parameters that are set, for people."""
    given = ((name, value) for name, value in params.items() if value not in ("", False))
    return ", ".join(name if value is True else f"{name} {value}" for name, value in given)
