"""Plans of checkpoints that others quantized compute what Hugging Face does on the values that the codes stand for."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from unit.models.packed_writer import Format, write_quantized

from toolkit.cli.driver import compile as compile_model

from .plan_runner import PlanRunner
from .test_compile import expected, make_model, sequences

CASES = {
    "AWQ": (Format("awq"), "llama", "a4g32mw"),
    "GPTQ": (Format("gptq"), "qwen2", "a4g32"),
    "GPTQ, zeros": (Format("gptq", zeros=True), "llama", "a4g32mw"),
    "GPTQ, reordered": (Format("gptq", reordered=True), "llama", "a8g32"),
    "GPTQ of [in, out]": (Format("gptq"), "gpt2", "a4g32"),
    "W4A16": (Format("compressed-tensors", dtype=torch.bfloat16), "llama", "a4g32w"),
    "W4A16, zeros": (Format("compressed-tensors", zeros=True), "llama", "a4g32mw"),
    "W4A16, reordered": (Format("compressed-tensors", reordered=True), "llama", "a8g32"),
    "W8A16": (Format("compressed-tensors", bits=8, group=0), "phi3", "a8g32 a8g64"),
}


@pytest.mark.usefixtures("native")
@pytest.mark.parametrize("case", CASES)
def test_logits(case: str, tmp_path: Path) -> None:
    format_, kind, encodings = CASES[case]
    model = make_model(tmp_path / "model", kind, num_hidden_layers=1)
    write_quantized(model, tmp_path / "model", format_, turned=kind == "gpt2")
    for quant, bar in (("fp32", 1e-4), ("keep", 0.2)):
        runner = PlanRunner(compile_model(tmp_path / "model", output=tmp_path / quant, quant=quant, max_context=64), 1)
        try:
            tokens = sequences(runner.plan.model.vocab_size)["a"]
            (found,) = runner.step([("a", tokens)])
            np.testing.assert_allclose(found, expected(model, tokens), rtol=0, atol=bar)
            stored = {weight.encoding.name for weight in runner.plan.weights.values()}
            assert stored == ({"f32", *encodings.split()} if quant == "keep" else {"f32"})
            notes = [note for note in runner.plan.report.notes if "with reordered columns stored as a8g32" in note]
            assert len(notes) == (quant == "keep" and format_.reordered)
        finally:
            runner.close()
