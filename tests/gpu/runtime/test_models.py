"""Whole models on a GPU against transformers on that GPU: log-probabilities of random prompts, and greedy tokens."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from unit.runtime.engine_harness import make_request, run

from toolkit.runtime.engine import Engine, open_engine
from toolkit.runtime.options import EngineOptions

pytest.importorskip("transformers")
torch = pytest.importorskip("torch")
models: Any = pytest.importorskip("gpu.runtime.models")

PLANS = Path(os.environ.get("TOOLKIT_GPU_PLANS", "/nowhere"))
NAMES = sorted(path.name for path in (PLANS / "hf").glob("*-*"))
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.3}
"""Nats, of any token at any position. bfloat16 has 8 bits, and both sides round where they like."""
STEPS = 40

pytestmark = pytest.mark.skipif(not NAMES, reason="TOOLKIT_GPU_PLANS names no folder of plans: see make_plans.py")


class Case:
    """A model in both implementations."""

    def __init__(self, name: str) -> None:
        self.dtype = name.rpartition("-")[2]
        self.engine: Engine = open_engine(PLANS / "hf" / name / "plan", EngineOptions(memory=float(1 << 30)))
        auto = models.AutoModelForCausalLM
        self.model = auto.from_pretrained(PLANS / "hf" / name / "model", attn_implementation="eager").cuda().eval()

    def reference(self, tokens: list[int]) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Log-probabilities [tokens, V] of what follows each token."""
        with torch.no_grad():
            logits = self.model(torch.tensor([tokens], device="cuda")).logits[0].float()
        found: np.ndarray[Any, np.dtype[np.float32]] = torch.log_softmax(logits, -1).cpu().numpy()
        return found


@pytest.fixture(scope="module", params=NAMES)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    case = Case(request.param)
    yield case
    case.engine.device.close()


def prompts() -> list[list[int]]:
    """Shorter and longer than windows and pages."""
    rng = np.random.default_rng(3)
    return [rng.integers(3, 512, size).tolist() for size in (2, 17, 64, 200, 300)]


def test_log_probabilities_are_those_of_transformers(case: Case) -> None:
    requests = [make_request(str(n), each, prompt_logprobs=-1, max_tokens=1) for n, each in enumerate(prompts())]
    for tokens, output in zip(prompts(), run(case.engine, requests).values(), strict=True):
        entries = output.prompt_logprobs
        assert entries is not None
        found = np.array([np.frombuffer(entry.row, "<f4") for entry in entries[1:] if entry is not None])
        expected = case.reference(tokens)[:-1]
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() < TOLERANCE[case.dtype]


def test_greedy_tokens_are_likely_in_transformers(case: Case) -> None:
    """Each is the best there after the tokens before it, or among the five best and as likely up to rounding."""
    few = [tokens[:250] for tokens in prompts()]
    requests = [make_request(str(n), each, max_tokens=STEPS, ignore_eos=True) for n, each in enumerate(few)]
    for tokens, output in zip(few, run(case.engine, requests).values(), strict=True):
        assert len(output.tokens) == STEPS
        rows = case.reference([*tokens, *output.tokens])[len(tokens) - 1 : -1]
        chosen = rows[np.arange(STEPS), output.tokens]
        assert float((rows.max(axis=1) - chosen).max()) < TOLERANCE[case.dtype]
        assert ((rows > chosen[:, None]).sum(axis=1) < 5).all()
