"""Row-wise and pointwise CUDA kernels against numpy in float64."""

from __future__ import annotations

import hashlib
import math
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np
import pytest
from gpu.kernels.harness import run
from gpu.kernels.numbers import close, random, store, value
from unit.runtime.sample_plan import sample_plan

from toolkit.kernels_templates.catalog import ParamValue
from toolkit.kernels_templates.cuda.basic import norm_threads
from toolkit.runtime.plan import RandomFill, WeightEntry, WeightFile
from toolkit.runtime.random_weights import fill_random
from toolkit.runtime.step import ROW

REALS = ("float32", "float16", "bfloat16")


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
@pytest.mark.parametrize("shape", [(1, 2048, 1), (7, 100, 1), (12, 64, 4), (3, 5000, 1)])
@pytest.mark.parametrize("residual", [False, True])
def test_norm(real: str, kind: str, shape: tuple[int, int, int], residual: bool) -> None:
    rows, width, weight_rows = shape
    x, other = random(1, rows, width, real=real), random(2, rows, width, real=real)
    weight, bias = random(3, weight_rows, width), random(4, weight_rows, width)
    params: dict[str, ParamValue] = {"real": real, "kind": kind, "has_weight": True, "has_bias": True}
    extra = {"residual": other, "sum_out": np.empty_like(x)} if residual else {}
    arrays = {"x": x, "weight": weight, "bias": bias, "out": np.empty_like(x), **extra}
    sizes = {"rows": rows, "W": width, "weight_rows": weight_rows, "eps": 1e-5, "offset": 0.5}
    params |= {"has_residual": residual, "row_threads": norm_threads(width * x.itemsize)}
    found = run("norm", params, **arrays, **sizes)
    total = value(x, real)
    if residual:
        total = value(store(total + value(other, real), real), real)
        close(value(found["sum_out"], real), total, real)
    centered = total - (total.mean(axis=1, keepdims=True) if kind == "layer" else 0)
    squares = (centered**2).sum(axis=1, keepdims=True) / (1 if kind == "l2" else width)
    factor, shift = np.resize(weight, (rows, width)) + 0.5, np.resize(bias, (rows, width))
    close(value(found["out"], real), centered / np.sqrt(squares + 1e-5) * factor + shift, real)


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize(("encoding", "stored"), [("f32", "float32"), ("f16", "float16"), ("bf16", "bfloat16")])
def test_embedding(real: str, encoding: str, stored: str) -> None:
    table, ids = random(5, 50, 300, real=stored), np.array([3, 49, 0, 50, -1], np.int32)
    out = store(np.zeros((5, 300)), real)
    sizes = {"T": 5, "V": 50, "W": 300, "scale": 2.5}
    found = value(
        run("embedding", {"real": real, "encoding": encoding}, weight=table, ids=ids, out=out, **sizes)["out"], real
    )
    close(found[:3], 2.5 * value(table, stored)[ids[:3]], real)
    assert np.isnan(found[3:]).all()


@pytest.mark.parametrize("real", REALS)
def test_take_rows(real: str) -> None:
    x, rows = random(6, 9, 130, real=real), np.zeros(4, ROW)
    rows["token"] = [0, 2, 2, 8]
    out = np.empty((4, 130), x.dtype)
    found = run("take_rows", {"real": real}, x=x, rows=rows.view(np.uint8), out=out, R=4, W=130)
    np.testing.assert_array_equal(found["out"], x[rows["token"]])


