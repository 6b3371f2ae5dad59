"""The engine on the CPU device: what the Hugging Face implementation says, however the requests are scheduled."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from cpu.models.tiny_model import save_tiny_model
from unit.runtime.engine_harness import Output, cache_bytes, make_request, make_requests, run, shared_prompts

from toolkit.cli.driver import compile as compile_model
from toolkit.cli.profile import profile, read_profile
from toolkit.cli.workload import StepSize
from toolkit.runtime.debug import debug_level
from toolkit.runtime.device.open import open_device
from toolkit.runtime.engine import Engine
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.plan import Plan
from toolkit.runtime.request import Add

SHAPE = {"num_hidden_layers": 4, "max_position_embeddings": 256}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
}
STEPS = 32


@dataclass
class Case:
    """A compiled model and its original."""

    directory: Path
    plan: Plan
    model: Any

    def logprobs(self, tokens: list[int]) -> np.ndarray[Any, Any]:
        """Log-probabilities [T, V] of the original."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens])).logits[0]
        result: np.ndarray[Any, Any] = torch.log_softmax(logits.float(), -1).numpy()
        return result

    def engine(self, *, full_sequences: float = 8.0, **options: Any) -> Engine:
        """An engine whose cache holds so many sequences of full length."""
        plan, memory = self.plan, self.plan.memory
        bytes_allowed = memory.arena + memory.weights + memory.host + cache_bytes(plan, full_sequences) + 4096
        choice = EngineOptions(memory=bytes_allowed, threads=1, **options)
        return Engine(open_device(self.directory, plan, choice), choice)

    def check_greedy(self, prompt: list[int], output: Output) -> None:
        """Every token is the original's best after the tokens before it, or a near-tie with it."""
        assert output.error is None
        expected = self.logprobs(prompt + output.tokens)[len(prompt) - 1 : -1]
        chosen = expected[np.arange(len(output.tokens)), output.tokens]
        assert len(chosen) > 0
        assert np.all(expected.max(axis=1) - chosen < 1e-3)


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(folder / "model", request.param, **SHAPE, **KINDS[request.param])
    directory = compile_model(folder / "model", output=folder / "plan", max_batch=8, max_context=192)
    return Case(directory, read_plan(directory), model)


def prompts(count: int, seed: int = 0) -> list[list[int]]:
    return shared_prompts(count, vocabulary=199, trunk=50, begin=(10, 50), end=(5, 60), seed=seed)


def requests(count: int, **params: Any) -> list[Add]:
    return make_requests(prompts(count), **({"max_tokens": STEPS} | params))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_batched_tokens": 16},
        {"full_sequences": 1.2},
        {"full_sequences": 1.2, "max_batched_tokens": 11, "max_num_seqs": 3},
        {"prefix_cache": False},
    ],
)
def test_greedy_outputs_are_the_originals(case: Case, options: dict[str, Any]) -> None:
    """In one batch, in small chunks, with little memory, with and without prefix cache."""
    engine = case.engine(**options)
    outputs = run(engine, requests(8))
    assert ("full_sequences" in options) == (engine.stats().preemptions > 0)
    for prompt, output in zip(prompts(8), outputs.values(), strict=True):
        assert len(output.tokens) == STEPS
        case.check_greedy(prompt, output)
    engine.device.close()


def test_a_second_run_from_the_prefix_cache_says_the_same(case: Case) -> None:
    engine = case.engine()
    run(engine, requests(6))
    before = engine.stats().prefix_hits
    outputs = run(engine, requests(6))
    assert engine.stats().prefix_hits > before
    for prompt, output in zip(prompts(6), outputs.values(), strict=True):
        case.check_greedy(prompt, output)
    engine.device.close()


