"""How fast a plan could run here if nothing but memory and arithmetic took time."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from ..runtime.device.machine import cpu_flags, usable_cores
from ..runtime.env import read_env
from ..runtime.plan import Plan
from .workload import Work

_PROBE = 128 << 20
_SIDE = 80
"""So small a product is computed by one thread."""


class Machine(msgspec.Struct, frozen=True):
    """What bounds a launch."""

    bandwidth: float
    """Bytes a second that are read from memory."""
    arithmetic: float
    """Float32 operations a second."""
    integer: float
    """Operations a second on 8-bit codes."""

    def seconds(self, need: Work) -> tuple[float, float]:
        """Time to read what a launch needs, and time to compute it."""
        return need.bytes / self.bandwidth, need.flops / (self.integer if need.integer else self.arithmetic)

    def best(self, other: Machine) -> Machine:
        """The higher of two measurements: what else runs on a machine only lowers them."""
        return Machine(
            max(self.bandwidth, other.bandwidth),
            max(self.arithmetic, other.arithmetic),
            max(self.integer, other.integer),
        )


H200 = Machine(bandwidth=4.572e12, arithmetic=785e12, integer=1570e12)
"""What kernels of an NVIDIA H200 were measured to reach: reading memory, and multiplying bfloat16 matrices. 8-bit codes
count twice, by its data sheet."""


def machine_of(plan: Plan) -> tuple[Machine, str]:
    """What bounds a plan's launches, and what it is called: this machine, or for GPUs an H200."""
    return (H200, "an H200") if plan.kind == "cuda" else (this_machine(), "this machine")


def this_machine() -> Machine:
    """This machine, measured in a moment.

    The rate of 8-bit codes follows from that of float32: VNNI multiplies and adds four codes in the place of a float,
    AVX2 takes three instructions for it.
    """
    rate = arithmetic_rate()
    vnni = "avx512_vnni" in cpu_flags() and read_env().isa != "x86-64-v3"
    return Machine(read_bandwidth(), rate, rate * 4 / (1 if vnni else 3))


def read_bandwidth() -> float:
    """Bytes a second that all usable cores together read from memory, measured in a fraction of a second."""
    threads = usable_cores()
    parts = np.array_split(np.ones(_PROBE, np.int8), threads)
    with ThreadPoolExecutor(threads) as pool:
        best = min(_timed(pool, parts) for _ in range(7))
    return _PROBE / best


def _timed(pool: ThreadPoolExecutor, parts: list[np.ndarray[tuple[int], np.dtype[np.int8]]]) -> float:
    began = time.perf_counter()
    list(pool.map(np.max, parts))
    return time.perf_counter() - began


def arithmetic_rate() -> float:
    """Float32 operations a second of all usable cores: a small matrix product's on one core, times their number."""
    matrix = np.ones((_SIDE, _SIDE), np.float32)
    out = np.empty_like(matrix)
    best = float("inf")
    for _ in range(300):
        began = time.perf_counter()
        np.matmul(matrix, matrix, out=out)
        best = min(best, time.perf_counter() - began)
    return usable_cores() * 2 * _SIDE**3 / best


def seconds_per_token(plan: Plan, bandwidth: float) -> float:
    """Time of a decode step at batch 1 and a short context that only reads memory, at so many bytes a second."""
    bucket = plan.buckets[0]
    return sum(launch.bytes for launch in bucket.launches) / bandwidth
