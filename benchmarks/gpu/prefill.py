"""Computing prompts on a GPU: `prefill.py PLAN... [--json FILE]`, milliseconds from queueing to the last result.

1 x 8192 is one step; 16 x 1024 are two. Figures of vLLM 0.26 on the same kind of machine stand beside them.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import save, shape

from toolkit.cli.profile import make_step
from toolkit.cli.workload import StepSize
from toolkit.runtime.device.open import open_device
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions

CASES = ((1, 8192, 1), (8, 1024, 2))
"""Sequences of a step, their tokens, and steps."""
BARS = {("8B", 0): 212.0, ("8B", 1): 370.0, ("1B", 0): 40.0}
VLLM = {("8B", 0): 214.0, ("8B", 1): 378.0, ("1B", 0): 40.4, ("1B", 1): 63.9}
REPEATS = 5


def measure(directory: Path) -> list[dict[str, Any]]:
    """Both cases of one plan."""
    plan = read_plan(directory)
    device = open_device(directory, plan, EngineOptions())
    rows = []
    for number, (batch, tokens, steps) in enumerate(CASES):
        step = make_step(device, StepSize(batch, tokens, tokens))
        times = []
        for _ in range(REPEATS + 1):
            began = time.perf_counter()
            for ticket in [device.submit(step) for _ in range(steps)]:
                device.wait(ticket)
            times.append((time.perf_counter() - began) * 1e3)
        rows.append(
            {
                "shape": shape(plan),
                "prompts": f"{batch * steps} x {tokens}",
                "ms": round(float(np.median(times[1:])), 2),
                "bar_ms": BARS.get((shape(plan), number)),
                "vllm_ms": VLLM.get((shape(plan), number)),
            }
        )
        print(rows[-1], flush=True)
    device.close()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plans", type=Path, nargs="+")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = [row for plan in options.plans for row in measure(plan)]
    if options.json:
        save(options.json, "gpu_prefill", rows)


if __name__ == "__main__":
    main()
