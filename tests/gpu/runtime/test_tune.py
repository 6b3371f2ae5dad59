"""Tuning on a GPU: every alternative computes what the plan's own kernel does, and winners are kept and used."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from toolkit.cli.profile import make_step
from toolkit.cli.progress import Phases
from toolkit.cli.tune_plan import step_size, tune
from toolkit.runtime.device.cuda.device import CudaDevice
from toolkit.runtime.device.cuda.tuned import Tuned, TunedBucket, write_tuned
from toolkit.runtime.errors import UserError
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions

PLAN = Path(os.environ.get("TOOLKIT_GPU_PLANS", "/nowhere")) / "hf" / "llama-bfloat16" / "plan"
OPTIONS = EngineOptions(memory=float(1 << 30))

pytestmark = pytest.mark.skipif(not PLAN.exists(), reason="TOOLKIT_GPU_PLANS names no folder of plans")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    shutil.copytree(PLAN, tmp_path / "plan")
    return tmp_path / "plan"


def test_alternatives_compute_the_same() -> None:
    plan = read_plan(PLAN)
    device = CudaDevice(PLAN, plan, OPTIONS)
    count = 0
    for bucket in plan.buckets:
        step = make_step(device, step_size(plan, bucket, 100))
        step.rows["sample"], step.rows["target"] = 0, 7
        expected = device.wait(device.submit(step)).rows["logprob"].copy()
        for kernel, others in bucket.alternatives.items():
            for other in others:
                device.substitute(bucket.name, {kernel: other})
                found = device.wait(device.submit(step)).rows["logprob"]
                np.testing.assert_allclose(found, expected, atol=0.1)
                count += 1
        device.substitute(bucket.name, {})
    device.close()
    assert count > len(plan.buckets)


def test_winners_are_kept_and_used(directory: Path) -> None:
    plan = read_plan(directory)
    tuned = tune(directory, 100, OPTIONS, Phases())
    assert [each.bucket for each in tuned.buckets] == [each.name for each in plan.buckets if each.alternatives]
    assert all(each.after < each.before * 1.05 for each in tuned.buckets)
    first = plan.buckets[0]
    kernel, (other, *_) = next(iter(first.alternatives.items()))
    forced = TunedBucket(first.name, {kernel: other}, (1, 1, 100), 1.0, 1.0)
    write_tuned(directory, Tuned("toolkit-tuned", plan.content_digest, tuned.gpu, tuned.cuda, (forced,)))
    device = CudaDevice(directory, plan, OPTIONS)
    assert other in device.kernels_in_use(first.name)
    assert kernel not in device.kernels_in_use(first.name)
    device.close()
    write_tuned(directory, Tuned("toolkit-tuned", "another", tuned.gpu, tuned.cuda, ()))
    with pytest.raises(UserError, match="measured with another plan"):
        CudaDevice(directory, plan, OPTIONS)
