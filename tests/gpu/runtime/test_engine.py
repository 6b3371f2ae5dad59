"""The engine on a GPU says what it says on the CPU, however requests are scheduled.

The plans are made beforehand, on any machine, by `make_plans.py`, and named by TOOLKIT_GPU_PLANS.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.runtime.engine_harness import Output, cache_bytes, make_request, make_requests, run, shared_prompts

from toolkit.runtime.device.cuda.driver import Gpu
from toolkit.runtime.device.cuda.inputs import Layout
from toolkit.runtime.device.open import open_device
from toolkit.runtime.engine import Engine
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions, SpeculativeConfig
from toolkit.runtime.request import Add

PLANS = os.environ.get("TOOLKIT_GPU_PLANS", "")
FOLDER = Path(PLANS)
NAMES = sorted(path.name.removesuffix("-gpu") for path in FOLDER.glob("*-gpu")) if PLANS else []
STEPS = 48
TOLERANCE = {"float32": 2e-3, "bfloat16": 0.25, "int8": 0.3, "fp8": 0.8, "float8": 0.5}
"""How much less likely than the best a token may be, in nats, by the CPU's numbers; `float8` rounds activations too."""

pytestmark = pytest.mark.skipif(not NAMES, reason="TOOLKIT_GPU_PLANS names no folder of plans: see make_plans.py")


@dataclass
class Case:
    """A model's plans."""

    name: str

    @property
    def tolerance(self) -> float:
        kind, _, dtype = self.name.partition("-")
        return TOLERANCE[kind.partition("+")[2] or dtype]

    def engine(self, *, kind: str = "gpu", full_sequences: float = 8.0, **options: Any) -> Engine:
        """An engine whose cache holds so many sequences of full length."""
        directory = FOLDER / f"{self.name}-{kind}"
        plan = read_plan(directory)
        fixed = plan.memory.arena + plan.memory.weights + max(plan.memory.host, Layout(plan).bytes)
        choice = EngineOptions(memory=fixed + cache_bytes(plan, full_sequences) + 4096, threads=2, **options)
        return Engine(open_device(directory, plan, choice), choice)

    def logprobs(self, prompt: list[int], tokens: list[int]) -> np.ndarray[Any, Any]:
        """Log-probabilities [tokens, V] of the CPU's plan."""
        request = make_request("x", [*prompt, *tokens], prompt_logprobs=-1, max_tokens=1)
        found = run(scorer(self.name), [request])["x"].prompt_logprobs
        assert found is not None
        rows = [np.frombuffer(entry.row, "<f4") for entry in found[len(prompt) :] if entry is not None]
        return np.array(rows)

    def check_greedy(self, prompt: list[int], output: Output) -> None:
        """Every token is the CPU's best after the tokens before it, or nearly so."""
        assert output.error is None
        assert output.tokens
        expected = self.logprobs(prompt, output.tokens)
        chosen = expected[np.arange(len(output.tokens)), output.tokens]
        assert float((expected.max(axis=1) - chosen).max()) < self.tolerance


@cache
def scorer(name: str) -> Engine:
    return Case(name).engine(kind="cpu")


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    yield Case(request.param)
    scorer.cache_clear()


def prompts(count: int) -> list[list[int]]:
    """The longest are of several pages."""
    return shared_prompts(count, vocabulary=500, trunk=150, begin=(64, 150), end=(5, 100))


def requests(count: int, **params: Any) -> list[Add]:
    return make_requests(prompts(count), **({"max_tokens": STEPS} | params))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batched_tokens": 24},
        {"full_sequences": 1.2},
        {"full_sequences": 1.2, "max_batched_tokens": 40, "max_num_seqs": 3},
        {"prefix_cache": False},
    ],
)
def test_greedy_outputs_are_the_cpus(case: Case, options: dict[str, Any]) -> None:
    """In one batch, in small chunks, with little memory, with and without prefix cache."""
    engine = case.engine(**options)
    outputs = run(engine, requests(8))
    assert ("full_sequences" in options) == (engine.stats().preemptions > 0)
    for prompt, output in zip(prompts(8), outputs.values(), strict=True):
        assert len(output.tokens) == STEPS
        case.check_greedy(prompt, output)
    engine.device.close()


def test_cached_prefixes_and_lone_requests_say_the_same(case: Case) -> None:
    engine = case.engine()
    for request in requests(5):
        case.check_greedy(list(request.prompt), run(engine, [request])[request.request])
    before = engine.stats().prefix_hits
    for prompt, output in zip(prompts(5), run(engine, requests(5)).values(), strict=True):
        case.check_greedy(prompt, output)
    assert engine.stats().prefix_hits > before
    engine.device.close()


