"""The file of kernels that are fastest on one GPU."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
from unit.runtime.fake_device import fake_plan

from toolkit.runtime.device.cuda.tuned import Tuned, TunedBucket, read_tuned, tuned_file, write_tuned
from toolkit.runtime.errors import UserError
from toolkit.runtime.plan import Plan

GPU = "NVIDIA H200"


def plan_with_alternatives() -> Plan:
    plan = fake_plan()
    buckets = tuple(msgspec.structs.replace(each, alternatives={"a": ("b", "c")}) for each in plan.buckets)
    return msgspec.structs.replace(plan, buckets=buckets)


def winners(plan: Plan, kernels: dict[str, str], bucket: str = "") -> Tuned:
    name = bucket or plan.buckets[0].name
    return Tuned("toolkit-tuned", plan.content_digest, GPU, "13.0", (TunedBucket(name, kernels, (1, 1, 8), 2.0, 1.5),))


def test_only_a_gpu_of_that_name_reads_them(tmp_path: Path) -> None:
    plan = plan_with_alternatives()
    path = write_tuned(tmp_path, winners(plan, {"a": "c"}))
    assert path == tmp_path / "tuned" / "NVIDIA-H200.json"
    assert read_tuned(tmp_path, plan, GPU) == {plan.buckets[0].name: {"a": "c"}}
    assert read_tuned(tmp_path, plan, "NVIDIA H100") == {}


@pytest.mark.parametrize(
    ("kernels", "bucket"), [({"a": "d"}, ""), ({"x": "b"}, ""), ({"a": "b"}, "decode[99]"), ({"b": "a"}, "")]
)
def test_other_than_alternatives_are_refused(tmp_path: Path, kernels: dict[str, str], bucket: str) -> None:
    plan = plan_with_alternatives()
    write_tuned(tmp_path, winners(plan, kernels, bucket))
    with pytest.raises(UserError, match="is no alternative to"):
        read_tuned(tmp_path, plan, GPU)


def test_another_plans_and_damaged_files_are_refused(tmp_path: Path) -> None:
    plan = plan_with_alternatives()
    write_tuned(tmp_path, winners(fake_plan(), {"a": "b"}))
    with pytest.raises(UserError, match=r"measured with another plan.*toolkit tune"):
        read_tuned(tmp_path, plan, GPU)
    for content in (b"", b"{}", b'{"format": "toolkit-tuned"}', b"\xff"):
        tuned_file(tmp_path, GPU).write_bytes(content)
        with pytest.raises(UserError, match="is damaged"):
            read_tuned(tmp_path, plan, GPU)