def test_hits_of_all_lengths_around_page_edges_change_nothing(case: Case) -> None:
    """Greedy outputs and log-probabilities are those without a prefix cache, and hits are counted to the token."""
    cached, plain = case.engine(), case.engine(prefix_cache=False)
    rng = np.random.default_rng(5)
    for shared in (0, 1, 2, 14, 15, 16, 17, 18, 30, 31, 32, 33, 34, 47, 48, 49, 63, 64, 65):
        for extra in (0, 1, 2, 15, 16, 17):
            trunk = rng.integers(3, 199, 66).tolist()
            prompt = trunk[:shared] + rng.integers(3, 199, extra).tolist()
            if not prompt:
                continue
            run(cached, [make_request("trunk", trunk, max_tokens=1)])
            before = cached.stats()
            request = make_request("x", prompt, max_tokens=4, logprobs=2, ignore_eos=True)
            output, expected = run(cached, [request])["x"], run(plain, [request])["x"]
            assert output.result == expected.result
            hits = len(prompt) - 1 if shared == len(prompt) and shared % 16 == 0 else shared // 16 * 16
            after = cached.stats()
            assert after.prefix_hits - before.prefix_hits == hits
            assert after.prefix_queries - before.prefix_queries == len(prompt)
            assert output.finished is not None
            assert output.finished.metrics is not None
            assert output.finished.metrics.cached_tokens == hits
    assert plain.stats().prefix_queries == plain.stats().prefix_hits == 0
    for engine in (cached, plain):
        engine.device.close()


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(case: Case) -> None:
    engine = case.engine()
    draws = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
    together = run(engine, requests(8, **draws))
    for request in requests(8, **draws):
        alone = run(engine, [request])[request.request]
        same = sum(a == b for a, b in zip(alone.tokens, together[request.request].tokens, strict=True))
        assert same == STEPS or alone.tokens[:8] == together[request.request].tokens[:8]
    engine.device.close()


def test_logprobs_are_the_originals(case: Case) -> None:
    engine = case.engine()
    prompt = prompts(1)[0]
    output = run(engine, [make_request("x", prompt, logprobs=5, prompt_logprobs=-1, max_tokens=4)])["x"]
    expected = case.logprobs(prompt + output.tokens)
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    for position, entry in enumerate(output.prompt_logprobs[1:]):
        assert entry is not None
        row = np.frombuffer(entry.row, "<f4")
        np.testing.assert_allclose(row, expected[position], atol=1e-4)
        assert entry.token == prompt[position + 1]
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-6)
        assert entry.rank == int((row > row[entry.token]).sum()) + 1
    for index, entry in enumerate(output.logprobs):
        row = expected[len(prompt) - 1 + index]
        assert entry.token == output.tokens[index]
        assert entry.logprob == pytest.approx(row[entry.token], abs=1e-4)
        top = np.sort(row)[::-1][:5]
        np.testing.assert_allclose([value for _, value in entry.top], top, atol=1e-4)
    engine.device.close()


def test_penalties_biases_and_stops_reach_the_sampler(case: Case) -> None:
    engine = case.engine()
    prompt = prompts(1)[0]
    biased = make_request("biased", prompt, logit_bias={7: 100.0}, max_tokens=5)
    assert run(engine, [biased])["biased"].tokens == [7] * 5
    stopped = make_request("stopped", prompt, logit_bias={7: 100.0, 9: 50.0}, stop_token_ids=(7,), min_tokens=3)
    assert run(engine, [stopped])["stopped"].tokens == [9, 9, 9, 7]
    penalized = make_request("penalized", prompt, presence_penalty=2.0, repetition_penalty=10.0, max_tokens=STEPS)
    tokens = run(engine, [penalized])["penalized"].tokens
    plain = run(engine, [make_request("plain", prompt, max_tokens=STEPS, ignore_eos=True)])["plain"].tokens
    assert len(set(tokens)) > len(set(plain))
    engine.device.close()


def test_level_1_tells_of_loading_and_steps(
    case: Case, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TOOLKIT_DEBUG", "1")
    debug_level.cache_clear()
    try:
        engine = case.engine()
        run(engine, [make_request("a", [5, 6, 7], max_tokens=4, ignore_eos=True)])
        engine.device.close()
    finally:
        monkeypatch.undo()
        debug_level.cache_clear()
    said = capsys.readouterr().err
    assert all(phase in said for phase in ("[1] Kernels (x86-64-", "[1] Weights (", "[1] Memory: weights", "[1] steps"))
    assert "[1] steps 1 to 4: 6 tokens in" in said
    assert "[2]" not in said


def test_a_profile_times_every_launch(case: Case, tmp_path: Path) -> None:
    size = StepSize(batch=2, tokens=3, context=40)
    found = profile(case.directory, EngineOptions(memory=1 << 30, threads=2), size, runs=3)
    launches = case.plan.buckets[0].launches
    assert [(each.op, each.kernel) for each in found.launches] == [(each.op, each.kernel) for each in launches]
    assert all(0 < each.seconds < 1 for each in found.launches)
    assert all(0 < each.occupancy <= 1 for each in found.launches)
    assert found.seconds == sum(each.seconds for each in found.launches)
    assert (found.threads, found.size, found.runs) == (2, size, 3)
    assert sum(each.flops for each in found.launches) > 6 * sum(launch.flops for launch in launches[:-3])
    file = tmp_path / "step.json"
    file.write_bytes(msgspec.json.encode(found))
    assert read_profile(file, case.directory, case.plan) == found