def test_a_seed_gives_the_tokens_of_the_cpu(case: Case) -> None:
    """As far as rounding allows: first tokens are the same, whatever runs beside the request."""
    first = 3 if "float32" in case.name else 1
    draws = {"temperature": 1.0, "top_p": 0.95, "top_k": 50, "seed": 11}
    engine = case.engine()
    together = run(engine, requests(6, **draws))
    expected = run(scorer(case.name), requests(6, **draws))
    equal = 0
    for name, output in together.items():
        alone = run(engine, [next(each for each in requests(6, **draws) if each.request == name)])[name]
        equal += output.tokens[:first] == alone.tokens[:first] == expected[name].tokens[:first]
    assert equal >= (6 if "float32" in case.name else 2)
    engine.device.close()


def test_logprobs_are_the_cpus(case: Case) -> None:
    engine = case.engine()
    prompt = prompts(1)[0]
    output = run(engine, [make_request("x", prompt, logprobs=5, prompt_logprobs=-1, max_tokens=6)])["x"]
    expected = case.logprobs(prompt[:1], prompt[1:] + output.tokens)
    assert output.prompt_logprobs is not None
    found = np.array([np.frombuffer(entry.row, "<f4") for entry in output.prompt_logprobs[1:] if entry is not None])
    np.testing.assert_allclose(found, expected[: len(prompt) - 1], atol=case.tolerance)
    for index, entry in enumerate(output.logprobs):
        row = expected[len(prompt) - 1 + index]
        assert entry.token == output.tokens[index]
        assert entry.logprob == pytest.approx(row[entry.token], abs=case.tolerance)
        top = np.sort(row)[::-1][:5]
        np.testing.assert_allclose([value for _, value in entry.top], top, atol=case.tolerance)
    engine.device.close()


def test_penalties_biases_and_stops_reach_the_sampler(case: Case) -> None:
    engine = case.engine()
    prompt = prompts(1)[0]
    biased = make_request("biased", prompt, logit_bias={7: 100.0}, max_tokens=5)
    assert run(engine, [biased])["biased"].tokens == [7] * 5
    stopped = make_request("stopped", prompt, logit_bias={7: 100.0, 9: 50.0}, stop_token_ids=(7,), min_tokens=3)
    assert run(engine, [stopped])["stopped"].tokens == [9, 9, 9, 7]
    penalized = make_request("twice", prompt, presence_penalty=2.0, repetition_penalty=10.0, max_tokens=STEPS)
    tokens = run(engine, [penalized])["twice"].tokens
    if "float32" in case.name:
        assert tokens[:8] == run(scorer(case.name), [penalized])["twice"].tokens[:8]
    plain = run(engine, [make_request("plain", prompt, max_tokens=STEPS, ignore_eos=True)])["plain"].tokens
    assert len(set(tokens)) > len(set(plain))
    engine.device.close()


def test_aborted_requests_leave_the_others_alone(case: Case) -> None:
    engine = case.engine()
    outputs = run(engine, requests(8), aborts={"1": 3, "2": 10, "5": 11})
    for index, prompt in enumerate(prompts(8)):
        output = outputs[str(index)]
        assert len(output.tokens) < STEPS if index in (1, 2, 5) else len(output.tokens) == STEPS
        if output.tokens:
            case.check_greedy(prompt, output)
    engine.device.close()


@pytest.mark.parametrize("method", ["ngram", "suffix"])
def test_drafts_change_no_greedy_output(case: Case, method: Any) -> None:
    """Texts that repeat themselves, whose drafts come true; a bias makes outputs repeat too."""
    config = SpeculativeConfig(method=method, num_speculative_tokens=4, prompt_lookup_min=1, adaptive=False)
    engine = case.engine(speculative_config=config)
    outputs = run(engine, requests(8))
    for prompt, output in zip(prompts(8), outputs.values(), strict=True):
        assert len(output.tokens) == STEPS
        case.check_greedy(prompt, output)
    sure = run(engine, [make_request("sure", [7, 9] * 20, logit_bias={7: 100.0}, max_tokens=STEPS, ignore_eos=True)])
    assert sure["sure"].tokens == [7] * STEPS
    assert engine.stats().spec_accepted_tokens > STEPS / 4
    engine.device.close()


def test_a_sleeping_engine_gives_back_its_memory_and_says_the_same_later(case: Case) -> None:
    engine = case.engine()
    expected = run(engine, requests(4))
    held, free = sum(engine.device.memory().values()), Gpu().free_memory()
    engine.sleep()
    assert Gpu().free_memory() - free > held / 2, "allocations of the driver are of whole MiB"
    engine.wake_up()
    for name, output in run(engine, requests(4)).items():
        assert output.tokens == expected[name].tokens
    engine.device.close()
