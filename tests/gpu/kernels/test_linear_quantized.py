"""CUDA linear layers and embeddings with affine weights against numpy in float64: every way to store codes."""

from __future__ import annotations

import numpy as np
import pytest
from gpu.kernels.harness import run
from gpu.kernels.numbers import Array, close, random, store, value
from gpu.kernels.test_linear import Shape, compare, operands

from toolkit.compiler.quantize import nearest
from toolkit.kernels_templates.catalog import ParamValue
from toolkit.kernels_templates.cuda.choose import choose_linear
from toolkit.kernels_templates.cuda.linear import quantized_turns
from toolkit.kernels_templates.packing import pack, panel_encoding
from toolkit.passes.quantization import FLOAT8
from toolkit.runtime.encodings import EncodedArray, e4m3_values

NAMES = (
    *("a4g32", "a4g32m", "a4g64m", "a4g128", "a4g128m", "a8g32", "a8g128", "a5g32", "a5g32m", "a6g16k", "a4g32mk"),
    *("a5g32mk", "a2g16mk", "a3g16k", "iq4g32", "iq4g32k", "e2m1g16", "a6g32w"),
    *("e4m3g128w", "e4m3g64w", "e4m3g32w", "e4m3g32"),
)
HALF = ("bfloat16", "float16")


def quantized(name: str, rows: int, columns: int) -> tuple[Array, Array]:
    """A weight with every code, packed, and its numbers, of which a row's squares add up to about 1."""
    encoding, rng = panel_encoding(name), np.random.default_rng(7)
    codes = rng.integers(0, 1 << encoding.bits, (rows, columns), np.uint8)
    if encoding.levels == "e4m3":
        codes[codes & 0x7F == 0x7F] = 0x80  # not a number
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
    return pack("operand16", array), array.decode().astype(np.float64)


