"""What this machine offers: cores, CPU flags and available memory, within this process's cgroup limits."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

_ROOT = Path("/")


def usable_cores(root: Path = _ROOT) -> int:
    """Kernel threads worth starting: the physical cores in this process's affinity mask, and no more than the CPU
    quota of its cgroups, rounded up; at least 1.

    Threads of one core share its vector units and caches, so a second one would only add barriers to wait at. `root`
    is where proc and sys are mounted.
    """
    cores = len({_siblings(root, cpu) for cpu in os.sched_getaffinity(0)})
    return max(1, min([cores, *(math.ceil(quota) for quota in _cpu_quotas(root))]))


def _siblings(root: Path, cpu: int) -> str:
    """The hardware threads of a CPU's core, as the kernel writes them."""
    try:
        return (root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _cpu_quotas(root: Path) -> Iterator[float]:
    """CPUs that each limited cgroup of this process may use."""
    for folder in _cgroups(root, "cpu"):
        for names in (("cpu.max",), ("cpu.cfs_quota_us", "cpu.cfs_period_us")):  # cgroup v2, v1
            try:
                quota, period = " ".join((folder / name).read_text() for name in names).split()
                if quota not in ("max", "-1"):
                    yield int(quota) / int(period)
            except (OSError, ValueError, ZeroDivisionError):
                continue


def _cgroups(root: Path, controller: str) -> Iterator[Path]:
    """Folders of this process's cgroup with a controller and of those above it, whose limits hold as well.

    A container may see the path of its cgroup on the host, of which only the mounted end exists.
    """
    mount = root / "sys/fs/cgroup"
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if not controllers or controller in controllers.split(","):
            top = mount / controller if controllers else mount
            parts = [part for part in path.split("/") if part not in ("", "..")]
            yield from (top.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1))


def resident_bytes(root: Path = _ROOT) -> int:
    """Bytes of this process that are in memory now, those of files included."""
    pages = int((root / "proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@cache
def cpu_model() -> str:
    """The CPU's name as /proc/cpuinfo has it."""
    text = Path("/proc/cpuinfo").read_text()
    line = next((line for line in text.splitlines() if line.startswith("model name")), "")
    return line.partition(":")[2].strip() or "unknown"


@cache
def cpu_flags() -> frozenset[str]:
    """Feature flags as /proc/cpuinfo names them."""
    text = Path("/proc/cpuinfo").read_text()
    line = next((line for line in text.splitlines() if line.startswith("flags")), "")
    return frozenset(line.partition(":")[2].split())


def available_memory(root: Path = _ROOT) -> int:
    """Bytes that could be allocated now without swapping, within the limits of this process's cgroups."""
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    available = int(fields["MemAvailable"].split()[0]) * 1024
    for folder in _cgroups(root, "memory"):
        for limit, usage in (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")):
            try:
                room = int((folder / limit).read_text()) - int((folder / usage).read_text())
            except (OSError, ValueError):  # no such file, or "max"
                continue
            available = min(available, max(0, room))
    return available
