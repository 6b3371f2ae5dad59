"""Quantized checkpoints, packed as the formats' own tools do it: bit by bit, with what the numbers stand for."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from safetensors.torch import save_file

Array = npt.NDArray[Any]
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def pack(codes: Array, bits: int, order: tuple[int, ...] = ()) -> Array:
    """Codes [a, b] in words [a, ceil(b / count)], the first in the lowest bits."""
    count = 32 // bits
    words = np.zeros((codes.shape[0], -(-codes.shape[1] // count)), np.uint32)
    for column in range(words.shape[1]):
        for place, source in enumerate(order or range(count)):
            if column * count + source < codes.shape[1]:
                words[:, column] |= codes[:, column * count + source].astype(np.uint32) << np.uint32(place * bits)
    return words.view(np.int32)


@dataclass(frozen=True)
class Format:
    """How a matrix is quantized and stored."""

    method: str
    bits: int = 4
    group: int = 32
    """0: one group a row."""
    zeros: bool = False
    reordered: bool = False
    dtype: torch.dtype = torch.float16
    """That of the scales."""
    second: bool = False
    """GPTQ's second format, whose zeros are as they are."""

    @property
    def config(self) -> dict[str, Any]:
        """What config.json says."""
        if self.method == "awq":
            return {"quant_method": "awq", "bits": 4, "group_size": self.group, "zero_point": True, "version": "gemm"}
        if self.method == "gptq":
            second = {"checkpoint_format": "gptq_v2"} if self.second else {}
            kind = {
                "bits": self.bits,
                "group_size": self.group or -1,
                "desc_act": self.reordered,
                "sym": not self.zeros,
            }
            return {"quant_method": "gptq", **kind, **second}
        weights = {"num_bits": self.bits, "type": "int", "symmetric": not self.zeros, "group_size": self.group or None}
        groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
        return {"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": groups}


def quantize(weight: Array, format_: Format, seed: int = 0) -> tuple[Array, dict[str, Array | torch.Tensor]]:
    """A matrix [N, K]: the float64 values that its codes stand for, and what to append to a name for each tensor."""
    rng, (rows, columns) = np.random.default_rng(seed), weight.shape
    width = format_.group or columns
    count, limit, middle = columns // width, 2**format_.bits - 1, 1 << (format_.bits - 1)
    group_of = np.arange(columns) // width
    if format_.reordered:
        group_of = rng.permutation(group_of)
    scales, zeros = np.zeros((rows, count)), np.full((rows, count), middle)
    for group in range(count):
        part = weight[:, group_of == group]
        if format_.zeros or format_.method == "awq":
            low, high = np.minimum(part.min(axis=1), 0), np.maximum(part.max(axis=1), 0)
            scales[:, group] = (high - low) / limit
            zeros[:, group] = np.clip(np.rint(-low / scales[:, group]), 1, limit)
        else:
            scales[:, group] = np.abs(part).max(axis=1) / (middle - 0.5)
    stored = torch.tensor(scales).to(format_.dtype)
    scales = stored.double().numpy()
    codes = np.clip(np.rint(weight / scales[:, group_of]) + zeros[:, group_of], 0, limit).astype(np.int64)
    return (codes - zeros[:, group_of]) * scales[:, group_of], _PARTS[format_.method](
        format_, codes, zeros, stored, group_of
    )


Parts = dict[str, Array | torch.Tensor]


def _awq(_: Format, codes: Array, zeros: Array, scales: torch.Tensor, group_of: Array) -> Parts:
    words, zero_words = pack(codes.T, 4, AWQ_ORDER), pack(zeros.T, 4, AWQ_ORDER)
    return {"qweight": words, "qzeros": zero_words, "scales": scales.T.contiguous()}


def _gptq(format_: Format, codes: Array, zeros: Array, scales: torch.Tensor, group_of: Array) -> Parts:
    stored = zeros - (0 if format_.second else 1)
    return {
        "qweight": np.ascontiguousarray(pack(codes, format_.bits).T),
        "qzeros": pack(stored.T, format_.bits),
        "scales": scales.T.contiguous(),
        "g_idx": group_of.astype(np.int32),
    }


def _compressed(format_: Format, codes: Array, zeros: Array, scales: torch.Tensor, group_of: Array) -> Parts:
    parts: Parts = {
        "weight_packed": pack(codes, format_.bits),
        "weight_scale": scales,
        "weight_shape": np.array(codes.shape, np.int64),
    }
    if format_.zeros:
        parts["weight_zero_point"] = np.ascontiguousarray(pack(zeros.T, format_.bits).T)
    if format_.reordered:
        parts["weight_g_idx"] = group_of.astype(np.int32)
    return parts


_PARTS: Mapping[str, Callable[[Format, Array, Array, torch.Tensor, Array], Parts]] = {
    "awq": _awq,
    "gptq": _gptq,
    "compressed-tensors": _compressed,
}


def tensors(parts: Parts) -> dict[str, torch.Tensor]:
    """As torch's, which safetensors writes."""
    return {name: part if isinstance(part, torch.Tensor) else torch.tensor(part) for name, part in parts.items()}


def write_quantized(model: Any, folder: Path, format_: Format, turned: bool = False) -> None:
    """Save a model with its blocks' matrices quantized, and give the model the values that they stand for.

    `turned`: the model has them [in, out], the checkpoint [out, in].
    """
    model.config.save_pretrained(folder)
    path, stored = folder / "config.json", dict[str, torch.Tensor]()
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": format_.config}))
    with torch.no_grad():
        for number, (name, tensor) in enumerate(model.state_dict().items()):
            if tensor.ndim != 2 or not name.endswith(".weight") or not (".layers." in name or ".h." in name):
                if not any(tensor.data_ptr() == other.data_ptr() for other in stored.values()):  # tied
                    stored[name] = tensor
                continue
            matrix = tensor.T if turned else tensor
            values, parts = quantize(matrix.double().numpy(), format_, number)
            exact = torch.tensor(values, dtype=torch.float32)
            tensor.copy_(exact.T if turned else exact)
            stored |= {f"{name.removesuffix('weight')}{part}": value for part, value in tensors(parts).items()}
    save_file(stored, folder / "model.safetensors")
