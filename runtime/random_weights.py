"""Weights that a plan does not store: random bytes, made when it is loaded."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from concurrent.futures import Executor

import numpy as np
import numpy.typing as npt

from .plan import Plan, RandomFill

Bytes = npt.NDArray[np.uint8]

_BLOCK = 32
"""Bytes that one counter value of Philox yields."""
_PIECE = 4 << 20
"""Bytes made at a time, about."""


def fill_random(plan: Plan, file: str, memory: Bytes, pool: Executor) -> None:
    """Make the weights of a plan's random weight file in its memory, at their offsets.

    Byte block i (32 bytes) of a weight is Philox4x64-10 (Salmon et al. 2011) at counter i + 1, as numpy numbers them,
    under the key SHA-256("seed/name")[:16]; then, byte by byte, (random & keep) | value, where both repeat.
    """
    jobs = []
    for name, entry in plan.weights.items():
        if entry.file == file:
            fill = plan.fills[entry.fill]
            weight = memory[entry.offset : entry.offset + entry.bytes]
            for start, size in _pieces(entry.bytes, len(fill.keep) // 2):
                piece = weight[start : start + size]
                jobs.append(pool.submit(_fill, piece, start // _BLOCK, fill, weight_key(plan, name)))
    for job in jobs:
        job.result()


def weight_key(plan: Plan, name: str) -> int:
    """Philox's key for a weight: 128 bits."""
    key = hashlib.sha256(f"{plan.model.random_weights}/{name}".encode()).digest()[:16]
    return int.from_bytes(key, "little")


def _pieces(size: int, period: int) -> Iterator[tuple[int, int]]:
    """Start and length of pieces that begin at a counter value and at the begin of a period."""
    unit = math.lcm(_BLOCK, period)
    step = max(1, _PIECE // unit) * unit
    for start in range(0, size, step):
        yield start, min(step, size - start)


def _fill(piece: Bytes, counter: int, fill: RandomFill, key: int) -> None:
    words = -(-piece.size // 8)
    random = np.random.Philox(key=key, counter=counter).random_raw(words).astype("<u8", copy=False)
    random &= _repeat(fill.keep, words)
    random |= _repeat(fill.value, words)
    piece[:] = random.view(np.uint8)[: piece.size]


def _repeat(pattern: str, words: int) -> npt.NDArray[np.uint64]:
    once = np.frombuffer(bytes.fromhex(pattern), np.uint8)
    return np.resize(once, words * 8).view(np.uint64)
