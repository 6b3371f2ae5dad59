"""Decoding on a GPU: milliseconds of an engine's step, end to end, beside the floor, the bar and vLLM's.

    python benchmarks/gpu/decode.py PLAN... [--batch 1 32 128 256] [--prompt 512] [--new 257] [--json FILE]

Plans are made anywhere: `toolkit compile CONFIG --weights random:0 --target sm90 -o PLAN`. All prompts are computed
first; the time is that of the steps in which every request gets its token, the engine's work included. `replay` is the
same step's graph run back to back, timed by events: what the GPU needs if nothing makes it wait.
"""

from __future__ import annotations

import argparse
import gc
import time
from pathlib import Path
from typing import Any

import numpy as np
from common import floor_ms, requests, save, shape

from toolkit.cli.profile import make_step
from toolkit.cli.workload import StepSize
from toolkit.runtime.device.cuda.device import CudaDevice
from toolkit.runtime.engine import Engine, open_engine
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.request import Tokens

BARS = {
    **{("8B", 1): 3.9, ("8B", 32): 5.0, ("8B", 128): 7.5, ("8B", 256): 11.8},
    **{("1B", 1): 0.83, ("1B", 32): 1.2, ("1B", 128): 2.0, ("1B", 256): 3.3},
    **{("8B a4g128", 1): 1.9, ("8B a4g128", 32): 2.8, ("8B e4m3g128w", 1): 2.5, ("8B e4m3g128w", 128): 5.6},
}
VLLM = {
    **{("8B", 1): 4.90, ("8B", 32): 5.82, ("8B", 128): 8.68, ("8B", 256): 13.9},
    **{("1B", 1): 1.59, ("1B", 32): 2.4, ("1B", 128): 3.5, ("1B", 256): 5.5},
}
"""vLLM 0.26 on the same kind of machine, the best of its runs."""


def step_times(engine: Engine, batch: int, prompt: int, new: int) -> list[float]:
    """When each decode step's tokens came, in seconds."""
    for request in requests(engine.plan, batch, prompt, new):
        engine.add(request)
    gc.collect()
    times = []
    while engine.has_work:
        events = engine.step()
        if sum(isinstance(event, Tokens) for event in events) == batch:
            times.append(time.perf_counter())
    return times


def measure(engine: Engine, batch: int, prompt: int, new: int) -> dict[str, Any]:
    """The row of one batch size."""
    device = engine.device
    assert isinstance(device, CudaDevice)
    step_times(engine, batch, prompt, 9)
    times = step_times(engine, batch, prompt, new)
    steps = np.diff(times)
    context = prompt + new // 2
    replay = device.replay(make_step(device, StepSize(batch, 1, context)), 100)
    key = shape(engine.plan), batch
    mean = float(times[-1] - times[0]) / len(steps) * 1e3
    return {
        "shape": key[0],
        "batch": batch,
        "ms": round(mean, 4),
        "median_ms": round(float(np.median(steps)) * 1e3, 4),
        "p99_ms": round(float(np.quantile(steps, 0.99)) * 1e3, 4),
        "replay_ms": round(replay * 1e3, 4),
        "over_replay": round(mean / (replay * 1e3), 4),
        "floor_ms": round(floor_ms(engine.plan, batch, context), 4),
        "bar_ms": BARS.get(key),
        "vllm_ms": VLLM.get(key),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 32, 128, 256])
    parser.add_argument("--prompt", type=int, default=512)
    parser.add_argument("--new", type=int, default=257)
    parser.add_argument("--memory", type=float, default=0.9)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    print("       shape batch   ms/step   replay    ratio    floor      bar     vLLM")
    for plan in options.plans:
        began = time.perf_counter()
        engine = open_engine(plan, EngineOptions(prefix_cache=False, memory=options.memory))
        opened = time.perf_counter() - began
        for batch in options.batch:
            row = measure(engine, batch, options.prompt, options.new) | {"open_s": round(opened, 3)}
            rows.append(row)
            figures = (row["ms"], row["replay_ms"], row["over_replay"], row["floor_ms"], row["bar_ms"], row["vllm_ms"])
            print(f"{row['shape']:>12} {batch:>5}" + "".join(f"{figure or 0:>9.3f}" for figure in figures), flush=True)
        engine.device.close()
    if options.json:
        save(options.json, "gpu_decode", rows)


if __name__ == "__main__":
    main()
