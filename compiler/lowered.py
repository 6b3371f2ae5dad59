"""The lowered step: kernel calls over virtual buffers, before memory is planned."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from ..kernels_templates.catalog import KernelSpec
from ..kernels_templates.packing import Layout
from ..runtime.plan import CacheArg, CacheResource, ConstArg, DimArg, InputArg, WeightArg
from .ir import Param
from .targets import BucketLimits


@dataclass(frozen=True)
class View:
    """A virtual buffer from `offset` bytes on."""

    buffer: str
    offset: int = 0


Argument = View | WeightArg | CacheArg | InputArg | DimArg | ConstArg


@dataclass(frozen=True)
class VirtualBuffer:
    """An activation that has no place yet: its bytes at the largest step, and at T = S = R = 1."""

    bytes: int
    least: int


@dataclass(frozen=True)
class Weight:
    """A resident weight: its parameter, with the encoding it is stored in, and the layout its kernels read."""

    param: Param
    layout: Layout


@dataclass(frozen=True)
class Call:
    """One kernel launch. `reads` and `writes` name buffers and caches, which decide where barriers go."""

    kernel: KernelSpec
    args: tuple[Argument, ...]
    """In the order of the kernel's argument list."""
    reads: frozenset[str]
    writes: frozenset[str]
    op: str
    bytes: int
    flops: int
    barrier: bool = True
    """Whether all threads meet before the next call."""
    others: tuple[KernelSpec, ...] = ()
    """Kernels that compute the same from the same arguments, for `toolkit tune` to choose from."""


@dataclass(frozen=True)
class Lowered:
    """A graph as kernel calls for the steps of one bucket: `forward` up to the logits, then `sample`."""

    limits: BucketLimits
    forward: tuple[Call, ...]
    sample: tuple[Call, ...]
    buffers: Mapping[str, VirtualBuffer]
    weights: Mapping[str, Weight]
    caches: tuple[CacheResource, ...]

    @property
    def calls(self) -> tuple[Call, ...]:
        """Both segments in order."""
        return self.forward + self.sample

    @property
    def kernels(self) -> dict[str, KernelSpec]:
        """Every kernel by its symbol."""
        return {kernel.symbol: kernel for call in self.calls for kernel in (call.kernel, *call.others)}

    @property
    def alternatives(self) -> dict[str, tuple[str, ...]]:
        """Symbols of other kernels by that of the one they may stand in for."""
        found: dict[str, dict[str, None]] = {}
        for call in self.calls:
            if call.others:
                found.setdefault(call.kernel.symbol, {}).update(dict.fromkeys(each.symbol for each in call.others))
        return {symbol: tuple(others) for symbol, others in sorted(found.items())}


def place_barriers(calls: Sequence[Call]) -> tuple[Call, ...]:
    """The calls with a barrier after each one whose successor touches what was written since the last barrier.

    A successor also waits if it writes what was read or written since then.
    """
    placed: list[Call] = []
    reads: set[str] = set()
    writes: set[str] = set()
    for call, following in zip(calls, [*calls[1:], None], strict=True):
        reads |= call.reads
        writes |= call.writes
        barrier = following is not None and bool(
            (following.reads | following.writes) & writes or following.writes & reads
        )
        if barrier:
            reads, writes = set(), set()
        placed.append(replace(call, barrier=barrier))
    return tuple(placed)


def epochs(barriers: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """For each launch the first and last launch that may run at the same time: those between two barriers."""
    start = 0
    for index, barrier in enumerate(barriers):
        if barrier or index == len(barriers) - 1:
            yield from [(start, index)] * (index + 1 - start)
            start = index + 1
