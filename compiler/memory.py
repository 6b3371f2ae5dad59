"""Memory planning: when each buffer is alive, and where it lies in the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..runtime.plan import Buffer
from .lowered import Lowered, epochs

ALIGNMENT = 64
"""Bytes: a cache line, and the widest vector."""


@dataclass(frozen=True)
class Lifetime:
    """A buffer of `bytes`, alive from launch `first` to launch `last`, both included."""

    value: str
    bytes: int
    first: int
    last: int

    def overlaps(self, other: Lifetime | Buffer) -> bool:
        """Whether both are alive at some launch."""
        return self.first <= other.last and other.first <= self.last


def align(size: int) -> int:
    """The size rounded up to the alignment."""
    return -(-size // ALIGNMENT) * ALIGNMENT


def lifetimes(lowered: Lowered) -> tuple[Lifetime, ...]:
    """When each buffer is alive.

    Launches between two barriers run at the same time, so a buffer that one of them touches is alive in all of them.
    """
    spans: dict[str, tuple[int, int]] = {}
    calls = lowered.calls
    for call, (start, end) in zip(calls, epochs([call.barrier for call in calls]), strict=True):
        for name in (call.reads | call.writes) & lowered.buffers.keys():
            first, last = spans.get(name, (start, end))
            spans[name] = (min(first, start), max(last, end))
    return tuple(Lifetime(name, lowered.buffers[name].bytes, *span) for name, span in sorted(spans.items()))


def plan_memory(lives: Sequence[Lifetime]) -> tuple[Buffer, ...]:
    """Offsets for buffers such that no two that are alive together overlap: largest first, each into the smallest gap.

    Deterministic: the result depends on the lifetimes alone.
    """
    placed: list[Buffer] = []
    for life in sorted(lives, key=lambda life: (-life.bytes, life.first, life.value)):
        size = align(life.bytes)
        neighbors = [buffer for buffer in placed if life.overlaps(buffer)]
        offset = _best_gap(sorted((buffer.offset, buffer.offset + buffer.bytes) for buffer in neighbors), size)
        placed.append(Buffer(life.value, offset, size, life.first, life.last))
    return tuple(sorted(placed, key=lambda buffer: (buffer.first, buffer.offset, buffer.value)))


def _best_gap(taken: Sequence[tuple[int, int]], size: int) -> int:
    """Start of the smallest gap between sorted taken ranges that holds `size`, or the end of them all."""
    best, best_gap, end = None, 0, 0
    for start, stop in taken:
        gap = start - end
        if gap >= size and (best is None or gap < best_gap):
            best, best_gap = end, gap
        end = max(end, stop)
    return end if best is None else best


def arena_bytes(buffers: Sequence[Buffer]) -> int:
    """Size of the arena that holds the buffers."""
    return max((buffer.offset + buffer.bytes for buffer in buffers), default=0)
