"""A real model's greedy text on a GPU is the CPU's, by the rule of log-probabilities.

TOOLKIT_GPU_TEXT names a folder with the model's GPU plan, `plan`, and `reference.json` of `make_reference.py`.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from toolkit.runtime.llm import LLM, Generation

FOLDER = Path(os.environ.get("TOOLKIT_GPU_TEXT", "/nowhere"))

pytestmark = pytest.mark.skipif(
    not (FOLDER / "reference.json").exists(), reason="TOOLKIT_GPU_TEXT names no folder with a plan and its reference"
)


def check(found: Generation, expected: dict[str, Any]) -> int:
    """At the first token that differs, each side's must be among the other's five best. How many were equal."""
    output = found.outputs[0]
    logprobs = output.logprobs
    assert logprobs is not None
    for index, (mine, other) in enumerate(zip(output.token_ids, expected["tokens"], strict=True)):
        if mine != other:
            assert mine in expected["top"][index]
            assert other in _best(logprobs[index])
            return index
    return len(output.token_ids)


def _best(logprobs: dict[int, float]) -> list[int]:
    return sorted(logprobs, key=lambda token: -logprobs[token])[:5]


@pytest.mark.parametrize("together", [False, True])
def test_greedy_text_is_the_cpus(together: bool) -> None:
    reference = json.loads((FOLDER / "reference.json").read_text())
    prompts = [each["prompt"] for each in reference]
    with LLM(FOLDER / "plan", memory=8e9) as llm:
        tokens = len(reference[0]["tokens"])
        params = llm.params(temperature=0.0, max_tokens=tokens, logprobs=5, ignore_eos=True)
        groups = [prompts] if together else [[prompt] for prompt in prompts]
        found = [each for group in groups for each in llm.generate(group, params)]
    equal = [check(each, expected) for each, expected in zip(found, reference, strict=True)]
    assert sum(equal) >= tokens * len(equal) / 2, "half of the tokens come before a difference"
