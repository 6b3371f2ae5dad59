"""Codes in words are read as what the formats' packers meant, and in which encodings."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import save_file
from unit.models.packed_writer import Format, quantize, tensors

from toolkit.compiler.weights import kept_encoding
from toolkit.models.checkpoint import Checkpoint, Quantized
from toolkit.models.packed import PackedTensor
from toolkit.runtime.errors import UserError

HALF, BRAIN, FULL = torch.float16, torch.bfloat16, torch.float32
FORMATS = {
    "a4g32mw": Format("awq"),
    "a4g128mw": Format("awq", group=128),
    "a4g32": Format("gptq"),
    "a4g64": Format("gptq", group=64),
    "a4g128": Format("gptq", group=0),
    "a4g128mw second": Format("gptq", group=128, zeros=True, second=True),
    "a4g64mw": Format("gptq", group=64, zeros=True),
    "a8g32": Format("gptq", bits=8),
    "a8g128mw": Format("gptq", bits=8, group=128, zeros=True),
    "a2g64mw": Format("gptq", bits=2, group=64, zeros=True),
    "a4g128w": Format("compressed-tensors", group=128, dtype=BRAIN),
    "a4g32w": Format("compressed-tensors", dtype=FULL),
    "a4g32mw packed": Format("compressed-tensors", zeros=True, dtype=BRAIN),
    "a8g128": Format("compressed-tensors", bits=8, group=0),
    "a8g32mw": Format("compressed-tensors", bits=8, zeros=True),
    "f32 gptq": Format("gptq", reordered=True),
    "f32 gptq zeros": Format("gptq", reordered=True, zeros=True, group=64),
    "f32 packed": Format("compressed-tensors", reordered=True, dtype=BRAIN),
    "f32 narrow": Format("gptq", group=16),
}
ROWS, COLUMNS = 64, 256


def stored(folder: Path, format_: Format, rows: int = ROWS, columns: int = COLUMNS) -> tuple[Any, Any]:
    """The tensor as it is read, and the values it stands for."""
    weight = np.random.default_rng(1).standard_normal((rows, columns))
    values, parts = quantize(weight, format_)
    save_file({f"model.x.{name}": part for name, part in tensors(parts).items()}, folder / "model.safetensors")
    checkpoint = Checkpoint(folder, "model.", quantized=Quantized(zero_offset=0 if format_.second else 1))
    assert list(checkpoint) == ["model.x.weight"]
    return checkpoint["model.x.weight"], values


@pytest.mark.parametrize("case", FORMATS)
def test_values_and_encodings(case: str, tmp_path: Path) -> None:
    tensor, values = stored(tmp_path, FORMATS[case])
    assert isinstance(tensor, PackedTensor)
    assert (tensor.shape, tensor.turned) == ((ROWS, COLUMNS), tensor)
    assert tensor.encoding.name == case.partition(" ")[0]
    found = tensor.read()
    assert found.encoding == tensor.encoding
    exact = FORMATS[case].dtype != FULL  # products of float16 or bfloat16 scales with codes fit in float32
    np.testing.assert_allclose(found.decode(), values, rtol=0 if exact else 1e-6, atol=0)
    assert kept_encoding(tensor).name == ("a8g32" if case.startswith("f32") else tensor.encoding.name)
    assert ("reordered" in tensor.format) == FORMATS[case].reordered


@settings(max_examples=25)
@given(case=st.sampled_from(sorted(FORMATS)), start=st.integers(0, ROWS - 1), count=st.integers(1, ROWS))
def test_rows_are_those_of_the_whole(
    case: str, start: int, count: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    tensor, values = stored(tmp_path_factory.mktemp("part"), FORMATS[case])
    stop = start + count
    np.testing.assert_allclose(tensor.read(start, stop).decode(), values[start:stop], rtol=1e-6, atol=0)


def test_words_that_are_not_full(tmp_path: Path) -> None:
    tensor, values = stored(tmp_path, Format("compressed-tensors", zeros=True, group=0), rows=21, columns=13)
    assert tensor.encoding.name == kept_encoding(tensor).name == "f32"
    np.testing.assert_array_equal(tensor.read(3, 20).decode(), values[3:20].astype(np.float32))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"qzeros": None}, r"qweight \[32, 64\], scales \[8, 64\], g_idx \[256\]"),
        ({"scales": torch.ones(8, 63)}, "packed in a way that is not supported"),
        ({"scales": torch.ones(7, 64)}, "packed in a way that is not supported"),
        ({"g_idx": torch.zeros(255, dtype=torch.int32)}, "packed in a way that is not supported"),
        ({"qweight": torch.zeros(24, 64, dtype=torch.int32)}, "packed in a way that is not supported"),
        ({"qweight": torch.zeros(32, 64, dtype=torch.int64)}, "expected I32 words"),
        ({"qweight": torch.zeros(0, 64, dtype=torch.int32)}, "packed in a way that is not supported"),
        ({"g_idx": torch.full((256,), 8, dtype=torch.int32)}, "numbers groups from 8 to 8 of 8"),
        ({"g_idx": torch.zeros(256)}, "expected integers in model.x.g_idx, found F32"),
        ({"scales": torch.ones(8, 64, dtype=torch.int32)}, "weights must be F32"),
    ],
)
def test_what_fits_no_format_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    _, parts = quantize(np.random.default_rng(1).standard_normal((ROWS, COLUMNS)), Format("gptq"))
    whole = {name: part for name, part in (tensors(parts) | change).items() if part is not None}
    save_file({f"model.x.{name}": part for name, part in whole.items()}, tmp_path / "model.safetensors")
    with pytest.raises(UserError, match=message):
        kept_encoding(Checkpoint(tmp_path, "model.")["model.x.weight"])
