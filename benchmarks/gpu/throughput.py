"""Output tokens a second with many requests at once: `throughput.py PLAN [--requests 256] [--json FILE]`.

Lengths of prompts and outputs are random from 100 to 1024, at temperature 0.6, and all requests are there at the start.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
from common import save, shape

from toolkit.runtime.engine import open_engine
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.request import Add, SamplingParams, Tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    engine = open_engine(options.plan, EngineOptions())
    rng = np.random.default_rng(0)
    lengths = rng.integers(100, 1025, (options.requests, 2)).tolist()
    for index, (prompt, new) in enumerate(lengths):
        ids = rng.integers(3, engine.plan.model.vocab_size, prompt).tolist()
        sampling = SamplingParams(temperature=0.6, max_tokens=new, ignore_eos=True, seed=index)
        engine.add(Add(str(index), ids, sampling))
    began, tokens = time.perf_counter(), 0
    while engine.has_work:
        tokens += sum(len(event.tokens) for event in engine.step() if isinstance(event, Tokens))
    seconds = time.perf_counter() - began
    row = {
        "shape": shape(engine.plan),
        "requests": options.requests,
        "output_tokens": tokens,
        "seconds": round(seconds, 3),
        "tokens_per_second": round(tokens / seconds, 1),
        "preemptions": engine.stats().preemptions,
    }
    print(row)
    engine.device.close()
    if options.json:
        save(options.json, "gpu_throughput", row)


if __name__ == "__main__":
    main()
