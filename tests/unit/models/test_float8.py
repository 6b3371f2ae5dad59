"""Weights in 8-bit floats with scales equal what torch makes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.models.checkpoint import Checkpoint, Quantized, float8_notes
from toolkit.models.float8 import Float8Tensor, values
from toolkit.models.source import open_model
from toolkit.runtime.encodings import FLOAT32
from toolkit.runtime.errors import UserError

TYPES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2}
SHAPE = (300, 320)


@pytest.mark.parametrize("format_", TYPES)
def test_every_code(format_: str) -> None:
    expected = torch.arange(256, dtype=torch.uint8).view(TYPES[format_]).float().numpy()
    np.testing.assert_array_equal(values(format_), expected)


@pytest.mark.parametrize("format_", TYPES)
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
@pytest.mark.parametrize("scales", [(), (1,), (300,), (300, 1), (3, 3)])
@pytest.mark.parametrize("keeps", [False, True])
def test_scales_of_tensors_rows_and_blocks(
    format_: str, suffix: str, scales: tuple[int, ...], keeps: bool, tmp_path: Path
) -> None:
    """Decoded, or kept where kernels multiply such codes."""
    codes = torch.randn(SHAPE).to(TYPES[format_])
    scale = torch.rand(scales) + 0.5
    save_file({"a.weight": codes, f"a.weight{suffix}": scale}, tmp_path / "model.safetensors")
    checkpoint = Checkpoint(tmp_path, quantized=Quantized(keeps_float8=keeps))
    tensor = checkpoint["a.weight"]
    assert isinstance(tensor, Float8Tensor)
    kept = keeps and format_ == "F8_E4M3"
    assert (tensor.shape, tensor.encoding.name) == (SHAPE, "e4m3g64w" if kept else "f32")
    wide = scale
    if scales == (3, 3):
        wide = scale.repeat_interleave(128, 0)[:300].repeat_interleave(128, 1)[:, :320]
    elif len(scales) == 1 and scales != (1,):
        wide = scale[:, None]
    expected = (codes.float() * wide).numpy()
    np.testing.assert_array_equal(tensor.read().decode(), expected)
    np.testing.assert_array_equal(tensor.read(120, 140).decode(), expected[120:140])
    if kept:
        np.testing.assert_array_equal(tensor.read().data.view(np.uint8), codes.view(torch.uint8).numpy())
        assert not list(float8_notes(checkpoint))
    else:
        assert "1 tensors are 8-bit floats" in next(iter(float8_notes(checkpoint)))


def test_widths_that_no_group_fits_are_decoded(tmp_path: Path) -> None:
    codes = torch.randn(10, 48).to(torch.float8_e4m3fn)
    save_file({"a.weight": codes, "a.weight_scale": torch.tensor(0.5)}, tmp_path / "model.safetensors")
    tensor = Checkpoint(tmp_path, quantized=Quantized(keeps_float8=True))["a.weight"]
    assert tensor.encoding == FLOAT32
    np.testing.assert_array_equal(tensor.read().decode(), codes.float().numpy() * 0.5)


def test_scales_of_another_arrangement(tmp_path: Path) -> None:
    save_file(
        {"a.weight": torch.zeros(SHAPE).to(torch.float8_e4m3fn), "a.weight_scale": torch.ones(7)},
        tmp_path / "model.safetensors",
    )
    with pytest.raises(UserError, match=r"expected a scale for the tensor.*found a\.weight_scale \[7\]"):
        Checkpoint(tmp_path)


SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


def write_model(folder: Path, quantization: dict[str, Any]) -> dict[str, torch.Tensor]:
    """A llama whose matrices are 8-bit floats with a scale for each 16x16 block; returns what they stand for."""
    model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **SIZES))  # type: ignore[no-untyped-call]
    model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": quantization}))
    stored, expected = {}, {}
    for name, tensor in model.state_dict().items():
        stored[name] = expected[name] = tensor
        if "proj" in name:
            rows, columns = tensor.shape
            scale = torch.rand(-(-rows // 16), -(-columns // 16)) + 0.5
            stored[name] = tensor.to(torch.float8_e4m3fn)
            stored[f"{name}_scale_inv"] = scale
            wide = scale.repeat_interleave(16, 0)[:rows].repeat_interleave(16, 1)[:, :columns]
            expected[name] = stored[name].float() * wide
    save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / "model.safetensors")
    return expected


def test_a_quantized_model_opens(tmp_path: Path) -> None:
    expected = write_model(tmp_path, {"quant_method": "fp8", "weight_block_size": [16, 16]})
    opened = open_model(str(tmp_path))
    assert not hasattr(opened.config, "quantization_config")
    assert "7 tensors are 8-bit floats" in opened.notes[0]
    for name, tensor in expected.items():
        np.testing.assert_array_equal(opened.weights[name].read().decode(), tensor.float().numpy())


@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        ({"quant_method": "bitsandbytes"}, "quantized by 'bitsandbytes'"),
        ({"quant_method": "compressed-tensors", "format": "marlin-24"}, "compressed-tensors. as .marlin-24."),
        ({"quant_method": "awq", "version": "gemv"}, "quantized by .awq. as .gemv."),
        ({"quant_method": "gptq", "checkpoint_format": "marlin"}, "quantized by .gptq. as .marlin."),
        ({"quant_method": "fp8", "weight_block_size": [16]}, "expected two sizes"),
    ],
)
def test_other_quantizations_are_refused(quantization: dict[str, Any], message: str, tmp_path: Path) -> None:
    write_model(tmp_path, quantization)
    with pytest.raises(UserError, match=message):
        open_model(str(tmp_path))
