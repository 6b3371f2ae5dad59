"""What a deterministic plan costs: its steps are timed beside those of the plan that would have been made otherwise."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import msgspec

from ..runtime.device.base import Device
from ..runtime.device.open import open_device
from ..runtime.errors import UserError
from ..runtime.options import EngineOptions
from ..runtime.plan import Plan
from .profile import make_step
from .workload import StepSize

SECONDS = 1.0
"""Spent on each size of step, unless `LEAST_RUNS` of both plans take longer."""
LEAST_RUNS = 5


class StepCost(msgspec.Struct, frozen=True):
    """Median seconds of a step of both plans."""

    what: str
    deterministic: float
    otherwise: float

    def __str__(self) -> str:
        share = self.deterministic / self.otherwise - 1
        return f"{self.what} {share:+.1%} ({self.deterministic * 1e3:.2f} ms against {self.otherwise * 1e3:.2f})"


def measure_cost(plans: Sequence[tuple[Path, Plan]]) -> tuple[StepCost, ...]:
    """Steps of the deterministic plan and of the other, which take turns. Raises UserError if the memory does not
    suffice for both."""
    options, devices = EngineOptions(verify=False), []
    try:
        for directory, plan in plans:
            devices.append(open_device(directory, plan, options))
        return tuple(_measure(devices, what, size) for what, size in _sizes(plans[0][1]).items())
    finally:
        for device in devices:
            device.close()


def _sizes(plan: Plan) -> dict[str, StepSize]:
    bucket, context = plan.buckets[-1], plan.model.max_context
    batch = min(8, bucket.max_sequences, bucket.max_rows)
    prompt = min(bucket.max_tokens, context)
    return {
        "decode": StepSize().of(plan),
        f"decode of {batch} sequences": StepSize(batch).of(plan),
        f"a prompt of {prompt} tokens": StepSize(1, prompt).of(plan),
    }


def _measure(devices: Sequence[Device], what: str, size: StepSize) -> StepCost:
    steps = [make_step(device, size) for device in devices]
    times: list[list[float]] = [[] for _ in devices]
    until = time.perf_counter() + SECONDS
    while len(times[0]) <= LEAST_RUNS or time.perf_counter() < until:
        for device, step, mine in zip(devices, steps, times, strict=True):
            mine.append(device.wait(device.submit(step)).seconds)
    deterministic, otherwise = (median(mine[1:]) for mine in times)  # the first run warms up
    return StepCost(what, deterministic, otherwise)


def same_kernels(plan: Plan, other: Plan) -> bool:
    """Whether both plans run the same code."""
    return (plan.buckets, plan.kernels) == (other.buckets, other.kernels)


def cost_note(plans: Sequence[tuple[Path, Plan]]) -> str:
    """The cost as a sentence: measured, or why it could not be."""
    (_, plan), (_, other) = plans
    same = same_kernels(plan, other)
    kernels = "the same kernels as without --deterministic" if same else "kernels of its own"
    try:
        costs = ", ".join(map(str, measure_cost(plans)))
    except UserError as problem:
        return f"a deterministic plan with {kernels}; its cost was not measured: {problem}"
    noise = ": what differs is noise, and the cost is 0" if same else ""
    return f"deterministic, with {kernels}. Measured here: {costs}{noise}"
