"""Output tokens a second with many requests at once: `throughput.py PLAN... [--requests 256] [--json FILE]`.

Lengths of prompts and outputs are random from 100 to 1024, at temperature 0.6, and all requests are there at the start.
`ideal` is what the steps would take if each cost what a step of its size costs alone: decoding by the table of
`decode.py` (its bars; of other shapes, what this plan takes here), prompts at the rate of `prefill.py`'s bar (or as
measured here). The engine should reach 90% of it. The table's contexts are of 640 tokens; those of this run grow beyond
that. `own_steps` takes instead what decode steps of the very batches and contexts that were run cost alone.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from common import save, shape
from decode import BARS

from toolkit.cli.profile import make_step
from toolkit.cli.workload import StepSize
from toolkit.runtime.device.base import Ticket, find_bucket
from toolkit.runtime.device.cuda.device import CudaDevice
from toolkit.runtime.engine import Engine, open_engine
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.request import Add, SamplingParams, Tokens
from toolkit.runtime.step import StepBatch

PREFILL = {"8B": 8192 / 0.212, "1B": 8192 / 0.040}
"""Tokens a second at the bars."""
BATCHES = (1, 32, 128, 256)


@dataclass(frozen=True)
class Ran:
    """A step that was run."""

    bucket: str
    decoding: int
    """Sequences that decoded."""
    others: int
    """Tokens of prompts."""
    context: int
    """Mean tokens of a sequence."""


class Recorder:
    """The steps that a device was given."""

    def __init__(self, device: CudaDevice) -> None:
        self.steps: list[Ran] = []
        self._device, self._submit = device, device.submit
        device.submit = self.submit  # type: ignore[method-assign]

    def submit(self, batch: StepBatch) -> Ticket:
        """Note a step, and queue it."""
        sizes = np.diff(batch.seq_start)
        decoding = int((sizes == 1).sum())
        bucket = find_bucket(self._device.plan, batch).name
        self.steps.append(Ran(bucket, decoding, int(sizes.sum()) - decoding, int(batch.context.mean())))
        return self._submit(batch)


def cost_model(engine: Engine) -> tuple[dict[int, float], float]:
    """Milliseconds of decode steps by batch, and prompt tokens a second: the bars, or what the device does alone."""
    device, name = engine.device, shape(engine.plan)
    assert isinstance(device, CudaDevice)
    if name in PREFILL:
        return {batch: BARS[name, batch] for batch in BATCHES}, PREFILL[name]
    table = {batch: device.replay(make_step(device, StepSize(batch, 1, 640)), 50) * 1e3 for batch in BATCHES}
    tokens = min(8192, engine.plan.model.max_context)
    return table, tokens / device.replay(make_step(device, StepSize(1, tokens, tokens)), 3)


def own_steps(device: CudaDevice, steps: list[Ran]) -> float:
    """Seconds of the decode steps among these, if each cost what such a step does back to back: as told by 40."""
    decoding = [step for step in steps if not step.others]
    at = np.unique(np.linspace(0, len(decoding) - 1, 40).astype(int))
    sizes = [StepSize(decoding[index].decoding, 1, decoding[index].context) for index in at.tolist()]
    times = [device.replay(make_step(device, size), 10) for size in sizes]
    return float(np.interp(np.arange(len(decoding)), at, times).sum())


def measure(directory: Path, count: int) -> dict[str, Any]:
    """The row of one plan."""
    engine = open_engine(directory, EngineOptions())
    table, rate = cost_model(engine)
    assert isinstance(engine.device, CudaDevice)
    recorder = Recorder(engine.device)
    rng = np.random.default_rng(0)
    for index, (prompt, new) in enumerate(rng.integers(100, 1025, (count, 2)).tolist()):
        ids = rng.integers(3, engine.plan.model.vocab_size, prompt).tolist()
        sampling = SamplingParams(temperature=0.6, max_tokens=new, ignore_eos=True, seed=index)
        engine.add(Add(str(index), ids, sampling))
    began, tokens, seconds = time.perf_counter(), 0, defaultdict[str, list[float]](list)
    while engine.has_work:
        before, known = time.perf_counter(), len(recorder.steps)
        tokens += sum(len(event.tokens) for event in engine.step() if isinstance(event, Tokens))
        for step in recorder.steps[known:]:
            seconds[step.bucket].append(time.perf_counter() - before)
    total, steps = time.perf_counter() - began, recorder.steps.copy()
    decoded = [float(np.interp(step.decoding, list(table), list(table.values()))) * 1e-3 for step in steps]
    prompts = sum(step.others for step in steps) / rate
    ideal = prompts + sum(each for each, step in zip(decoded, steps, strict=True) if step.decoding)
    mixed = sum(each for each, step in zip(decoded, steps, strict=True) if step.decoding and step.others)
    own = prompts + mixed + own_steps(engine.device, steps)
    row = {
        "shape": shape(engine.plan),
        "requests": count,
        "output_tokens": tokens,
        "seconds": round(total, 3),
        "tokens_per_second": round(tokens / total, 1),
        "ideal_tokens_per_second": round(tokens / ideal, 1),
        "of_ideal": round(ideal / total, 3),
        "of_own_steps": round(own / total, 3),
        "table_ms": {str(batch): round(each, 3) for batch, each in table.items()},
        "preemptions": engine.stats().preemptions,
        "steps": {
            name: {
                "count": len(each),
                "seconds": round(sum(each), 3),
                "median_ms": round(float(np.median(each)) * 1e3, 3),
            }
            for name, each in seconds.items()
        },
    }
    engine.device.close()
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+")
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rows = []
    for plan in options.plans:
        rows.append(measure(plan, options.requests))
        print(rows[-1], flush=True)
    if options.json:
        save(options.json, "gpu_throughput", rows)


if __name__ == "__main__":
    main()
