"""Speculative decoding of a trained model: the same outputs, from fewer steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from unit.runtime.engine_harness import cache_bytes, make_request, run

from toolkit import LLM, SamplingParams
from toolkit.runtime.device.open import open_device
from toolkit.runtime.engine import Engine
from toolkit.runtime.load import read_plan
from toolkit.runtime.options import EngineOptions, SpeculativeConfig
from toolkit.runtime.request import Add
from toolkit.runtime.tokenizer import Tokenizer

CONFIGS = {
    "ngram": SpeculativeConfig(
        method="ngram", num_speculative_tokens=4, prompt_lookup_max=4, prompt_lookup_min=1, adaptive=False
    ),
    "suffix": SpeculativeConfig(method="suffix", num_speculative_tokens=8, adaptive=False),
    "adaptive": SpeculativeConfig(method="ngram", num_speculative_tokens=4, prompt_lookup_max=2),
}
TEXTS = (
    "one two three four five six seven eight nine ten, one two three four five six seven",
    "def add(a, b):\n    return a + b\n\n\ndef sub(a, b):\n    return a - b\n\n\ndef mul(a, b):\n",
    "The cat sat on the mat. The dog sat on the mat. The bird sat on the",
    "What is the capital of France?",
)
OUTPUTS = 24


def requests(tokenizer: Tokenizer) -> list[Add]:
    """Greedy ones and draws of all sorts."""
    sorts: tuple[dict[str, Any], ...] = (
        {},
        {"temperature": 0.7, "seed": 5, "top_p": 0.9},
        {"repetition_penalty": 1.2, "logprobs": 2, "min_tokens": 9},
        {"temperature": 1.0, "seed": 6, "presence_penalty": 0.5, "prompt_logprobs": 1},
    )
    return [
        make_request(f"{i}-{j}", tokenizer.encode(text, True), max_tokens=OUTPUTS, **params)
        for i, text in enumerate(TEXTS)
        for j, params in enumerate(sorts)
    ]


def engine_of(directory: Path, sequences: float = 16.0, **options: Any) -> Engine:
    plan = read_plan(directory)
    memory = plan.memory.arena + plan.memory.weights + plan.memory.host + cache_bytes(plan, sequences)
    choice = EngineOptions(memory=memory, threads=1, verify=False, **options)
    return Engine(open_device(directory, plan, choice), choice)


@pytest.mark.parametrize("name", CONFIGS)
def test_outputs_are_those_of_plain_decoding(name: str, smollm2_plan: Path) -> None:
    """Whole prompts and small chunks, cold and from the prefix cache."""
    plan = read_plan(smollm2_plan)
    wanted = requests(Tokenizer.open(smollm2_plan, plan))
    plain = engine_of(smollm2_plan, prefix_cache=False)
    expected = {key: output.result for key, output in run(plain, wanted).items()}
    plain.device.close()
    engine = engine_of(smollm2_plan, 1.0, max_batched_tokens=16, speculative_config=CONFIGS[name])
    for _ in range(2):
        assert {key: output.result for key, output in run(engine, wanted).items()} == expected
    stats = engine.stats()
    assert stats.prefix_hits > 0
    if name != "adaptive":
        assert stats.spec_accepted_tokens > 50
    engine.device.close()


def test_texts_end_at_stop_strings_wherever_steps_cut_them(smollm2_plan: Path) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=40, stop=("three, four", "sat on"))
    texts = []
    for config in (None, {"method": "ngram", "num_speculative_tokens": 5, "prompt_lookup_max": 2, "adaptive": False}):
        with LLM(smollm2_plan, memory="400MiB", threads=1, speculative_config=config) as llm:
            texts.append([answer.outputs[0].text for answer in llm.generate(list(TEXTS), params)])
    assert texts[0] == texts[1]
