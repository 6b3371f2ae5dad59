"""The engine on a GPU says what it says on the CPU, however requests are scheduled.

The plans are made beforehand, on any machine, by `make_plans.py`, and named by TOOLKIT_GPU_PLANS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.runtime.engine_harness import cache_bytes, make_request, run, shared_prompts
from unit.runtime.engine_suite import Case, EngineSuite

from toolkit.runtime.device.cuda.driver import Gpu
from toolkit.runtime.device.cuda.inputs import Layout
from toolkit.runtime.device.open import open_device
from toolkit.runtime.engine import Engine
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions

PLANS = os.environ.get("TOOLKIT_GPU_PLANS", "")
FOLDER = Path(PLANS)
NAMES = sorted(path.name.removesuffix("-gpu") for path in FOLDER.glob("*-gpu")) if PLANS else []
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25, "int8": 0.3, "fp8": 0.8, "float8": 0.5}
"""How much less likely than the best a token may be, in nats, by the CPU's numbers; `float8` rounds activations too."""

pytestmark = pytest.mark.skipif(not NAMES, reason="TOOLKIT_GPU_PLANS names no folder of plans: see make_plans.py")


class GpuCase(Case):
    """A model's plans, for this GPU and for the CPU."""

    steps = 48

    def __init__(self, name: str) -> None:
        self.name = name
        kind, _, dtype = name.partition("-")
        self.tolerance = TOLERANCE[kind.partition("+")[2] or dtype]

    def engine(self, *, full_sequences: float = 8.0, kind: str = "gpu", **options: Any) -> Engine:
        directory = FOLDER / f"{self.name}-{kind}"
        plan = read_plan(directory)
        fixed = plan.memory.arena + plan.memory.weights + max(plan.memory.host, Layout(plan).bytes)
        choice = EngineOptions(memory=fixed + cache_bytes(plan, full_sequences) + 4096, threads=2, **options)
        return Engine(open_device(directory, plan, choice), choice)

    def logprobs(self, prompt: list[int], tokens: list[int]) -> np.ndarray[Any, Any]:
        request = make_request("x", [*prompt, *tokens], prompt_logprobs=-1, max_tokens=1)
        found = run(scorer(self.name), [request])["x"].prompt_logprobs
        assert found is not None
        rows = [np.frombuffer(entry.row, "<f4") for entry in found[len(prompt) :] if entry is not None]
        return np.array(rows)

    def prompts(self, count: int) -> list[list[int]]:
        return shared_prompts(count, vocabulary=500, trunk=150, begin=(64, 150), end=(5, 100))


@cache
def scorer(name: str) -> Engine:
    return GpuCase(name).engine(kind="cpu")


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Iterator[GpuCase]:
    yield GpuCase(request.param)
    scorer.cache_clear()


class TestEngine(EngineSuite):
    """On the GPU, beside the plan for the CPU."""


def test_a_seed_gives_the_tokens_of_the_cpu(case: GpuCase) -> None:
    """As far as rounding allows: first tokens are the same, whatever runs beside the request."""
    first = 3 if "float32" in case.name else 1
    draws = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 11}
    engine = case.engine()
    together = run(engine, case.requests(6, **draws))
    expected = run(scorer(case.name), case.requests(6, **draws))
    equal = 0
    for name, output in together.items():
        alone = run(engine, [next(each for each in case.requests(6, **draws) if each.request == name)])[name]
        equal += output.tokens[:first] == alone.tokens[:first] == expected[name].tokens[:first]
    assert equal >= (6 if "float32" in case.name else 2)
    engine.device.close()


def test_penalties_give_the_tokens_of_the_cpu(case: GpuCase) -> None:
    request = make_request("x", case.prompts(1)[0], presence_penalty=2.0, repetition_penalty=10.0, max_tokens=8)
    engine = case.engine()
    found = run(engine, [request])["x"].tokens
    assert found == run(scorer(case.name), [request])["x"].tokens or "float32" not in case.name
    engine.device.close()


def test_a_sleeping_engine_gives_back_its_memory(case: GpuCase) -> None:
    engine = case.engine()
    held, free = sum(engine.device.memory().values()), Gpu().free_memory()
    engine.sleep()
    assert Gpu().free_memory() - free > held / 2, "allocations of the driver are of whole MiB"
    engine.wake_up()
    engine.device.close()
