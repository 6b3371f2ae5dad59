"""CUDA linear layers against numpy in float64: odd sizes, epilogues, gates, biases."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels.harness import run
from gpu.kernels.numbers import Array, close, random, store, value

from toolkit.kernels_templates.catalog import ParamValue
from toolkit.kernels_templates.cuda.choose import choose_linear, other_linear

HALF = ("float16", "bfloat16")
ENCODINGS = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


Shape = tuple[int, int, int]
"""Rows, columns and inner size."""


def case(family: str, real: str, shape: Shape, gated: bool, **params: ParamValue) -> None:
    """Run one layer with a float weight and compare."""
    weight = random(2, *shape[1:], real=real, scale=shape[2] ** -0.5)
    given = operands(real, shape, (weight.view(np.uint8), value(weight, real)))
    compare(family, real, shape, gated, given, **params)


Operands = tuple[dict[str, Array], Array, Array]
"""The arguments that a kernel reads x and the weight from, and their numbers."""


def operands(real: str, shape: Shape, weight: tuple[Array, Array]) -> Operands:
    """Random x in `real`, and a weight given by its bytes and its numbers."""
    x = random(1, shape[0], shape[2], real=real)
    return {"x": x, "weight": weight[0]}, value(x, real), weight[1]


def compare(family: str, real: str, shape: Shape, gated: bool, given: Operands, **params: ParamValue) -> None:
    """Run one layer with a bias and an epilogue over two extras, and compare."""
    rows, columns, inner = shape
    results = columns // 2 if gated else columns
    bias, full, row = random(3, columns), random(4, rows, results, real=real), random(5, results, real=real)
    epilogue = "(add (mul (silu in0) in1) (mul in2 in3))" if gated else "(add (mul (silu in0) in1) in2)"
    common: dict[str, ParamValue] = {"real": real, "has_bias": True, "epilogue": epilogue, "gated": gated}
    common |= {"extra1": "t", "extra2": "n", "extra3": "", "extra4": ""}
    arrays: dict[str, Any] = {**given[0], "bias": bias, "extra1": full, "extra2": row}
    out = store(np.zeros((rows, results)), real)
    found = run(family, common | params, **arrays, out=out, rows=rows, N=columns, K=inner)["out"]
    product = given[1] @ given[2].T + bias
    first, second = value(full, real), value(row, real)
    if gated:
        expected = silu(product[:, :results]) * product[:, results:] + first * second
    else:
        expected = silu(product) * first + second
    close(value(found, real), expected, real)


Tile = tuple[int, int, int, int]
"""Columns, split, stages and depth."""


def tile(rows: int, sizes: Tile) -> dict[str, ParamValue]:
    """Parameters of a kernel's tile."""
    return {"tile_rows": rows, **dict(zip(("tile_columns", "split", "stages", "depth"), sizes, strict=True))}


@pytest.mark.parametrize("real", HALF)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "tile_rows"), [(1, 8), (8, 8), (9, 16), (17, 32), (32, 32)])
@pytest.mark.parametrize("shape", [(64, 256), (100, 8), (512, 2048), (322, 264)])
def test_skinny(real: str, gated: bool, rows: int, tile_rows: int, shape: tuple[int, int]) -> None:
    for sizes in ((64, 1, 6, 64), (128, 4, 4, 64), (16, 1, 8, 256), (224, 2, 4, 64)):
        case("linear_skinny", real, (rows, *shape), gated, **tile(tile_rows, sizes), norm_in=False, norm_out=False)


PLAIN: dict[str, ParamValue] = {
    **{"real": "bfloat16", "has_bias": False, "epilogue": "", "gated": False},
    **dict.fromkeys(("extra1", "extra2", "extra3", "extra4"), ""),
}


