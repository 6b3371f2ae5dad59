"""How fast a plan could run here if memory were the only limit."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from functools import cache

import numpy as np

from ..runtime.device.machine import usable_cores
from ..runtime.plan import Plan

_PROBE = 64 << 20


@cache
def read_bandwidth() -> float:
    """Bytes a second that all usable cores together read from memory, measured in a fraction of a second."""
    threads = usable_cores()
    parts = np.array_split(np.ones(_PROBE, np.int8), threads)
    with ThreadPoolExecutor(threads) as pool:
        best = min(_timed(pool, parts) for _ in range(5))
    return _PROBE / best


def _timed(pool: ThreadPoolExecutor, parts: list[np.ndarray[tuple[int], np.dtype[np.int8]]]) -> float:
    began = time.perf_counter()
    list(pool.map(np.max, parts))
    return time.perf_counter() - began


@cache
def arithmetic_rate() -> float:
    """Float32 operations a second that all usable cores reach together, by a matrix product that fits in the caches."""
    size = 512
    a, b = np.ones((2, size, size), np.float32)
    best = min(_timed_product(a, b) for _ in range(5))
    return 2 * size**3 / best


def _timed_product(
    a: np.ndarray[tuple[int, ...], np.dtype[np.float32]], b: np.ndarray[tuple[int, ...], np.dtype[np.float32]]
) -> float:
    began = time.perf_counter()
    a @ b
    return time.perf_counter() - began


def seconds_per_token(plan: Plan, bandwidth: float) -> float:
    """Time of a decode step at batch 1 and a short context that only reads memory, at so many bytes a second."""
    bucket = plan.buckets[0]
    return sum(launch.bytes for launch in (*bucket.forward, *bucket.sample)) / bandwidth
