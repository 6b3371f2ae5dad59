"""Cores and memory follow cgroup limits; the best library that a CPU can run is chosen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unit.runtime.sample_plan import sample_plan

from toolkit.runtime.device.cpu import choose_library
from toolkit.runtime.device.machine import available_memory, usable_cores
from toolkit.runtime.device.pages import plan_pages
from toolkit.runtime.errors import UserError
from toolkit.runtime.plan import Library


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A root directory for a machine with 8 CPUs and no limits."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)))
    write(tmp_path, {"proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 1000 kB\n"})
    return tmp_path


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)


V2, V1 = "sys/fs/cgroup", "sys/fs/cgroup/cpu"
OLD = {f"{V1}/cpu.cfs_period_us": "100000"}
QUOTAS: dict[str, tuple[dict[str, str], int]] = {
    "none": ({}, 8),
    "v2 whole": ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "300000 100000"}, 3),
    "v2 rounded up": ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "210000 100000"}, 3),
    "v2 less than one": ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "20000 100000"}, 1),
    "v2 unlimited": ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "max 100000"}, 8),
    "v2 more than there is": ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "9900000 100000"}, 8),
    "v2 of a service": ({"proc/self/cgroup": "0::/a.slice/b", f"{V2}/a.slice/b/cpu.max": "200000 100000"}, 2),
    "v2 of its parent": (
        {
            "proc/self/cgroup": "0::/a.slice/b",
            f"{V2}/a.slice/b/cpu.max": "500000 100000",
            f"{V2}/a.slice/cpu.max": "400000 100000",
        },
        4,
    ),
    "v2 outside its namespace": ({"proc/self/cgroup": "0::/../x", f"{V2}/cpu.max": "200000 100000"}, 2),
    "v2 damaged": ({"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "many"}, 8),
    "v1": ({"proc/self/cgroup": "4:memory:/\n3:cpu,cpuacct:/", f"{V1}/cpu.cfs_quota_us": "150000", **OLD}, 2),
    "v1 of a container": ({"proc/self/cgroup": "3:cpu:/docker/1", f"{V1}/cpu.cfs_quota_us": "300000", **OLD}, 3),
    "v1 unlimited": ({"proc/self/cgroup": "3:cpu:/", f"{V1}/cpu.cfs_quota_us": "-1", **OLD}, 8),
    "v1 beside v2": (
        {"proc/self/cgroup": "3:cpu:/a\n0::/a", f"{V1}/a/cpu.cfs_quota_us": "7", f"{V1}/a/cpu.cfs_period_us": "5"},
        2,
    ),
}


@pytest.mark.parametrize("case", QUOTAS)
def test_threads_follow_the_quota(machine: Path, case: str) -> None:
    files, threads = QUOTAS[case]
    write(machine, files)
    assert usable_cores(machine) == threads


def test_threads_of_one_core_count_once(machine: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    topology = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    write(machine, {topology.format(cpu): f"{cpu % 4},{cpu % 4 + 4}\n" for cpu in range(8)})
    assert usable_cores(machine) == 4
    write(machine, {"proc/self/cgroup": "0::/", f"{V2}/cpu.max": "350000 100000"})
    assert usable_cores(machine) == 4
    write(machine, {f"{V2}/cpu.max": "300000 100000"})
    assert usable_cores(machine) == 3
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4})  # 0 and 4 are one core
    assert usable_cores(machine) == 2


def test_memory_follows_the_cgroups(machine: Path) -> None:
    assert available_memory(machine) == 1_024_000
    write(machine, {"proc/self/cgroup": "5:memory:/old\n0::/a/b"})
    write(machine, {f"{V2}/a/memory.max": "900000", f"{V2}/a/memory.current": "300000"})
    assert available_memory(machine) == 600_000
    write(machine, {f"{V2}/a/b/memory.max": "max", f"{V2}/a/b/memory.current": "1"})
    assert available_memory(machine) == 600_000
    folder = "sys/fs/cgroup/memory/old"
    write(machine, {f"{folder}/memory.limit_in_bytes": "500", f"{folder}/memory.usage_in_bytes": "900"})
    assert available_memory(machine) == 0


def test_the_best_usable_library_is_chosen() -> None:
    v3 = Library("x86-64-v3", "v3.so", 1, "", ("fma",))
    v4 = Library("x86-64-v4", "v4.so", 1, "", ("fma", "avx512f"))
    assert choose_library((v3, v4), frozenset({"fma"})) is v3
    assert choose_library((v3, v4), frozenset({"fma", "avx512f"})) is v4
    with pytest.raises(UserError, match="lacks fma"):
        choose_library((v3, v4), frozenset())


def test_the_level_asked_for_is_chosen_or_refused() -> None:
    v3 = Library("x86-64-v3", "v3.so", 1, "", ("fma",))
    v4 = Library("x86-64-v4", "v4.so", 1, "", ("fma", "avx512f", "avx512_vnni"))
    assert choose_library((v3, v4), frozenset(v4.requires), "x86-64-v3") is v3
    assert choose_library((v3, v4), frozenset(v4.requires), "x86-64-v4") is v4
    with pytest.raises(UserError, match="TOOLKIT_ISA asks for x86-64-v4, but this CPU lacks avx512_vnni"):
        choose_library((v3, v4), frozenset({"fma", "avx512f"}), "x86-64-v4")
    with pytest.raises(UserError, match="holds code for x86-64-v3"):
        choose_library((v3,), frozenset(v4.requires), "x86-64-v4")


def test_pages_fill_the_budget_exactly() -> None:
    plan = sample_plan(b"", b"", b"")
    fixed = plan.memory.arena + plan.memory.weights + plan.memory.host
    page = 2 * 512
    full = 128 // 4
    assert plan_pages(plan, fixed + page * (full + 1)) == (full + 1,)
    assert plan_pages(plan, fixed + page * (3 * full + 1)) == (3 * full + 1,)
    assert plan_pages(plan, 1 << 40) == (8 * full + 1,)  # every sequence of the batch at full length
    with pytest.raises(UserError, match="--max-context 124 or fewer bits a weight"):
        plan_pages(plan, fixed + page * full)


@pytest.mark.parametrize("spare", [-1, 0, 1024, 1024 + 255])
def test_no_context_is_suggested_where_none_fits(spare: int) -> None:
    plan = sample_plan(b"", b"", b"")
    with pytest.raises(UserError, match="or compile with fewer bits a weight"):
        plan_pages(plan, plan.memory.arena + plan.memory.weights + plan.memory.host + spare)
