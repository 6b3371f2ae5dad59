"""An independent check of a memory plan: it replays the launches on the planned ranges and trusts nothing else.

It shares no code with the planner, and knows what a launch reads and writes from the kernel catalog alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ..kernels_templates.catalog import Family, KernelSpec
from ..kernels_templates.registry import FAMILIES
from ..kernels_templates.render import arguments
from ..runtime.errors import InternalError
from ..runtime.plan import ArenaArg, Bucket, Buffer, CacheArg, Launch


@dataclass(frozen=True)
class Access:
    """A range of arena bytes that one launch reads or writes."""

    launch: int
    value: str
    start: int
    stop: int

    def meets(self, other: Access) -> bool:
        """Whether the ranges share a byte."""
        return self.start < other.stop and other.start < self.stop

    def __str__(self) -> str:
        return f"launch {self.launch}, {self.value} at [{self.start}, {self.stop})"


def check_memory(
    bucket: Bucket,
    kernels: Mapping[str, KernelSpec],
    buffers: Sequence[Buffer],
    arena: int,
    families: Mapping[str, Family] = FAMILIES,
) -> None:
    """Raises InternalError, naming the launches and values, unless

    * every buffer lies in the arena, 64-byte aligned, and no two that are alive together overlap;
    * every launch stays inside the buffer that it names, while that is alive;
    * every byte read holds the value that the reader expects, written before the last barrier;
    * launches that may run at the same time touch nothing that one of them writes.
    """
    check_placement(buffers, arena)
    launches = bucket.launches
    _check_bounds(launches, {buffer.value: buffer for buffer in buffers})
    held: list[Access] = []  # what the arena holds: the last writer of each range
    for group in _between_barriers(launches):
        found = [access for index in group for access in _accesses(index, launches[index], kernels, families)]
        reads = [access for access, writing in found if not writing]
        writes = [access for access, writing in found if writing]
        for read in reads:
            _check_held(read, held)
        _check_races(reads, writes)
        _check_caches(group, launches)
        for write in writes:
            held = [part for old in held for part in _without(old, write)] + [write]


def check_placement(buffers: Sequence[Buffer], arena: int) -> None:
    """Raises InternalError unless buffers lie in the arena, aligned, and those alive together do not overlap."""
    for buffer in buffers:
        if buffer.offset % 64 or buffer.offset < 0 or buffer.offset + buffer.bytes > arena:
            raise InternalError(f"buffer {buffer} is not aligned to 64 bytes inside the arena of {arena} bytes")
    by_offset = sorted(buffers, key=lambda buffer: buffer.offset)
    for position, low in enumerate(by_offset):
        for high in by_offset[position + 1 :]:
            if high.offset >= low.offset + low.bytes:
                break
            if not (high.last < low.first or low.last < high.first):
                raise InternalError(f"buffers {low} and {high} overlap while both are alive")


def _check_bounds(launches: Sequence[Launch], buffers: Mapping[str, Buffer]) -> None:
    for index, launch in enumerate(launches):
        for arg in launch.args:
            if not isinstance(arg, ArenaArg):
                continue
            buffer = buffers.get(arg.value)
            if buffer is None:
                raise InternalError(f"launch {index} ({launch.op}) names {arg.value}, which has no buffer")
            inside = buffer.offset <= arg.offset and arg.offset + arg.bytes <= buffer.offset + buffer.bytes
            if not inside or not buffer.first <= index <= buffer.last:
                raise InternalError(f"launch {index} ({launch.op}) leaves the range or life of {buffer} with {arg}")


def _between_barriers(launches: Sequence[Launch]) -> Iterable[list[int]]:
    group: list[int] = []
    for index, launch in enumerate(launches):
        group.append(index)
        if launch.barrier:
            yield group
            group = []
    if group:
        yield group


def _accesses(
    index: int, launch: Launch, kernels: Mapping[str, KernelSpec], families: Mapping[str, Family]
) -> Iterable[tuple[Access, bool]]:
    """The ranges that a launch reads or, with True, writes."""
    kernel = kernels[launch.kernel]
    for arg, spec in zip(launch.args, arguments(families[kernel.family], kernel), strict=True):
        if isinstance(arg, ArenaArg):
            yield Access(index, arg.value, arg.offset, arg.offset + arg.bytes), spec.role in ("out", "scratch")


def _check_held(read: Access, held: Iterable[Access]) -> None:
    """All bytes of the read range hold the reader's value."""
    missing = [read]
    for write in held:
        if write.value == read.value:
            missing = [part for hole in missing for part in _without(hole, write)]
    if missing:
        raise InternalError(f"{read} reads bytes that do not hold the value: {', '.join(map(str, missing))}")


def _check_races(reads: Sequence[Access], writes: Sequence[Access]) -> None:
    for position, write in enumerate(writes):
        for other in (*reads, *writes[position + 1 :]):
            if write.meets(other):
                raise InternalError(f"no barrier between a write by {write} and an access by {other}")


def _check_caches(group: Iterable[int], launches: Sequence[Launch]) -> None:
    seen: dict[CacheArg, int] = {}
    for index in group:
        for arg in launches[index].args:
            if isinstance(arg, CacheArg) and seen.setdefault(arg, index) != index:
                raise InternalError(f"no barrier between launches {seen[arg]} and {index} that use {arg}")


def _without(range_: Access, hole: Access) -> list[Access]:
    """What is left of a range when the hole's bytes are taken out."""
    if not range_.meets(hole):
        return [range_]
    left = Access(range_.launch, range_.value, range_.start, hole.start)
    right = Access(range_.launch, range_.value, hole.stop, range_.stop)
    return [part for part in (left, right) if part.start < part.stop]
