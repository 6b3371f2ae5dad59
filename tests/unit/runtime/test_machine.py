"""Cores and memory follow cgroup limits; the best library that a CPU can run is chosen."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from unit.runtime.sample_plan import sample_plan

from toolkit.runtime.device.cpu import choose_library, plan_pages
from toolkit.runtime.device.machine import available_memory, cpu_flags, usable_cores
from toolkit.runtime.errors import UserError
from toolkit.runtime.plan import Library


@pytest.mark.parametrize(
    ("text", "cores"), [("100000 100000", 1), ("50000 100000", 1), ("max 100000", None), ("100000000 100000", None)]
)
def test_cores_follow_the_quota(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text)
    assert usable_cores(tmp_path) == (cores or len(os.sched_getaffinity(0)))


def test_cores_follow_the_old_quota(tmp_path: Path) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu/cpu.cfs_quota_us").write_text("100000")
    (tmp_path / "cpu/cpu.cfs_period_us").write_text("100000")
    assert usable_cores(tmp_path) == 1


def test_memory_follows_the_cgroup(tmp_path: Path) -> None:
    (tmp_path / "memory.max").write_text("1000000")
    (tmp_path / "memory.current").write_text("400000")
    assert available_memory(tmp_path) == 600000
    (tmp_path / "memory.max").write_text("max")
    assert available_memory(tmp_path) > 600000


def test_flags_can_be_masked(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu_flags.cache_clear()
    assert "fpu" in cpu_flags()
    monkeypatch.setenv("TOOLKIT_MASK_CPU_FLAGS", "fpu,avx512f")
    cpu_flags.cache_clear()
    assert not cpu_flags() & {"fpu", "avx512f"}
    monkeypatch.undo()
    cpu_flags.cache_clear()


def test_the_best_usable_library_is_chosen() -> None:
    v3 = Library("x86-64-v3", "v3.so", 1, "", ("fma",))
    v4 = Library("x86-64-v4", "v4.so", 1, "", ("fma", "avx512f"))
    assert choose_library((v3, v4), frozenset({"fma"})) is v3
    assert choose_library((v3, v4), frozenset({"fma", "avx512f"})) is v4
    with pytest.raises(UserError, match="lacks fma"):
        choose_library((v3, v4), frozenset())


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
