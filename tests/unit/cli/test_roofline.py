"""The estimate of a decode step."""

from __future__ import annotations

import pytest

from toolkit.cli.roofline import read_bandwidth
from toolkit.cli.units import duration, size


def test_bandwidth_is_plausible() -> None:
    assert 1e8 < read_bandwidth() < 1e13


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 20, "5.0 MiB"), (3 << 30, "3.00 GiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"), [(0, "0 ns"), (1.234e-7, "123 ns"), (9.996e-7, "1 µs"), (0.0123456, "12.3 ms"), (75.0, "75 s")]
)
def test_durations(seconds: float, text: str) -> None:
    assert duration(seconds) == text
