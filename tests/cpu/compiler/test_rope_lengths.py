"""Plans of models whose RoPE frequencies depend on the length of a sequence, against Hugging Face with its cache."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpu.models.architectures import cached_logits, sequences, tiny_model

from toolkit.cli.driver import compile as compile_model
from toolkit.runtime.llm import LLM
from toolkit.runtime.plan import RopeChanges
from toolkit.runtime.request import SamplingParams

from .plan_runner import PlanRunner

CASES = {"phi3 longrope": RopeChanges(16, 17), "llama dynamic rope": RopeChanges(12, 48)}
END = 40


@pytest.fixture(scope="module", params=CASES)
def plan(
    native_module: None, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    case: str = request.param
    folder: Path = tmp_path_factory.mktemp("rope")
    model = tiny_model(case)
    model.save_pretrained(folder / "model")
    return case, compile_model(folder / "model", output=folder / "plan")


def test_prompts_in_chunks_then_decoding(plan: tuple[str, Path]) -> None:
    case, folder = plan
    runner = PlanRunner(folder)
    try:
        assert runner.plan.model.rope_changes == CASES[case]
        prompts = {"long": 21, "crossing": 9, "short": 2}
        tokens = {name: sequences(case, [END if name != "short" else 8], seed)[0] for seed, name in enumerate(prompts)}
        found: dict[str, list[Any]] = {name: [] for name in prompts}
        done = dict.fromkeys(prompts, 0)
        while live := [name for name in prompts if done[name] < len(tokens[name])]:
            counts = {name: min(8, prompts[name] - done[name]) if done[name] < prompts[name] else 1 for name in live}
            chunks = [(name, tokens[name][done[name] : done[name] + counts[name]]) for name in live]
            for name, part in zip(live, runner.step(chunks, prompts), strict=True):
                found[name].append(part)
                done[name] += counts[name]
        for name, prompt in prompts.items():
            expected = torch.log_softmax(torch.from_numpy(cached_logits(case, tokens[name], prompt)).double(), -1)
            np.testing.assert_allclose(np.concatenate(found[name]), expected, atol=1e-4)
    finally:
        runner.close()


@torch.no_grad()
def test_generation_equals_hugging_face(plan: tuple[str, Path]) -> None:
    """Longrope too: Hugging Face's Phi-3, as our engine, drops a cache of keys with short factors."""
    case, folder = plan
    prompts = [sequences(case, [length], 5)[0] for length in (9, 13, 20)]
    with LLM(folder, max_batched_tokens=8, max_num_seqs=4) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=14, ignore_eos=True)
        found = [result.token_ids for result in llm.generate(prompts, params)]
    for prompt, tokens in zip(prompts, found, strict=True):
        model: Any = copy.deepcopy(tiny_model(case))
        model.generation_config.eos_token_id = None
        whole = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=14)
        assert list(tokens) == whole[0, len(prompt) :].tolist()
