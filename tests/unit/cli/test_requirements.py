"""What a plan needs is told in bytes, and what to do where a machine has too little."""

from __future__ import annotations

import msgspec
import pytest
from unit.runtime.sample_plan import sample_plan

from toolkit.cli import requirements as module
from toolkit.cli.requirements import requirements, sentences
from toolkit.runtime.device.pages import plan_pages
from toolkit.runtime.errors import UserError
from toolkit.runtime.plan import Plan


@pytest.fixture
def plan() -> Plan:
    return sample_plan(b"", bytes(64), b"")


def test_the_memory_is_what_the_device_accepts(plan: Plan) -> None:
    found = requirements(plan)
    assert plan_pages(plan, found.memory) == (plan.model.max_context // 4 + 1,)
    with pytest.raises(UserError, match="memory limit"):
        plan_pages(plan, found.memory - 1)
    full = plan_pages(plan, found.memory_full_batch)
    assert plan_pages(plan, 10 * found.memory_full_batch) == full
    assert plan_pages(plan, found.memory_full_batch - 4096) < full


def test_it_says_what_would_fit(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    large = msgspec.structs.replace(plan.weights["w"], shape=(1 << 15, 1 << 20), bytes=2 << 35)
    plan = msgspec.structs.replace(
        plan, weights={"w": large}, memory=msgspec.structs.replace(plan.memory, weights=2 << 35)
    )
    for gib, expected in (
        (80, []),
        (40, ["24.00 GiB too little: --quant int8 would need 34.00 GiB"]),
        (20, ["44.00 GiB too little: --quant int4 would need 18.00 GiB"]),
        (4, ["60.00 GiB too little: even --quant int4 would need 18.00 GiB"]),
    ):
        monkeypatch.setattr(module, "available_memory", lambda gib=gib: gib << 30)
        found = requirements(plan)
        assert found.fits == (not expected)
        told = list(sentences(found, plan))
        assert told[0].startswith("an x86-64-v3 CPU and 64.00 GiB of memory for one sequence of 128 tokens")
        assert [text.split("available, ")[1] for text in told[2:]] == expected