def case(family: str, name: str, real: str, shape: Shape, gated: bool, **sizes: int) -> None:
    sizes = {"width": 64, "cluster": 2, "warpgroups": 2, "depth": 256, "stages": 2} | sizes
    turns = quantized_turns(sizes["width"], sizes["warpgroups"])
    sizes["stages"] = -(-sizes["stages"] // turns) * turns
    given = operands(real, shape, quantized(name, *shape[1:]))
    compare(family, real, shape, gated, given, encoding=name, **sizes)


Hopper = tuple[int, int, int, int, int]
"""Width, cluster, warpgroups, depth and stages."""


def hopper(sizes: Hopper) -> dict[str, int]:
    return dict(zip(("width", "cluster", "warpgroups", "depth", "stages"), sizes, strict=True))


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


@pytest.mark.parametrize("name", ["a4g128", "a8g32", "a4g32mk", "e4m3g128w"])
@pytest.mark.parametrize("tile_rows", [8, 16, 32])
@pytest.mark.parametrize(
    "sizes",
    [
        *((32, 1, 2, 256, 2), (96, 2, 2, 256, 4), (128, 4, 1, 256, 3)),
        *((224, 1, 2, 256, 2), (64, 1, 4, 256, 4), (64, 8, 3, 256, 6)),
    ],
)
def test_skinny_hopper(name: str, tile_rows: int, sizes: Hopper) -> None:
    params = {"tile_rows": tile_rows, "panels": 1, **hopper(sizes)}
    case("linear_skinny_quantized", name, "bfloat16", (tile_rows - 1, 200, 2816), False, **params)
    case("linear_skinny_quantized", name, "bfloat16", (tile_rows, 416, 2304), True, **params)


@pytest.mark.parametrize("name", ["a4g128", "a8g32", "a4g32mk", "e4m3g128w"])
@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize(
    "sizes", [(128, 1, 2, 256, 2), (128, 4, 2, 256, 2), (64, 2, 2, 256, 2), (192, 1, 1, 256, 2), (96, 2, 1, 256, 2)]
)
def test_tiled_hopper(name: str, tile_rows: int, sizes: Hopper) -> None:
    params = {"tile_rows": tile_rows, "tile_columns": 64, "split": 4, **hopper(sizes)}
    if tile_rows == 128 and sizes[0] > 64 * sizes[2]:  # too few registers
        params["width"] = 64
    for shape, gated in (((tile_rows + 7, 200, 2816), False), ((300, 416, 768), True), ((1, 32, 256), True)):
        case("linear_tiled_quantized", name, "bfloat16", shape, gated, **params)


def rounded(x: Array) -> tuple[Array, Array, Array]:
    """Rows as 8-bit floats in the kernels' order, their scales, and their numbers."""
    top = np.abs(x).max(axis=1).astype(np.float32)
    scale = top / np.float32(448)
    codes = nearest(x.astype(np.float32), scale, None, FLOAT8).astype(np.int8).view(np.uint8)
    order = np.arange(16).reshape(2, 4, 2).transpose(1, 0, 2).reshape(-1)
    moved = codes.reshape(len(x), -1, 16)[..., order].reshape(codes.shape)
    return np.ascontiguousarray(moved), scale, e4m3_values()[codes].astype(np.float64) * scale[:, None]


@pytest.mark.parametrize("real", ["float32", *HALF])
@pytest.mark.parametrize("columns", [32, 4096, 14336])
def test_quantize_float8(columns: int, real: str) -> None:
    x = random(1, 5, columns, real=real)
    x[3] = 0
    out, scale = np.zeros((5, columns), np.uint8), np.zeros(5, np.float32)
    found = run("quantize_float8", {"real": real}, x=x, x8=out, x_scale=scale, rows=5, K=columns)
    numbers = value(x, real)
    order = np.arange(16).reshape(4, 2, 2).transpose(1, 0, 2).reshape(-1)
    codes = found["x8"].reshape(5, -1, 16)[..., order].reshape(5, columns)
    np.testing.assert_allclose(found["x_scale"], np.abs(numbers).max(axis=1) / 448, rtol=1e-6)
    error = np.abs(e4m3_values()[codes] * found["x_scale"][:, None].astype(np.float64) - numbers)
    assert (error <= np.maximum(np.abs(numbers) / 16.0, found["x_scale"][:, None] * 2.0**-10) * 1.01).all()


@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("sizes", [(64, 2, 2, 256, 2), (128, 1, 2, 256, 2), (96, 4, 2, 256, 2), (64, 1, 1, 512, 1)])
@pytest.mark.parametrize("name", ["e4m3g128w", "e4m3g64w", "e4m3g32w"])
def test_float8(tile_rows: int, sizes: Hopper, name: str) -> None:
    for shape, gated in (((tile_rows + 7, 200, 2816), False), ((tile_rows, 416, 768), True)):
        rows, columns, inner = shape
        codes, scale, numbers = rounded(np.random.default_rng(1).standard_normal((rows, inner)))
        params: dict[str, ParamValue] = {
            "tile_rows": tile_rows,
            "narrow": True,
            "encoding": name,
            **hopper(sizes),
        }
        packed, weight = quantized(name, columns, inner)
        given = {"x": codes, "x_scale": scale, "weight": packed}, numbers, weight
        compare("linear_float8", "bfloat16", shape, gated, given, **params)


@pytest.mark.parametrize("real", HALF)
@pytest.mark.parametrize("rows", [1, 9, 32, 50, 300])
@pytest.mark.parametrize(("columns", "inner", "gated"), [(6144, 1024, False), (512, 4096, False), (1536, 512, True)])
def test_chosen(rows: int, columns: int, inner: int, gated: bool, real: str) -> None:
    family, params = choose_linear(rows, columns=columns, inner=inner, real=real, encoding="a4g128", gated=gated)
    sizes = {name: int(value) for name, value in params.items() if isinstance(value, int)}
    case(family, "a4g128", real, (rows, columns, inner), gated, **sizes)


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
