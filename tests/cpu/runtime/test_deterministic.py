"""Deterministic plans: what a request yields depends on the request alone, to the last bit of a log-probability."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from cpu.kernels.harness import native_isas
from cpu.models.tiny_model import SIZES, save_tiny_model
from transformers import AutoConfig
from unit.runtime.engine_harness import Output, make_request, run

from toolkit.cli import determinism, measure
from toolkit.cli.driver import compile as compile_model
from toolkit.cli.progress import Phases
from toolkit.runtime.device.base import Ticket
from toolkit.runtime.device.open import open_device
from toolkit.runtime.engine import Engine
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.request import Add
from toolkit.runtime.step import StepBatch
from toolkit.runtime.tuning import encode_tuning, read_tuning

REQUESTS = 44
PAGE = 16
WINDOWS = {"sliding_window": 21, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"]}
MODELS: dict[str, tuple[tuple[str, dict[str, Any]], dict[str, Any]]] = {
    "float32": (("llama", {}), {"quant": "none"}),
    "bfloat16 with windows": (("gemma3_text", WINDOWS), {"quant": "none", "dtype": "bfloat16"}),
    "int4 with an int8 cache": (("qwen3", {}), {"quant": "int4", "kv_cache_dtype": "int8"}),
    "int4 by TVM": (("llama", {}), {"quant": "int4", "generator": "tvm"}),
}
"""Model types and what is special about them, and how they are compiled."""


@dataclass(frozen=True)
class Case:
    """A plan, requests, and what each yields when it is alone."""

    plan: Path
    requests: list[Add]
    alone: dict[str, Output]

    @staticmethod
    def of(plan: Path, requests: list[Add]) -> Case:
        """Each request is run on its own: its prompt in one chunk, by one thread, with nothing from a cache."""
        engine = open_engine(plan, threads=1, prefix_cache=False)
        try:
            outputs = [run(engine, [request]) for request in requests]
        finally:
            engine.device.close()
        return Case(plan, requests, {name: output for each in outputs for name, output in each.items()})

    def check_together(self, **options: Any) -> None:
        """All requests in one step yield what each yields alone."""
        engine = open_engine(self.plan, **options)
        try:
            found, most = run_counting(engine, self.requests)
        finally:
            engine.device.close()
        assert most == REQUESTS
        assert (engine.stats().preemptions > 0) == ("pages" in options)
        assert (engine.stats().prefix_hits > 0) == options["prefix_cache"]
        for name, output in found.items():
            assert output.error is None
            assert output.result == self.alone[name].result, name

    @property
    def few_pages(self) -> int:
        """Pages for all prompts, with one for each to grow and a few more, but not for all outputs."""
        return 10 + sum(-(-len(request.prompt) // PAGE) + 1 for request in self.requests)


def open_engine(directory: Path, *, pages: int = 0, **options: Any) -> Engine:
    """An engine whose cache has so many pages in each group; 0 is as many as all requests could use."""
    plan = read_plan(directory)
    assert plan.deterministic
    memory = plan.memory.arena + plan.memory.weights + plan.memory.host
    pages = pages or plan.max_batch * plan.model.max_context // PAGE
    memory += sum((pages + 1) * len(cache.layers) * cache.page_bytes for cache in plan.caches)
    choice = EngineOptions(memory=float(memory), **{"threads": 2, "verify": False, **options})
    return Engine(open_device(directory, plan, choice), choice)


def run_counting(engine: Engine, requests: list[Add]) -> tuple[dict[str, Output], int]:
    """The outputs of requests that arrive at once, and the most sequences that a step had."""
    counts: list[int] = []
    submit = engine.device.submit

    def counted(batch: StepBatch) -> Ticket:
        counts.append(len(batch.context))
        return submit(batch)

    engine.device.submit = counted  # type: ignore[method-assign]
    return run(engine, requests), max(counts)


def make_requests(vocabulary: int, prompt: int, outputs: int) -> list[Add]:
    """Prompts of random lengths up to `prompt`, most with a shared beginning; greedy ones, and seeded draws of all
    sorts."""
    rng = np.random.default_rng(7)
    trunks = [rng.integers(3, vocabulary, prompt * 2 // 3).tolist() for _ in range(3)]
    made = []
    for index in range(REQUESTS):
        shared = trunks[index % 4][: int(rng.integers(1, prompt * 2 // 3))] if index % 4 < 3 else []
        tokens = shared + rng.integers(3, vocabulary, int(rng.integers(1, prompt - len(shared)))).tolist()
        params: dict[str, Any] = {"max_tokens": int(rng.integers(outputs - 5, outputs + 1)), "logprobs": 3}
        if index % 3:
            params |= {"temperature": 0.5 + index / 44, "seed": index, "top_p": 0.95, "top_k": 40 * (index % 2)}
            params |= {"presence_penalty": 0.3 * (index % 5), "min_p": 0.01 * (index % 7)}
        if index % 11 == 0:
            params["prompt_logprobs"] = 2
        made.append(make_request(str(index), tokens, ignore_eos=True, **params))
    return made


@pytest.fixture(scope="module", params=MODELS)
def tiny(native_module: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("deterministic")
    (kind, values), options = MODELS[request.param]
    save_tiny_model(folder / "model", kind, **values)
    plan = compile_model(
        folder / "model", output=folder / "plan", max_batch=48, max_context=112, deterministic=True, **options
    )
    return Case.of(plan, make_requests(vocabulary=SIZES["vocab_size"], prompt=60, outputs=40))


SCHEDULES: dict[str, dict[str, Any]] = {
    "cache on": {"prefix_cache": True},
    "cache off": {"prefix_cache": False},
    "cache on, small chunks, three threads": {"prefix_cache": True, "max_batched_tokens": 128, "threads": 3},
}


@pytest.mark.parametrize("preempted", [False, True], ids=["roomy", "preempted"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_requests_together_yield_what_they_yield_alone(schedule: str, preempted: bool, tiny: Case) -> None:
    tiny.check_together(**SCHEDULES[schedule], **({"pages": tiny.few_pages} if preempted else {}))


@pytest.mark.usefixtures("native")
def test_the_cost_is_measured_and_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose races chose by rows has other kernels when deterministic; one without races has the same."""
    monkeypatch.setattr(determinism, "SECONDS", 0.05)
    monkeypatch.setattr(measure, "TRIAL_SECONDS", 0.0)
    folder = tmp_path / "model"
    AutoConfig.for_model("llama", **SIZES).save_pretrained(folder)
    make = partial(compile_model, folder, weights="random", quant="int4", force=True, output=tmp_path / "plan")
    tuning = read_tuning(make(generator="race") / "tuning.json")
    by_rows = tuple(
        msgspec.structs.replace(
            race, seconds={"cpp": 1.0, "tvm": 0.5 if race.rows == 1 else 1.1}, chosen="tvm" if race.rows == 1 else "cpp"
        )
        for race in tuning.races
    )
    (tmp_path / "t.json").write_bytes(encode_tuning(msgspec.structs.replace(tuning, races=by_rows)))
    best, generators = native_isas()[-1], {}
    for deterministic in (False, True):
        phases = Phases()
        plan = read_plan(make(tuning=tmp_path / "t.json", deterministic=deterministic, progress=phases))
        assert plan.deterministic == deterministic
        chosen = [kernel.choices for kernel in plan.kernels.values() if kernel.choices]
        generators[deterministic] = {
            tuple(choice.generator for choice in each if choice.isa == best) for each in chosen
        }
    assert generators == {False: {("tvm", "cpp", "cpp")}, True: {("tvm", "tvm", "tvm")}}
    (note,) = phases.notes
    assert re.search(
        r"kernels of its own. Measured here: decode [+-][\d.]+% \([\d.]+ ms against [\d.]+\), .* a prompt", note
    )
    plain = Phases()
    make(deterministic=True, progress=plain)
    assert "the same kernels as without" in plain.notes[0]
    assert "the cost is 0" in plain.notes[0]


def test_smollm2_together_yields_what_it_yields_alone(smollm2: Path, tmp_path: Path) -> None:
    plan = compile_model(smollm2, output=tmp_path / "plan", max_batch=48, max_context=64, deterministic=True)
    case = Case.of(plan, make_requests(vocabulary=49152, prompt=30, outputs=33))
    case.check_together(prefix_cache=True, pages=case.few_pages)
    case.check_together(prefix_cache=False)