@pytest.mark.parametrize("real", REALS)
def test_pointwise(real: str) -> None:
    forms = {"in0": "t", "in1": "n", "in2": "1", "in3": "s"}
    shapes = {"in0": (11, 77), "in1": (77,), "in2": (11, 1), "in3": (1,)}
    arrays = {name: random(index, *shape, real=real) for index, (name, shape) in enumerate(shapes.items())}
    params: dict[str, ParamValue] = {"real": real, "expr": "(add (mul (tanh in0) in1) (sub in2 (sigmoid in3)))"}
    params |= {f"in{index}": forms.get(f"in{index}", "") for index in range(8)}
    out = np.empty((11, 77), arrays["in0"].dtype)
    found = run("pointwise", params, **arrays, out=out, rows=11, W=77)["out"]
    a, b, c, d = (value(array, real) for array in arrays.values())
    close(value(found, real), np.tanh(a) * b + c - 1 / (1 + np.exp(-d)), real)


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("width", [77, 2048])
def test_reduction(real: str, width: int) -> None:
    forms = {"in0": "t", "in1": "n", "in2": "1", "in3": "s"}
    shapes = {"in0": (11, width), "in1": (width,), "in2": (11, 1), "in3": (1,)}
    arrays = {name: random(index, *shape, real=real) for index, (name, shape) in enumerate(shapes.items())}
    sum_ = "(add (mul in0 (rsqrt (mean (mul in0 in0)))) in1)"
    exprs = f"{sum_} (mul (sub {sum_} (max {sum_})) (add in2 in3))"
    params: dict[str, ParamValue] = {"real": real, "exprs": exprs, "column": False, "first_out": True}
    params |= {f"in{index}": forms.get(f"in{index}", "") for index in range(8)}
    outs = {name: np.empty((11, width), arrays["in0"].dtype) for name in ("first", "out")}
    found = run("reduction", params, **arrays, **outs, rows=11, W=width)
    a, b, c, d = (value(array, real) for array in arrays.values())
    total = a / np.sqrt((a**2).mean(axis=1, keepdims=True)) + b
    close(value(found["first"], real), total, real)
    close(value(found["out"], real), (total - total.max(axis=1, keepdims=True)) * (c + d), real)
    params |= {"exprs": "(sqrt (sum (abs in0)))", "column": True, "first_out": False}
    params |= dict.fromkeys(("in1", "in2", "in3"), "")
    found = run("reduction", params, in0=arrays["in0"], out=np.empty(11, arrays["in0"].dtype), rows=11, W=width)
    close(value(found["out"], real), np.sqrt(np.abs(a).sum(axis=1)), real)


@pytest.mark.parametrize("pattern", [4, 288, 96])
def test_random_fill_makes_the_runtimes_bytes(pattern: int) -> None:
    random_bytes = np.random.default_rng(pattern)
    keep, mask = (random_bytes.integers(0, 256, pattern, dtype=np.uint8) for _ in range(2))
    size, plan = 32 * math.lcm(pattern, 32) + 64, sample_plan(b"", b"", b"")
    entry = WeightEntry("random", 0, size, (1, size), plan.weights["w"].encoding, "rows", fill="f")
    plan = msgspec.structs.replace(
        plan,
        model=msgspec.structs.replace(plan.model, random_weights=5),
        weights={"w": entry},
        weight_files=(WeightFile("random", size, "", random=True),),
        fills={"f": RandomFill(keep.tobytes().hex(), mask.tobytes().hex())},
    )
    expected = np.zeros(size, np.uint8)
    with ThreadPoolExecutor(1) as pool:
        fill_random(plan, "random", expected, pool)
    key = hashlib.sha256(b"5/w").digest()
    keys = {f"key{i}": int.from_bytes(key[8 * i : 8 * i + 8], "little") for i in range(2)}
    out, sizes = np.zeros(size, np.uint8), {"bytes": size, "first": 0, "period": pattern}
    found = run("random_fill", {}, out=out, keep=keep, value=mask, **sizes, **keys)["out"]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("real", REALS)
def test_copy(real: str) -> None:
    x, out = random(8, 5, 40, real=real), np.empty((5, 50), store(np.zeros(1), real).dtype)
    sizes = {"rows": 5, "width": 17, "x_stride": 40, "x_offset": 3, "out_stride": 50, "out_offset": 30}
    found = run("copy", {"real": real}, x=x, out=out, **sizes)["out"]
    np.testing.assert_array_equal(found[:, 30:47], x[:, 3:20])
    assert (found[:, :30].view(np.uint8) == 0xFF).all()


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("op", ["sum", "mean", "max"])
@pytest.mark.parametrize("width", [1, 33, 5000])
def test_reduce(real: str, op: str, width: int) -> None:
    x = random(9, 4, width, real=real)
    out = np.empty(4, x.dtype)
    found = run("reduce", {"real": real, "op": op}, x=x, out=out, rows=4, W=width)["out"]
    close(value(found, real), getattr(value(x, real), op)(axis=1), real)


@pytest.mark.parametrize("real", REALS)
@pytest.mark.parametrize("width", [1, 100, 3000])
def test_softmax(real: str, width: int) -> None:
    x = random(10, 6, width, real=real, scale=5.0)
    found = run("softmax", {"real": real}, x=x, out=np.empty_like(x), rows=6, W=width)["out"]
    exact = np.exp(value(x, real) - value(x, real).max(axis=1, keepdims=True))
    close(value(found, real), exact / exact.sum(axis=1, keepdims=True), real)
