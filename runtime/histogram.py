"""Counts of observations by upper bound, as Prometheus has them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """How many observations were at most each bound and above the one before; the last count is of those above all."""

    def __init__(self, bounds: Sequence[float]) -> None:
        """`bounds` ascend."""
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        """Count a value, so many times."""
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times
