"""What this machine offers: usable cores, CPU flags and available memory, with cgroup limits."""

from __future__ import annotations

import math
import os
from functools import cache
from pathlib import Path

from ..env import read_env

_CGROUP = Path("/sys/fs/cgroup")


def usable_cores(root: Path = _CGROUP) -> int:
    """Cores this process may use: its affinity mask, lowered to a cgroup CPU quota, at least 1."""
    cores = len(os.sched_getaffinity(0))
    quota = _cpu_quota(root)
    return max(1, cores if quota is None else min(cores, math.floor(quota + 0.5)))


def _cpu_quota(root: Path) -> float | None:
    try:  # cgroup v2
        quota, period = (root / "cpu.max").read_text().split()
        return None if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError):
        pass
    try:  # cgroup v1
        limit = int((root / "cpu/cpu.cfs_quota_us").read_text())
        return limit / int((root / "cpu/cpu.cfs_period_us").read_text()) if limit > 0 else None
    except (OSError, ValueError):
        return None


@cache
def cpu_flags() -> frozenset[str]:
    """Feature flags as /proc/cpuinfo names them; those in $TOOLKIT_MASK_CPU_FLAGS (comma-separated) are left out."""
    text = Path("/proc/cpuinfo").read_text()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split()) - frozenset(read_env().mask_cpu_flags)


def available_memory(root: Path = _CGROUP) -> int:
    """Bytes that could be allocated now without swapping, within the cgroup's limit."""
    fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for limit, usage in (
        ("memory.max", "memory.current"),
        ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes"),
    ):
        try:
            available = min(available, max(0, int((root / limit).read_text()) - int((root / usage).read_text())))
        except (OSError, ValueError):
            continue
    return available
