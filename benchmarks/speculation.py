"""Decoding with and without guessed tokens: `speculation.py PLAN [--batch 1 8] [--tokens 200] [--rounds 5]`.

Two texts: draws from a flat distribution after random tokens, where guesses are in vain, and a repeating one, greedy,
where most are right. Both ways run on one device in turn, so that what else the machine does hits both. Prints one JSON
object for each method, text and batch: tokens a second, and the median ratio of a round, also of CPU time, which on a
busy machine is the steadier one.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np

from toolkit.runtime.device.base import Device
from toolkit.runtime.device.open import open_device
from toolkit.runtime.engine import Engine
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions, SpeculativeConfig
from toolkit.runtime.request import Add, SamplingParams

METHODS = {
    "ngram": SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=1),
    "suffix": SpeculativeConfig(method="suffix"),
}


def make_requests(text: str, batch: int, tokens: int, vocabulary: int, seed: int) -> list[Add]:
    """Requests of a kind of text; each has a prompt of its own."""
    rng = np.random.default_rng(seed)
    params: dict[str, Any] = {"max_tokens": tokens, "ignore_eos": True}
    requests = []
    for index in range(batch):
        prompt = rng.integers(5, vocabulary, 64).tolist()
        if text == "random":
            params |= {"temperature": 2.0, "seed": seed * batch + index}
        else:
            prompt, params = prompt[:12] * 6, params | {"temperature": 0.0}
        requests.append(Add(f"{seed}-{index}", prompt, SamplingParams(**params)))
    return requests


def decode(engine: Engine, requests: list[Add]) -> tuple[float, float]:
    """Seconds a token, by the wall clock and of this process's CPU time, from when all requests have their first token
    until one ends: later steps would have fewer sequences."""
    for request in requests:
        engine.add(request)
    while any(sequence.known == sequence.prompt_length for sequence in engine.scheduler.running) or (
        engine.scheduler.waiting
    ):
        engine.step()
    start, cpu = time.perf_counter(), time.process_time()
    tokens = engine.stats().generation_tokens
    while len(engine.scheduler.running) == len(requests):
        engine.step()
    tokens = engine.stats().generation_tokens - tokens
    seconds = (time.perf_counter() - start) / tokens, (time.process_time() - cpu) / tokens
    engine.abort_all()
    engine.step()
    return seconds


def measure(device: Device, method: str, text: str, batch: int, *, tokens: int, rounds: int) -> dict[str, object]:
    """Both ways in turn."""
    engines = {config: Engine(device, EngineOptions(speculative_config=config)) for config in (None, METHODS[method])}
    seconds: dict[SpeculativeConfig | None, list[tuple[float, float]]] = {config: [] for config in engines}
    for number in range(rounds + 1):
        for config, engine in list(engines.items())[:: 1 if number % 2 else -1]:
            engine.reset_prefix_cache()
            requests = make_requests(text, batch, tokens, device.plan.model.vocab_size, number)
            seconds[config].append(decode(engine, requests))
    plain, guessed = (np.array(times[1:]) for times in seconds.values())
    stats = engines[METHODS[method]].stats()
    return {
        "name": "speculation",
        "method": method,
        "text": text,
        "batch": batch,
        "plain_tokens_per_second": round(1 / float(np.median(plain[:, 0])), 1),
        "tokens_per_second": round(1 / float(np.median(guessed[:, 0])), 1),
        "ratio": round(float(np.median((plain / guessed)[:, 0])), 3),
        "cpu_ratio": round(float(np.median((plain / guessed)[:, 1])), 3),
        "drafted": stats.spec_draft_tokens,
        "accepted": stats.spec_accepted_tokens,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--method", nargs="+", default=list(METHODS), choices=list(METHODS))
    options = parser.parse_args()
    plan = read_plan(options.plan)
    device = open_device(options.plan, plan, EngineOptions(threads=options.threads))
    for method in options.method:
        for text in ("random", "repeating"):
            for batch in options.batch:
                result = measure(device, method, text, batch, tokens=options.tokens, rounds=options.rounds)
                print(json.dumps(result), flush=True)
    device.close()


if __name__ == "__main__":
    main()
