"""CUDA linear layers and embeddings with affine weights against numpy in float64: every way to store codes."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.harness import run
from gpu.kernels.numbers import Array, close, store, value
from gpu.kernels.test_linear import Shape, compare

from toolkit.kernels_templates.packing import pack, panel_encoding
from toolkit.runtime.encodings import EncodedArray

NAMES = (
    *("a4g32", "a4g32m", "a4g64m", "a4g128", "a4g128m", "a8g32", "a8g128", "a5g32", "a5g32m", "a6g16k", "a4g32mk"),
    *("a5g32mk", "a2g16mk", "a3g16k", "iq4g32", "iq4g32k", "e2m1g16", "a6g32w"),
)
HALF = ("bfloat16", "float16")


def quantized(name: str, rows: int, columns: int) -> tuple[Array, Array]:
    """A weight with every code, packed, and its numbers, of which a row's squares add up to about 1."""
    encoding, rng = panel_encoding(name), np.random.default_rng(7)
    codes = rng.integers(0, 1 << encoding.bits, (rows, columns), np.uint8)
    scales = rng.standard_normal((2, rows, columns // encoding.unit)).astype(np.float32)
    factors = rng.integers(0, 64, (2, rows, columns // encoding.group), np.uint8)
    has_minimum, has_factors = encoding.has_minimum, encoding.block > 0

    def made(size: float) -> EncodedArray:
        return EncodedArray(
            encoding,
            codes.view(np.int8) if encoding.bits == 8 else codes,
            (scales[0] * size).astype(encoding.scale),
            (scales[1] * size * 3).astype(encoding.scale) if has_minimum else None,
            (factors[0].astype(np.int8) - 32).astype(np.int8) if has_factors else None,
            factors[1] if has_factors and has_minimum else None,
        )

    size = float(columns**-0.5 / made(1.0).decode().std())
    array = made(size)
    return pack("panel16", array), array.decode().astype(np.float64)


def case(family: str, name: str, real: str, shape: Shape, gated: bool, **sizes: int) -> None:
    compare(family, real, shape, gated, quantized(name, *shape[1:]), encoding=name, **sizes)


@pytest.mark.parametrize("real", HALF)
@pytest.mark.parametrize("name", NAMES)
def test_skinny(name: str, real: str) -> None:
    case("linear_skinny_quantized", name, real, (5, 100, 768), False, tile_rows=8, panels=1)
    case("linear_skinny_quantized", name, real, (1, 33, 2816), False, tile_rows=8, panels=1)


@pytest.mark.parametrize("name", ["a4g32", "a4g128m", "a8g32", "a6g16k", "a4g32mk"])
@pytest.mark.parametrize(("rows", "tile_rows", "panels"), [(7, 8, 1), (8, 8, 2), (16, 16, 2), (29, 32, 2)])
def test_skinny_rows_and_gates(name: str, rows: int, tile_rows: int, panels: int) -> None:
    case("linear_skinny_quantized", name, "bfloat16", (rows, 96, 512), True, tile_rows=tile_rows, panels=panels)
    case("linear_skinny_quantized", name, "bfloat16", (rows, 90, 512), False, tile_rows=tile_rows, panels=panels)


@pytest.mark.parametrize("real", HALF)
@pytest.mark.parametrize("name", NAMES)
def test_tiled(name: str, real: str) -> None:
    case("linear_tiled_quantized", name, real, (130, 200, 768), False, tile_rows=128, tile_columns=64, split=4)


@pytest.mark.parametrize("name", ["a4g32", "a4g128m", "a8g32", "a6g16k"])
@pytest.mark.parametrize(
    ("tile_rows", "tile_columns", "split"), [(32, 256, 1), (64, 128, 2), (128, 256, 1), (64, 64, 4), (128, 128, 2)]
)
def test_tiled_sizes_and_gates(name: str, tile_rows: int, tile_columns: int, split: int) -> None:
    sizes = {"tile_rows": tile_rows, "tile_columns": tile_columns, "split": split}
    for shape, gated in (((70, 416, 256), True), ((300, 330, 512), False), ((1, 32, 256), True)):
        case("linear_tiled_quantized", name, "bfloat16", shape, gated, **sizes)


@pytest.mark.parametrize("name", NAMES)
def test_exact(name: str) -> None:
    case("linear_exact", name, "float32", (3, 64, 256), True)


@pytest.mark.parametrize("real", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["f32", "f16", "bf16", *NAMES])
def test_embedding(name: str, real: str) -> None:
    rows, width = 37, 256
    if name.startswith(("f", "b")):
        kind = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}[name]
        stored = store(np.random.default_rng(0).standard_normal((rows, width)), kind)
        packed, table = stored.reshape(-1).view(np.uint8), value(stored, kind)
    else:
        packed, table = quantized(name, rows, width)
    ids, out = np.array([36, 0, 17, 16, 15], np.int32), store(np.zeros((5, width)), real)
    found = run(
        "embedding", {"real": real, "encoding": name}, weight=packed, ids=ids, out=out, T=5, V=rows, W=width, scale=1.5
    )["out"]
    close(value(found, real), 1.5 * table[ids], real)