@pytest.mark.parametrize("sizes", [(64, 1, 6, 64), (64, 4, 4, 64), (32, 2, 8, 128), (112, 1, 4, 64)])
@pytest.mark.parametrize(("rows", "tile_rows"), [(1, 8), (3, 8), (16, 16), (29, 32)])
@pytest.mark.parametrize(("width", "inner"), [(144, 64), (2048, 328)])
def test_norm_between_layers(sizes: Tile, rows: int, tile_rows: int, width: int, inner: int) -> None:
    """A layer that adds a residual and leaves the norm to the next one, and that, against both with a norm between."""
    params = PLAIN | tile(tile_rows, sizes)
    x, weight = random(1, rows, inner, real="bfloat16"), random(2, width, inner, real="bfloat16", scale=inner**-0.5)
    residual, norm_weight = random(3, rows, width, real="bfloat16", scale=3.0), random(4, width)
    empty = np.empty_like(residual)
    arrays: dict[str, Any] = {"residual": residual, "norm_weight": norm_weight, "offset": 0.5, "sum_out": empty}
    squares = np.empty((rows, width // 16), np.float32)
    first = run(
        "linear_skinny",
        {**params, "norm_in": False, "norm_out": True},
        **{"x": x, "weight": weight.view(np.uint8), "rows": rows, "N": width, "K": inner},
        **arrays,
        out=empty.copy(),
        squares_out=squares,
    )
    product = store(value(x, "bfloat16") @ value(weight, "bfloat16").T, "bfloat16")
    total = value(product, "bfloat16") + value(residual, "bfloat16")
    found = value(first["sum_out"], "bfloat16")
    close(found, total, "bfloat16", 4.0)
    np.testing.assert_allclose(first["squares_out"], (found**2).reshape(rows, -1, 16).sum(2), rtol=1e-5)
    close(value(first["out"], "bfloat16"), found * (norm_weight + 0.5), "bfloat16")
    columns = 100
    behind = random(6, columns, width, real="bfloat16", scale=width**-0.5)
    second = run(
        "linear_skinny",
        {**params, "norm_in": True, "norm_out": False},
        **{"x": first["out"], "weight": behind.view(np.uint8), "rows": rows, "N": columns, "K": width},
        **{"squares": first["squares_out"], "eps": 1e-2, "out": store(np.zeros((rows, columns)), "bfloat16")},
    )["out"]
    scale = 1 / np.sqrt((found**2).mean(axis=1, keepdims=True) + 1e-2)
    normed = value(first["out"], "bfloat16") * scale
    close(value(second, "bfloat16"), normed @ value(behind, "bfloat16").T, "bfloat16")


@pytest.mark.parametrize("real", HALF)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("rows", "sizes"),
    [
        (64, (96, 1, 4, 64)),
        (64, (64, 8, 3, 64)),
        (128, (224, 1, 4, 64)),
        (128, (256, 1, 3, 64)),
        (128, (64, 2, 5, 64)),
        (256, (128, 1, 4, 64)),
        (256, (96, 4, 3, 64)),
    ],
)
@pytest.mark.parametrize("shape", [(33, 64, 256), (1, 100, 8), (300, 1026, 520), (128, 256, 64), (4500, 200, 72)])
def test_tiled(real: str, gated: bool, rows: int, sizes: Tile, shape: Shape) -> None:
    case("linear_tiled", real, shape, gated, **tile(rows, sizes))


@pytest.mark.parametrize("real", ENCODINGS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(1, 30, 17), (5, 64, 130)])
def test_exact(real: str, gated: bool, shape: Shape) -> None:
    case("linear_exact", real, shape, gated, encoding=ENCODINGS[real])


@pytest.mark.parametrize("rows", [1, 30, 64, 200])
@pytest.mark.parametrize("shape", [(512, 2048), (4096, 512), (322, 264)])
def test_what_tuning_chooses_from(rows: int, shape: tuple[int, int]) -> None:
    columns, inner = shape
    family, params = choose_linear(rows, columns=columns, inner=inner, real="bfloat16", encoding="bf16", gated=False)
    norms = {"norm_in": False, "norm_out": False} if family == "linear_skinny" else {}
    for other, own in other_linear(rows, family, params, columns=columns, inner=inner, gated=False)[:5]:
        case(other, "bfloat16", (rows, *shape), False, **{k: v for k, v in own.items() if k != "real"}, **norms)
