"""Measure a plan's engine as `peer_llama_cpp.py` measures llama.cpp: `decode.py PLAN [--batch N] [--runs N]`.

The whole engine runs, scheduling and sampling included, in this process, without text and HTTP. The same prompts and
lengths as the peer's; prompts differ between runs, so that no prefix is reused. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np

from toolkit.runtime.engine import Engine, open_engine
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.request import Add, Error, SamplingParams, Tokens

PROMPT, NEW, PREFILL = 128, 128, 512
BATCH_PROMPT, BATCH_NEW = 64, 32


def requests(count: int, length: int, new: int, run: int) -> list[Add]:
    """Random prompts, greedy, that generate exactly `new` tokens."""
    ids = np.random.default_rng(run + 7).integers(100, 40000, (count, length))
    params = SamplingParams(temperature=0, max_tokens=new, ignore_eos=True)
    return [Add(f"{run}-{index}", prompt.tolist(), params) for index, prompt in enumerate(ids)]


def arrivals(engine: Engine, commands: list[Add]) -> list[tuple[float, int]]:
    """Run requests to their end; after every step its time and how many tokens came."""
    for command in commands:
        engine.add(command)
    times = []
    while engine.has_work:
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Error):
                raise SystemExit(event.message)
        times.append((now, sum(len(event.tokens) for event in events if isinstance(event, Tokens))))
    return times


def decode_speed(engine: Engine, run: int) -> float:
    """Tokens a second of one sequence after its first token."""
    times = [now for now, count in arrivals(engine, requests(1, PROMPT, NEW + 1, run)) if count]
    return NEW / (times[-1] - times[0])


def prefill_speed(engine: Engine, run: int) -> float:
    """Prompt tokens a second."""
    begin = time.perf_counter()
    times = arrivals(engine, requests(1, PREFILL, 1, 1000 + run))
    return PREFILL / (times[-1][0] - begin)


def batch_speed(engine: Engine, batch: int, run: int) -> dict[str, float]:
    """Tokens a second of all sequences together: once all decode, and over the whole time with their prompts."""
    begin = time.perf_counter()
    times = arrivals(engine, requests(batch, BATCH_PROMPT, BATCH_NEW, 2000 + run))
    first = next(index for index, (_, count) in enumerate(times) if count == batch)
    rest = sum(count for _, count in times[first + 1 :])
    return {
        "decode": rest / (times[-1][0] - times[first][0]),
        "whole": batch * BATCH_NEW / (times[-1][0] - begin),
    }


def main() -> None:
    """Print the figures of one plan."""
    parser = argparse.ArgumentParser()
    parser.add_argument("plan", type=Path)
    parser.add_argument("--batch", type=int, default=0, help="measure this many concurrent requests instead of one")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--runs", type=int, default=3)
    args = parser.parse_args()
    engine = open_engine(args.plan, EngineOptions(memory=6e9, threads=args.threads))
    if args.batch:
        batch_speed(engine, args.batch, -1)
        runs = [batch_speed(engine, args.batch, run) for run in range(args.runs)]
        figures = {f"batch_{key}": [run[key] for run in runs] for key in ("decode", "whole")}
    else:
        decode_speed(engine, 999)
        figures = {
            "decode": [decode_speed(engine, run) for run in range(args.runs)],
            "prefill": [prefill_speed(engine, run) for run in range(args.runs)],
        }
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
