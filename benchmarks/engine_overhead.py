"""What a step of the engine costs outside the kernels: `engine_overhead.py [--batch 8 32] [--steps 400] [--plan PLAN]`.

The device answers at once, so a decoding step's whole time is the engine's: scheduling, the step's arrays, results,
stop rules, events, and their message to the front end. With `--plan`, a CPU plan's steps are run as well, and what they
take besides the kernels is measured: checks of inputs and the call of the kernels come on top. Prints one JSON object a
batch size; times are milliseconds.
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from toolkit.runtime.device.base import Ticket
from toolkit.runtime.device.open import open_device
from toolkit.runtime.engine import Engine
from toolkit.runtime.load import read_plan
from toolkit.runtime.loop import run_loop
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.plan import Bucket, CacheResource, MemoryPlan, Model, Plan, Report
from toolkit.runtime.request import Add, Command, Event, SamplingParams, Shutdown, Tokens
from toolkit.runtime.step import MAX_TOP, RESULT, StepBatch, StepResult

PAGE_TOKENS = 16
VOCABULARY = 49152


def make_plan(batch: int, context: int) -> Plan:
    """A plan with a full and a windowed cache group, as gemma has."""
    layers = (0, 512)
    return Plan(
        format="toolkit-plan",
        major=1,
        minor=0,
        abi="",
        model=Model("instant", "none", VOCABULARY, 64, len(layers), context, "float32", "none"),
        target="cpu",
        max_batch=batch,
        buckets=(Bucket("step", 512, batch, max(64, batch), (), ()),),
        kernels={},
        libraries=(),
        weights={},
        weight_files=(),
        caches=tuple(
            CacheResource("kv", (layer,), PAGE_TOKENS, 64, 1, 8, 8, "float32", "", window)
            for layer, window in enumerate(layers)
        ),
        memory=MemoryPlan(0, 0, 0),
        text=None,
        eos_token_ids=(1,),
        bos_token_id=None,
        report=Report(0, 0, ()),
    )


class InstantDevice:
    """Draws token 5 for every row without computing anything."""

    isa = "none"
    queue_depth = 1

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        bucket = plan.buckets[0]
        self.pages = (plan.max_batch * plan.model.max_context // PAGE_TOKENS + 1,) * len(plan.caches)
        self._rows = np.zeros(bucket.max_rows, RESULT)
        self._rows["token"] = 5
        self._tokens = np.zeros((bucket.max_rows, MAX_TOP), np.int32)
        self._logprobs = np.zeros((bucket.max_rows, MAX_TOP), np.float32)

    def submit(self, batch: StepBatch) -> Ticket:
        count = len(batch.rows)
        self._result = StepResult(self._rows[:count], self._tokens[:count], self._logprobs[:count], 0.0)
        return Ticket(0)

    def wait(self, ticket: Ticket) -> StepResult:
        return self._result

    poll = wait

    def copy_pages(self, group: int, pairs: Sequence[tuple[int, int]]) -> None:
        pass

    def profile(self, batch: StepBatch) -> tuple[Ticket, npt.NDArray[np.float64]]:
        return self.submit(batch), np.zeros((0, 2))

    def memory(self) -> dict[str, int]:
        return {}

    def sleep(self) -> None:
        pass

    def wake(self) -> None:
        pass

    def close(self) -> None:
        pass


class TimedPort:
    """The loop's port: notes when each turn begins, encodes its events, and shuts down after enough of them."""

    def __init__(self, requests: list[Add], turns: int) -> None:
        self._requests: list[Command] = list(requests)
        self._turns = turns
        self._encoder = msgspec.msgpack.Encoder()
        self.times: list[float] = []
        self.bytes = 0

    def receive(self, timeout: float) -> list[Command]:
        self.times.append(time.perf_counter())
        if len(self.times) == self._turns:
            return [Shutdown()]
        commands, self._requests = self._requests, []
        return commands

    def send(self, events: list[Event]) -> None:
        self.bytes += len(self._encoder.encode(events))


def make_requests(batch: int, context: int, steps: int) -> list[Add]:
    """Sampling requests with different prompts."""
    rng = np.random.default_rng(0)
    params = SamplingParams(temperature=0.8, top_p=0.9, max_tokens=steps * 2, ignore_eos=True)
    prompts = rng.integers(2, VOCABULARY, (batch, context)).tolist()
    return [Add(str(index), prompt, params, (1,), arrival=1.0) for index, prompt in enumerate(prompts)]


def measure(batch: int, context: int, steps: int) -> dict[str, float]:
    """Median times of decoding steps: of the engine alone, and of the whole loop with its messages."""
    plan = make_plan(batch, context + 4 * steps)
    requests = make_requests(batch, context, steps)

    engine = Engine(InstantDevice(plan), EngineOptions())
    for request in requests:
        engine.add(request)
    gc.collect()
    gc.freeze()
    times: list[float] = []
    while len(times) < steps:
        start = time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - start
        if sum(isinstance(event, Tokens) for event in events) == batch:
            times.append(seconds)

    prefill = 2 + batch * context // 512
    port = TimedPort(requests, steps + prefill)
    run_loop(Engine(InstantDevice(plan), EngineOptions()), port)
    turns = np.diff(port.times)[prefill:-1]
    return {
        "batch": batch,
        "context": context,
        "engine_ms": round(float(np.median(times)) * 1e3, 4),
        "engine_p99_ms": round(float(np.quantile(times, 0.99)) * 1e3, 4),
        "loop_ms": round(float(np.median(turns)) * 1e3, 4),
    }


def measure_plan(directory: Path, batch: int, context: int, steps: int) -> dict[str, float]:
    """The median time of a plan's decoding steps that is not spent in its kernels."""
    plan = read_plan(directory)
    options = EngineOptions(threads=1)
    device = open_device(directory, plan, options)
    engine, wait = Engine(device, options), device.wait
    kernels: list[float] = []

    def noted(ticket: Ticket) -> StepResult:
        result = wait(ticket)
        kernels.append(result.seconds)
        return result

    device.wait = noted  # type: ignore[method-assign]
    for request in make_requests(batch, context, steps):
        engine.add(request)
    times: list[float] = []
    while len(times) < steps:
        start = time.perf_counter()
        events = engine.step()
        seconds = time.perf_counter() - start
        if sum(isinstance(event, Tokens) for event in events) == batch:
            times.append(seconds - kernels[-1])
    device.close()
    return {"plan_ms": round(float(np.median(times)) * 1e3, 4), "kernels_ms": round(float(np.median(kernels)) * 1e3, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 64])
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--plan", type=Path, help="a CPU plan for at least so many sequences")
    options = parser.parse_args()
    for batch in options.batch:
        found = measure(batch, options.context, options.steps)
        if options.plan:
            found |= measure_plan(options.plan, batch, min(64, options.context), options.steps)
        print(json.dumps({"name": "engine_overhead", **found}), flush=True)


if __name__ == "__main__":
    main()
