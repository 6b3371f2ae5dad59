"""Plans with an int8 K/V cache decode as those with a float one do, and hold more tokens in the same memory."""

from __future__ import annotations

import copy
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from click.testing import CliRunner
from cpu.compiler.plan_runner import PlanRunner
from cpu.models.architectures import sequences, tiny_model
from transformers.masking_utils import AttentionMaskInterface, eager_mask
from transformers.modeling_utils import AttentionInterface

from toolkit.cli.driver import compile as compile_model
from toolkit.cli.main import group
from toolkit.runtime.engine import open_engine
from toolkit.runtime.llm import LLM
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions
from toolkit.runtime.request import SamplingParams

Array = npt.NDArray[np.float32]
ALTERNATIVES = 5
STEPS = 16


def decoded(plan: Path, prompts: list[list[int]]) -> list[Array]:
    """Log-probabilities [STEPS, V] of each prompt's greedy tokens, all prompts together."""
    runner = PlanRunner(plan, threads=1)
    found = [part[-1:] for part in runner.step([(str(number), tokens) for number, tokens in enumerate(prompts)])]
    for _ in range(STEPS - 1):
        step = runner.step([(str(number), [int(part[-1].argmax())]) for number, part in enumerate(found)])
        found = [np.concatenate(pair) for pair in zip(found, step, strict=True)]
    runner.close()
    return found


def compatible(ours: Array, theirs: Array) -> None:
    """The logprob rule: where tokens first differ, each side's is among the likeliest of the other."""
    assert np.isfinite(ours).all()
    for mine, other in zip(ours, theirs, strict=True):
        token, wanted = int(mine.argmax()), int(other.argmax())
        if token != wanted:
            assert token in np.argsort(-other)[:ALTERNATIVES]
            assert wanted in np.argsort(-mine)[:ALTERNATIVES]
            return


def rounded(x: torch.Tensor) -> torch.Tensor:
    """Numbers [..., D] as an int8 cache holds them: codes, and a float16 scale for each token and head."""
    scale = (x.abs().amax(-1, keepdim=True) / 127).half().float()
    return (x / scale).round() * scale


def over_rounded_keys(module: Any, query: Any, key: torch.Tensor, value: torch.Tensor, *rest: Any, **more: Any) -> Any:
    """Attention of a Hugging Face model, had its keys and values gone through an int8 cache."""
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, rounded(key), rounded(value), *rest, **more)


@pytest.fixture
def rounding_attention() -> str:
    """The name of this attention among those of transformers."""
    AttentionInterface.register("rounded", over_rounded_keys)
    AttentionMaskInterface.register("rounded", eager_mask)
    return "rounded"


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("case", ["llama", "qwen3", "gemma2", "gpt2", "phi3"])
def test_tokens_follow_those_of_a_float_cache(case: str, rounding_attention: str, tmp_path: Path) -> None:
    tiny_model(case).save_pretrained(tmp_path / "model")
    prompts = sequences(case, (37, 5, 18))
    exact, ours = (
        decoded(compile_model(tmp_path / "model", output=tmp_path / dtype, kv_cache_dtype=dtype, max_batch=8), prompts)
        for dtype in ("float32", "int8")
    )
    model: Any = copy.deepcopy(tiny_model(case))
    model.set_attn_implementation(rounding_attention)
    for prompt, mine, other in zip(prompts, ours, exact, strict=True):
        compatible(mine, other)
        with torch.no_grad():
            expected = torch.log_softmax(model(torch.tensor([prompt])).logits[0, -1], -1).numpy()
        cost, error = np.abs(mine[0] - other[0]).max(), np.abs(mine[0] - expected).max()
        assert error < max(2e-3, 0.1 * cost)  # a number between two codes may go to either
        assert cost > 1e-5


@pytest.mark.usefixtures("native")
def test_a_trained_model_follows_its_float_cache(smollm2: Path, smollm2_plan: Path, tmp_path: Path) -> None:
    small = compile_model(smollm2, output=tmp_path / "plan", kv_cache_dtype="int8", max_batch=8, max_context=1024)
    assert [read_plan(plan).caches[0].dtype for plan in (smollm2_plan, small)] == ["float16", "int8"]
    prompts = ["The capital of France is", "Once upon a time there was a little girl who", "def fibonacci(n):\n"]
    params = SamplingParams(max_tokens=24, temperature=0, logprobs=ALTERNATIVES, ignore_eos=True)
    likely: list[list[list[list[int]]]] = []  # by plan, prompt and token
    for plan in (smollm2_plan, small):
        with LLM(plan, memory=1e9) as llm:
            outputs = llm.generate(prompts, params)
        likely.append([[list(table) for table in output.logprobs or ()] for output in outputs])
    for theirs, ours in zip(*likely, strict=True):
        assert len(theirs) == len(ours) == 24
        differing = [(mine, other) for mine, other in zip(ours, theirs, strict=True) if mine[0] != other[0]]
        for mine, other in differing[:1]:
            assert mine[0] in other
            assert other[0] in mine


@pytest.mark.usefixtures("native")
def test_a_token_costs_a_byte_a_number_and_more_tokens_fit(tmp_path: Path) -> None:
    model = tiny_model("llama")
    model.save_pretrained(tmp_path / "model")
    config: Any = model.config
    numbers = 2 * config.num_hidden_layers * config.num_key_value_heads  # keys and values
    capacity = {}
    for dtype, bytes_ in (("float32", 4 * 16), ("float16", 2 * 16), ("int8", 16 + 2)):  # a float16 scale a head
        path = compile_model(tmp_path / "model", output=tmp_path / dtype, kv_cache_dtype=dtype, max_batch=8)
        plan = read_plan(path)
        assert plan.kv_bytes_per_token == numbers * bytes_
        shown = json.loads(CliRunner().invoke(group, ["inspect", str(path), "--json"]).stdout)
        assert shown["kv_bytes_per_token"] == plan.kv_bytes_per_token
        fixed = plan.memory.arena + plan.memory.weights + plan.memory.host
        engine = open_engine(path, EngineOptions(memory=fixed + 512 * numbers * 4 * 16, threads=1))
        capacity[dtype] = engine.kv.capacity
        engine.device.close()
    assert capacity["float32"] == 512 - 16  # one page takes what is written for nobody
    assert capacity["float16"] == 1024 - 16
    assert capacity["int8"] == 512 * 64 // 18 // 16 * 16 - 16
