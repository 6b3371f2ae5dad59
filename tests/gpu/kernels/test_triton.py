"""Triton kernels on a GPU, as lowering chooses them, against numpy in float64: odd sizes and poisoned outputs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from gpu.kernels.harness import run_kernel
from gpu.kernels.numbers import Array, close, random, store, value
from gpu.kernels.test_attention import Shape, check
from gpu.kernels.test_linear import HALF, silu

from toolkit.kernels_templates.catalog import POINTWISE_INPUTS, KernelSpec, ParamValue
from toolkit.kernels_templates.cuda.choose import choose_linear
from toolkit.kernels_templates.triton.choose import triton_kernels

REALS = ("float32", *HALF)
NUMBERS = ("rows", "W", "weight_rows", "N", "K", "S", "heads", "kv_heads", "page_tokens")


def all_of(family: str, params: dict[str, ParamValue], values: dict[str, Any]) -> list[KernelSpec]:
    """The Triton kernels in the place of a CUDA C++ kernel that gets these arguments."""
    found = triton_kernels(KernelSpec(family, params), {name: int(values[name]) for name in NUMBERS if name in values})
    assert found
    return found


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
@pytest.mark.parametrize("shape", [(1, 2048, 1), (7, 100, 1), (12, 64, 4), (3, 5000, 1)])
@pytest.mark.parametrize("residual", [False, True])
def test_norm(real: str, kind: str, shape: tuple[int, int, int], residual: bool) -> None:
    rows, width, weight_rows = shape
    x, other = random(1, rows, width, real=real), random(2, rows, width, real=real)
    weight, bias = random(3, weight_rows, width), random(4, weight_rows, width)
    params: dict[str, ParamValue] = {"real": real, "kind": kind, "has_weight": True, "has_bias": True}
    params |= {"has_residual": residual, "row_threads": 256}
    extra = {"residual": other, "sum_out": np.empty_like(x)} if residual else {}
    values: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "out": np.empty_like(x), **extra}
    values |= {"rows": rows, "W": width, "weight_rows": weight_rows, "eps": 1e-5, "offset": 0.5}
    found = run_kernel(all_of("norm", params, values)[0], **values)
    total = value(x, real)
    if residual:
        total = value(store(total + value(other, real), real), real)
        close(value(found["sum_out"], real), total, real)
    centered = total - (total.mean(axis=1, keepdims=True) if kind == "layer" else 0)
    squares = (centered**2).sum(axis=1, keepdims=True) / (1 if kind == "l2" else width)
    factor, shift = np.resize(weight, (rows, width)) + 0.5, np.resize(bias, (rows, width))
    close(value(found["out"], real), centered / np.sqrt(squares + 1e-5) * factor + shift, real)


def spread(real: str, rows: int, width: int) -> tuple[dict[str, ParamValue], dict[str, Array], list[Array]]:
    """Four inputs of an expression, one of each form."""
    shapes = {"t": (rows, width), "n": (width,), "1": (rows, 1), "s": (1,)}
    arrays = {f"in{i}": random(i, *shape, real=real) for i, shape in enumerate(shapes.values())}
    params: dict[str, ParamValue] = {f"in{i}": "tn1s"[i : i + 1] for i in range(POINTWISE_INPUTS)}
    return {"real": real, **params}, arrays, [value(array, real) for array in arrays.values()]


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize(("rows", "width"), [(11, 77), (1, 64), (3, 5000)])
def test_pointwise(real: str, rows: int, width: int) -> None:
    params, arrays, (a, b, c, d) = spread(real, rows, width)
    params |= {"expr": "(add (mul (tanh in0) in1) (sub in2 (sigmoid in3)))"}
    values: dict[str, Any] = {**arrays, "out": store(np.zeros((rows, width)), real), "rows": rows, "W": width}
    found = run_kernel(all_of("pointwise", params, values)[0], **values)["out"]
    close(value(found, real), np.tanh(a) * b + c - 1 / (1 + np.exp(-d)), real)


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("width", [77, 2048])
def test_reduction(real: str, width: int) -> None:
    params, arrays, (a, b, c, d) = spread(real, 11, width)
    sum_ = "(add (mul in0 (rsqrt (mean (mul in0 in0)))) in1)"
    params |= {"exprs": f"{sum_} (mul (sub {sum_} (max {sum_})) (add in2 in3))", "column": False, "first_out": True}
    outs = {name: store(np.zeros((11, width)), real) for name in ("first", "out")}
    values: dict[str, Any] = {**arrays, **outs, "rows": 11, "W": width}
    found = run_kernel(all_of("reduction", params, values)[0], **values)
    total = a / np.sqrt((a**2).mean(axis=1, keepdims=True)) + b
    close(value(found["first"], real), total, real)
    close(value(found["out"], real), (total - total.max(axis=1, keepdims=True)) * (c + d), real)


def linear_case(real: str, shape: tuple[int, int, int], gated: bool) -> tuple[list[KernelSpec], dict[str, Any], Array]:
    """The Triton kernels of a layer with a bias and extras, its arguments and results."""
    rows, columns, inner = shape
    results = columns // 2 if gated else columns
    encoding = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[real]
    family, own = choose_linear(rows, columns=columns, inner=inner, real=real, encoding=encoding, gated=gated)
    x, weight = random(1, rows, inner, real=real), random(2, columns, inner, real=real, scale=inner**-0.5)
    bias, full, row = random(3, columns), random(4, rows, results, real=real), random(5, results, real=real)
    own |= {"has_bias": True, "extra1": "t", "extra2": "n", "extra3": "", "extra4": "", "gated": gated}
    own["epilogue"] = "(add (mul (silu in0) in1) (mul in2 in3))" if gated else "(add (mul (silu in0) in1) in2)"
    values: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "extra1": full, "extra2": row}
    values |= {"out": store(np.zeros((rows, results)), real), "rows": rows, "N": columns, "K": inner}
    product = value(x, real) @ value(weight, real).T + bias
    first, second = value(full, real), value(row, real)
    if gated:
        expected = silu(product[:, :results]) * product[:, results:] + first * second
    else:
        expected = silu(product) * first + second
    return all_of(family, own, values), values, expected


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("shape", [(33, 64, 256), (64, 100, 8), (300, 1026, 520), (128, 256, 64), (4500, 200, 72)])
def test_linear(real: str, gated: bool, shape: tuple[int, int, int]) -> None:
    kernels, values, expected = linear_case(real, shape, gated)
    for kernel in kernels:
        close(value(run_kernel(kernel, **values)["out"], real), expected, real)


SHAPES = (
    Shape(8, 2, 128, 128),
    Shape(8, 8, 64, 64, "float16", "float16", window=50),
    Shape(12, 2, 80, 80, softcap=2.0),
    Shape(9, 3, 96, 96, "float16", "float16", slopes=True),
    Shape(4, 1, 256, 256, window=100, softcap=5.0),
    Shape(32, 2, 64, 128, "float16", "float16", sinks=True),
    Shape(6, 2, 64, 64, "float32", "float32", 70, 3.0, True, True),
)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "steps",
    [
        [(1, 1)],
        [(130, 130)],
        [(1000, 700)],
        [(1, 1), (130, 130), (5, 0), (200, 7), (64, 64), (333, 100), (500, 1), (77, 33)],
    ],
    ids=len,
)
def test_attention(shape: Shape, steps: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch) -> None:
    def instead(family: str, params: dict[str, ParamValue], **values: Any) -> dict[str, Array]:
        return run_kernel(all_of(family, params, values)[0], **values)

    monkeypatch.setattr("gpu.kernels.test_attention.run", instead)
    check("attention_prefill", shape, [length for length, _ in steps], [count for _, count in steps], len(steps))
