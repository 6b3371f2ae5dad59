"""Makes checkpoints of 8-bit floats out of saved models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

ARRANGEMENTS = ("tensor", "row", "block")
"""What shares a scale; a block is 128 rows by 128 columns."""
CONFIGS: dict[str, dict[str, Any]] = {
    "tensor": {"quant_method": "fp8", "activation_scheme": "dynamic"},
    "row": {"quant_method": "compressed-tensors", "format": "float-quantized"},
    "block": {"quant_method": "fp8", "weight_block_size": [128, 128]},
}


def store_float8(folder: Path, arrangement: str) -> dict[str, torch.Tensor]:
    """Store the linear layers of a model in E4M3 with scales; the values that they have then, by name."""
    tensors, values = load_file(folder / "model.safetensors"), {}
    for name in [name for name in tensors if "proj" in name and tensors[name].ndim == 2]:
        weight = tensors[name].float()
        rows, columns = weight.shape
        high, wide = {"tensor": (rows, columns), "row": (1, columns), "block": (128, 128)}[arrangement]
        tops = torch.zeros(-(-rows // high), -(-columns // wide))
        for i, j in ((i, j) for i in range(tops.shape[0]) for j in range(tops.shape[1])):
            tops[i, j] = weight[i * high : (i + 1) * high, j * wide : (j + 1) * wide].abs().max()
        scale = tops / 448
        spread = scale.repeat_interleave(high, 0)[:rows].repeat_interleave(wide, 1)[:, :columns]
        codes = (weight / spread).to(torch.float8_e4m3fn)
        values[name] = codes.float() * spread
        tensors[name] = codes
        tensors[f"{name}_scale" + ("_inv" if arrangement == "block" else "")] = scale
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"quantization_config": CONFIGS[arrangement]}))
    return values
