"""One plan holds a library for each instruction set level, and each computes what the original does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from cpu.compiler.plan_runner import PlanRunner
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.cli.driver import compile as compile_model
from toolkit.compiler.codegen.cpu import ISA_LEVELS
from toolkit.runtime.device.cpu import CpuDevice
from toolkit.runtime.device.machine import cpu_flags
from toolkit.runtime.errors import UserError
from toolkit.runtime.plan import IsaName

Array = npt.NDArray[Any]
QUANTS = {"none": 1e-4, "int4": 0.6}
"""How weights are stored, and how far log-probabilities may be from the original's."""


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("isa")
    torch.manual_seed(3)
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 199}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}
    config = AutoConfig.for_model("llama", **sizes)
    config.dtype = torch.float32
    from_config: Any = AutoModelForCausalLM.from_config
    model = from_config(config).eval()
    model.save_pretrained(folder / "model")
    for quant in QUANTS:
        compile_model(folder / "model", output=folder / quant, quant=quant)
    return folder, model


def logprobs(plan: Path, tokens: list[int]) -> Array:
    """Of a prompt in two chunks, at whatever level the environment says."""
    runner = PlanRunner(plan)
    try:
        return np.concatenate([runner.step([("x", part)])[0] for part in (tokens[:9], tokens[9:10], tokens[10:])])
    finally:
        runner.close()


@pytest.mark.parametrize("quant", QUANTS)
def test_every_level_equals_the_original(
    original: tuple[Path, Any], quant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, model = original
    tokens = np.random.default_rng(0).integers(3, 199, 40).tolist()
    with torch.no_grad():
        expected = torch.log_softmax(model(torch.tensor([tokens])).logits[0].double(), -1).numpy()
    found: list[Array] = []
    for level in ISA_LEVELS:
        monkeypatch.setenv("TOOLKIT_ISA", level.name)
        lacking = set(level.requires) - cpu_flags()
        if lacking:
            with pytest.raises(UserError, match=sorted(lacking)[0]):
                PlanRunner(folder / quant)
            continue
        found.append(logprobs(folder / quant, tokens))
        np.testing.assert_allclose(found[-1], expected, atol=QUANTS[quant])
        np.testing.assert_allclose(found[-1], found[0], atol=1e-3)  # levels differ by float32 rounding alone
    monkeypatch.delenv("TOOLKIT_ISA")
    np.testing.assert_array_equal(logprobs(folder / quant, tokens), found[-1])  # the best is the default


@pytest.mark.parametrize("isa", [level.name for level in ISA_LEVELS if cpu_flags().issuperset(level.requires)])
def test_the_level_asked_for_runs(original: tuple[Path, Any], isa: IsaName, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TOOLKIT_ISA", isa)
    runner = PlanRunner(original[0] / "none")
    try:
        assert isinstance(runner.device, CpuDevice)
        assert runner.device.isa == isa
    finally:
        runner.close()
