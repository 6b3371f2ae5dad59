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
from unit.runtime.engine_harness import cache_bytes, make_request, run, shared_prompts
from unit.runtime.engine_suite import Case, EngineSuite

from toolkit.cli.driver import compile as compile_model
from toolkit.cli.profile import profile, read_profile
from toolkit.cli.workload import StepSize
from toolkit.runtime.debug import debug_level
from toolkit.runtime.device.open import open_device
from toolkit.runtime.engine import Engine
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.plan import Plan

SHAPE = {"num_hidden_layers": 4, "max_position_embeddings": 256}
KINDS: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {
        "sliding_window": 20,
        "layer_types": ["sliding_attention", "full_attention", "sliding_attention", "sliding_attention"],
    },
}


@dataclass
class CpuCase(Case):
    """A compiled model and its original."""

    directory: Path
    plan: Plan
    model: Any
    steps = 32
    tolerance = 1e-4

    def logprobs(self, prompt: list[int], tokens: list[int]) -> np.ndarray[Any, Any]:
        with torch.no_grad():
            logits = self.model(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        result: np.ndarray[Any, Any] = torch.log_softmax(logits.float(), -1).numpy()
        return result

    def engine(self, *, full_sequences: float = 8.0, **options: Any) -> Engine:
        plan, memory = self.plan, self.plan.memory
        bytes_allowed = memory.arena + memory.weights + memory.host + cache_bytes(plan, full_sequences) + 4096
        choice = EngineOptions(memory=bytes_allowed, threads=1, **options)
        return Engine(open_device(self.directory, plan, choice), choice)

    def prompts(self, count: int) -> list[list[int]]:
        return shared_prompts(count, vocabulary=199, trunk=50, begin=(10, 50), end=(5, 60))


@pytest.fixture(scope="module", params=sorted(KINDS))
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> CpuCase:
    folder = tmp_path_factory.mktemp(request.param)
    model = save_tiny_model(folder / "model", request.param, **SHAPE, **KINDS[request.param])
    directory = compile_model(folder / "model", output=folder / "plan", max_batch=8, max_context=192)
    return CpuCase(directory, read_plan(directory), model)


class TestEngine(EngineSuite):
    """On the CPU, beside the Hugging Face implementation."""


def test_hits_of_all_lengths_around_page_edges_change_nothing(case: CpuCase) -> None:
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


def test_a_seed_gives_the_same_tokens_whatever_runs_beside_it(case: CpuCase) -> None:
    engine = case.engine()
    draws = {"temperature": 1.0, "top_p": 0.95, "seed": 11}
    together = run(engine, case.requests(8, **draws))
    for request in case.requests(8, **draws):
        alone = run(engine, [request])[request.request]
        same = sum(a == b for a, b in zip(alone.tokens, together[request.request].tokens, strict=True))
        assert same == case.steps or alone.tokens[:8] == together[request.request].tokens[:8]
    engine.device.close()


def test_level_1_tells_of_loading_and_steps(
    case: CpuCase, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
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


def test_a_profile_times_every_launch(case: CpuCase, tmp_path: Path) -> None:
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
