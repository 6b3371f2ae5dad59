"""Norms, pointwise expressions, rotary embedding, copies and reductions against numpy."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu.kernels.harness import Guarded, Kernel, aligned, assert_q8, isas, load_kernel, random_floats
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.compiler.codegen.cpu import ISA_LEVELS, compile_object
from toolkit.kernels_templates import expression as ex
from toolkit.kernels_templates.catalog import KernelSpec, ParamValue
from toolkit.kernels_templates.packing import q8_row_bytes
from toolkit.kernels_templates.reference import PagedCache
from toolkit.kernels_templates.render import render
from toolkit.runtime.plan import IsaName, KvDType
from toolkit.runtime.step import ROW

Floats = npt.NDArray[np.float32]
Wide = npt.NDArray[np.float64]

every_isa = pytest.mark.parametrize("isa", isas())
one_isa = pytest.mark.parametrize("isa", ["x86-64-v3"])
"""For kernels that do with vectors only what the others do: emulation is slow to compile."""


def load(isa: IsaName, family: str, **params: ParamValue) -> Kernel:
    return load_kernel(KernelSpec(family, params), isa)


# --- every operator ---------------------------------------------------------------------------------------------------

SPECIAL = (
    0.0,
    -0.0,
    1.0,
    -1.0,
    0.5,
    -0.5,
    2.0,
    3.0,
    -3.0,
    1e-40,
    -1e-40,
    1e30,
    -1e30,
    88.6,
    89.0,
    -88.0,
    -103.0,
    -105.0,
)
EXTREME = (*SPECIAL, math.inf, -math.inf, math.nan)
UNBOUNDED = ("gelu", "gelu_tanh", "silu", "quick_gelu")
"""Products of x and a gate: the tail is exact in an absolute sense only, and at -inf anything goes."""


def pointwise(isa: IsaName, expression: str, **kinds: str) -> Kernel:
    return load(isa, "pointwise", expr=expression, **{f"in{i}": kinds.get(f"in{i}", "") for i in range(8)})


def choose(operators: list[str], args: str) -> str:
    """An expression that applies the operator whose number is in0."""
    text = "nan"
    for number, operator in enumerate(operators):
        text = f"(where (eq in0 {number}) ({operator} {args}) {text})"
    return text


def apply(kernel: Kernel, number: int, *args: Floats) -> Floats:
    out = Guarded(args[0].shape, np.float32)
    kernel(np.array([number], np.float32), *args, out.array, 1, len(args[0]), threads=2)
    out.check()
    return out.array


def assert_close(got: Floats, want: Wide, *, ulp: float, absolute: float = 0.0) -> None:
    """Equal within `ulp` units in the last place, infinities and NaN included."""
    with np.errstate(over="ignore"):
        nearest = want.astype(np.float32)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    finite = np.isfinite(nearest) & np.isfinite(got)
    np.testing.assert_array_equal(got[~finite], nearest[~finite])
    allowed = ulp * np.spacing(np.abs(nearest[finite])) + absolute
    assert (np.abs(got[finite].astype(np.float64) - want[finite]) <= allowed).all()


def exact(operator: str, *args: Floats) -> Wide:
    """The operator in float64."""
    names = " ".join(f"in{i}" for i in range(len(args)))
    with np.errstate(all="ignore"):
        wide = ex.evaluate(ex.parse(f"({operator} {names})"), [arg.astype(np.float64) for arg in args])
    return np.asarray(wide, np.float64)


@every_isa
def test_unary_operators(isa: IsaName) -> None:
    operators = sorted(ex.UNARY)
    kernel = pointwise(isa, choose(operators, "in1"), in0="1", in1="t")
    rng = np.random.default_rng(0)
    spread = [rng.standard_normal(1000) * scale for scale in (1e-4, 0.3, 1.0, 8.0, 40.0)]
    for number, operator in enumerate(operators):
        x = np.concatenate([*spread, SPECIAL if operator in UNBOUNDED else EXTREME]).astype(np.float32)
        if operator in ("sin", "cos"):
            x = x[~(np.abs(x) > 2.0**40) | np.isinf(x)]
        want = exact(operator, x)
        if operator in UNBOUNDED:
            assert_close(apply(kernel, number, x), want, ulp=4, absolute=4e-7)
        else:
            assert_close(apply(kernel, number, x), want, ulp=4, absolute=1e-37 if operator == "sigmoid" else 0)


@every_isa
def test_angles_stay_exact_far_out(isa: IsaName) -> None:
    operators = sorted(ex.UNARY)
    kernel = pointwise(isa, choose(operators, "in1"), in0="1", in1="t")
    x = (np.random.default_rng(0).standard_normal(4000) * 1e8).astype(np.float32)
    for operator in ("sin", "cos"):
        assert_close(apply(kernel, operators.index(operator), x), exact(operator, x), ulp=4)


@every_isa
def test_binary_and_ternary_operators(isa: IsaName) -> None:
    operators = sorted(ex.BINARY)
    kernel = pointwise(isa, choose(operators, "in1 in2"), in0="1", in1="t", in2="t")
    left, right = (grid.ravel().astype(np.float32) for grid in np.meshgrid(EXTREME, EXTREME))
    rng = np.random.default_rng(0)
    left = np.concatenate([left, np.abs(rng.standard_normal(3000)) * 10.0 ** rng.uniform(-20, 20, 3000)])
    right = np.concatenate([right, rng.standard_normal(3000) * 3])
    left, right = left.astype(np.float32), right.astype(np.float32)
    for number, operator in enumerate(operators):
        assert_close(apply(kernel, number, left, right), exact(operator, left, right), ulp=1)
    third = rng.permutation(left)
    ternary = pointwise(isa, "(add (where in1 in2 in0) (clamp in2 -2.5 7))", in0="t", in1="t", in2="t")
    out = Guarded(left.shape, np.float32)
    ternary(third, left, right, out.array, 1, len(left))
    with np.errstate(invalid="ignore"):
        want = np.where(left.astype(bool), right, third) + np.clip(right, -2.5, 7)
    np.testing.assert_array_equal(out.array, want)


@one_isa
@pytest.mark.parametrize("shape", [(1, 5), (3, 1000), (70, 1)])
def test_pointwise_broadcasts(shape: tuple[int, int], isa: IsaName) -> None:
    rng = np.random.default_rng(0)
    rows, width = shape
    full, across, down = random_floats(rng, rows, width), random_floats(rng, width), random_floats(rng, rows)
    number = random_floats(rng, 1)
    kernel = pointwise(isa, "(add (mul in3 in1) (sub in4 in5))", in1="t", in3="n", in4="1", in5="s")
    for threads in (1, 3):
        out = Guarded(shape, np.float32)
        kernel(full, across, down, number, out.array, rows, width, threads=threads)
        out.check()
        np.testing.assert_allclose(out.array, across * full + (down[:, None] - number), rtol=1e-6, atol=1e-6)


def test_equal_parts_of_an_expression_are_computed_once() -> None:
    """Fusion relies on it. Code that computes a part twice is longer."""
    sizes = []
    for expression in ("(mul (exp in0) (exp in0))", "(mul (exp in0) (exp (neg in0)))"):
        spec = KernelSpec("pointwise", {"expr": expression, **{f"in{i}": "" if i else "t" for i in range(8)}})
        sizes.append(compile_object(render(spec, "x86-64-v3"), ISA_LEVELS[0], spec.symbol).stat().st_size)
    assert sizes[0] < sizes[1] - 100


# --- norms ------------------------------------------------------------------------------------------------------------

NORMS: Mapping[str, dict[str, ParamValue]] = {
    "rms": {"kind": "rms", "has_weight": True},
    "rms residual q8": {"kind": "rms", "has_weight": True, "has_residual": True, "q8_out": True, "float_out": False},
    "layer": {"kind": "layer", "has_weight": True, "has_bias": True, "has_residual": True, "q8_out": True},
    "l2": {"kind": "l2"},
}
NORM_DEFAULTS: dict[str, ParamValue] = {
    **dict.fromkeys(("has_weight", "has_bias", "has_residual", "q8_out"), False),
    "float_out": True,
}


def reference_norm(x: Floats, kind: ParamValue, eps: float) -> Wide:
    wide = x.astype(np.float64)
    if kind == "layer":
        wide = wide - wide.mean(axis=1, keepdims=True)
    squares = (wide**2).sum(axis=1, keepdims=True) / (1 if kind == "l2" else x.shape[1])
    normal: Wide = wide / np.sqrt(squares + eps)
    return normal


@every_isa
@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize(("width", "weight_rows"), [(32, 3), (576, 1), (1120, 1)])
def test_norm(name: str, width: int, weight_rows: int, isa: IsaName) -> None:
    rng = np.random.default_rng(width)
    params, rows, eps, offset = NORM_DEFAULTS | NORMS[name], 6, 1e-5, 1.0
    x, residual = random_floats(rng, rows, width, scale=3), random_floats(rng, rows, width)
    weight, bias = random_floats(rng, weight_rows, width), random_floats(rng, weight_rows, width)
    total, out = Guarded((rows, width), np.float32), Guarded((rows, width), np.float32)
    q8 = Guarded((rows, q8_row_bytes(width)), np.uint8)
    args: list[Any] = [x]
    args += [residual] * bool(params["has_residual"]) + [weight] * bool(params["has_weight"])
    args += [bias] * bool(params["has_bias"]) + [total.array] * bool(params["has_residual"])
    args += [out.array] * bool(params["float_out"]) + [q8.array] * bool(params["q8_out"])
    load(isa, "norm", **params)(*args, rows, width, weight_rows, eps, offset, threads=2)
    summed = x + residual if params["has_residual"] else x
    want = reference_norm(summed, params["kind"], eps)
    if params["has_weight"]:
        want = want * (np.tile(weight.astype(np.float64), (rows // weight_rows, 1)) + offset)
    if params["has_bias"]:
        want = want + np.tile(bias, (rows // weight_rows, 1))
    if params["has_residual"]:
        np.testing.assert_array_equal(total.array, summed)
    if params["float_out"]:
        np.testing.assert_allclose(out.array, want, rtol=2e-6, atol=2e-6)
    if params["q8_out"]:
        assert_q8(q8.array, want)
    for guarded in (total, out, q8):
        guarded.check()


@every_isa
@given(st.integers(1, 150), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_norm_of_any_width(isa: IsaName, width: int, weight_rows: int, threads: int, seed: int) -> None:
    rng, rows, eps = np.random.default_rng(seed), 2 * weight_rows, 1e-5
    x, weight, bias = (random_floats(rng, count, width) for count in (rows, weight_rows, weight_rows))
    weights = {"rms": [weight], "layer": [weight, bias], "l2": []}
    for kind, given_weights in weights.items():
        params = {**NORM_DEFAULTS, "kind": kind, "has_weight": kind != "l2", "has_bias": kind == "layer"}
        out = Guarded(x.shape, np.float32)
        load(isa, "norm", **params)(x, *given_weights, out.array, rows, width, weight_rows, eps, 0.5, threads=threads)
        out.check()
        want = reference_norm(x, kind, eps)
        if kind != "l2":
            want = want * (np.tile(weight.astype(np.float64), (2, 1)) + 0.5)
        if kind == "layer":
            want = want + np.tile(bias, (2, 1))
        np.testing.assert_allclose(out.array, want, rtol=1e-5, atol=1e-5)


@one_isa
def test_norm_passes_nan_on(isa: IsaName) -> None:
    x = random_floats(np.random.default_rng(0), 2, 576)
    x[1, 3] = np.nan
    out = Guarded(x.shape, np.float32)
    load(isa, "norm", **NORM_DEFAULTS | NORMS["rms"])(x, np.ones(576, np.float32), out.array, 2, 576, 1, 1e-6, 0.0)
    assert np.isfinite(out.array[0]).all()
    assert np.isnan(out.array[1]).all()


# --- rotary embedding -------------------------------------------------------------------------------------------------


def rotated(x: Floats, cos: Floats, sin: Floats, style: str) -> Floats:
    """x[T, heads, D] with its first columns turned."""
    half, out = cos.shape[1], x.copy()
    first = np.arange(half) if style == "half" else 2 * np.arange(half)
    second = first + (half if style == "half" else 1)
    c, s = cos[:, None], sin[:, None]
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., second] * c + x[..., first] * s
    return out


def angles(rng: np.random.Generator, tokens: int, half: int) -> tuple[Floats, Floats]:
    angle = rng.uniform(-9, 9, (tokens, half))
    return aligned(np.cos(angle).astype(np.float32)), aligned(np.sin(angle).astype(np.float32))


@one_isa
@pytest.mark.parametrize(
    ("head_dim", "rotary", "style"),
    [(64, 64, "half"), (80, 24, "half"), (40, 20, "pair"), (35, 22, "half"), (13, 10, "pair")],
)
def test_rope(head_dim: int, rotary: int, style: str, isa: IsaName) -> None:
    rng = np.random.default_rng(0)
    tokens, heads, stride = 6, 3, 3 * head_dim + 7
    x, (cos, sin) = random_floats(rng, tokens, stride), angles(rng, tokens, rotary // 2)
    out = Guarded((tokens, heads, head_dim), np.float32)
    kernel = load(isa, "rope", head_dim=head_dim, rotary=rotary, style=style)
    kernel(x, cos, sin, out.array, tokens, heads, stride, threads=2)
    out.check()
    want = rotated(x[:, : heads * head_dim].reshape(tokens, heads, head_dim), cos, sin, style)
    np.testing.assert_allclose(out.array, want, rtol=1e-5, atol=1e-6)


@every_isa
@pytest.mark.parametrize("function", ["cos", "sin"])
def test_rope_table(function: str, isa: IsaName) -> None:
    rng = np.random.default_rng(0)
    tokens, width, first = 9, 21, 100
    frequencies = aligned(rng.uniform(1e-4, 1.0, (4, width)).astype(np.float32))
    positions = np.array([0, 1, 5, 99, 100, 101, 4095, 100_000, 7], np.int32)
    lengths = np.array([1, 2, 100, 100, 101, 102, 5000, 100_001, 103], np.int32)
    out = Guarded((tokens, width), np.float32)
    kernel = load(isa, "rope_table", function=function)
    kernel(positions, lengths, frequencies, out.array, tokens, width, first, 3, -1.25, threads=2)
    out.check()
    angles = positions.astype(np.float32)[:, None] * frequencies[[0, 0, 0, 0, 1, 2, 3, 3, 3]]
    want = -1.25 * getattr(np, function)(angles.astype(np.float64))
    np.testing.assert_allclose(out.array, want, atol=1e-6)


ROPE_WRITES: Mapping[str, dict[str, ParamValue]] = {
    "plain": {"head_dim": 64, "rotary": 64, "style": "half", "has_rope": True, "qk_norm": ""},
    "qk norm": {"head_dim": 32, "rotary": 16, "style": "pair", "has_rope": True, "qk_norm": "rms"},
    "no rope": {
        "head_dim": 24,
        "rotary": 0,
        "style": "half",
        "has_rope": False,
        "qk_norm": "layer",
    },
    "odd": {"head_dim": 27, "rotary": 14, "style": "half", "has_rope": True, "qk_norm": "rms"},
    "split": {"head_dim": 16, "rotary": 0, "style": "half", "has_rope": False, "qk_norm": ""},
}


DTYPES: Mapping[str, KvDType] = {
    "plain": "float32",
    "qk norm": "float16",
    "no rope": "int8",
    "odd": "float32",
    "split": "bfloat16",
}


@every_isa
@pytest.mark.parametrize("name", ROPE_WRITES)
def test_rope_kv_write(name: str, isa: IsaName) -> None:
    rng, params = np.random.default_rng(0), ROPE_WRITES[name]
    dim, rotary, dtype = int(params["head_dim"]), int(params["rotary"]), DTYPES[name]
    tokens, heads, kv_heads, page_tokens, eps, offset = 9, 6, 2, 16, 1e-5, 1.0
    qkv, (cos, sin) = random_floats(rng, tokens, (heads + 2 * kv_heads) * dim), angles(rng, tokens, rotary // 2)
    per_head = params["qk_norm"] == "layer"
    q_weight, k_weight = (random_floats(rng, *([count] * per_head), dim) for count in (heads, kv_heads))
    slots = rng.permutation(3 * page_tokens)[:tokens].astype(np.int32)
    want = PagedCache.empty(3, heads=kv_heads, key_dim=dim, value_dim=dim, page_tokens=page_tokens, dtype=dtype)
    cache, out = Guarded(want.data.shape, np.uint8), Guarded((tokens, heads, dim), np.float32)
    cache.array[:] = 0xFF
    optional = [cos, sin] * bool(params["has_rope"]) + [q_weight, k_weight] * bool(params["qk_norm"])
    args: list[Any] = [qkv, *optional, slots, cache.array, out.array, tokens]
    args += [heads, kv_heads, page_tokens, eps, offset, *([dim * per_head] if params["qk_norm"] else [])]
    load(isa, "rope_kv_write", **params, dtype=dtype)(*args, threads=3)
    cache.check()
    out.check()

    q, k, v = np.split(qkv.reshape(tokens, -1, dim), [heads, heads + kv_heads], axis=1)
    if params["qk_norm"]:
        q, k = (
            reference_norm(x.reshape(-1, dim), params["qk_norm"], eps).reshape(x.shape) * (w + offset)
            for x, w in ((q, q_weight), (k, k_weight))
        )
    if params["has_rope"]:
        q, k = (rotated(x.astype(np.float32), cos, sin, str(params["style"])) for x in (q, k))
    want.write(k, v, slots)
    np.testing.assert_allclose(out.array, q, rtol=1e-5, atol=2e-6)
    pages = np.arange(3)
    stored = replace(want, data=cache.array)
    for got, expected in zip(stored.read(pages, 48), want.read(pages, 48), strict=True):
        np.testing.assert_allclose(got, expected, rtol=1e-5 if dtype == "float32" else 1e-3, atol=2e-6)


# --- rows -------------------------------------------------------------------------------------------------------------


@one_isa
@given(st.integers(1, 70), st.integers(1, 70), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_rows_of_any_width(isa: IsaName, width: int, tokens: int, threads: int, seed: int) -> None:
    """Rows taken, and columns copied from anywhere to anywhere."""
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 10))
    x, rows = random_floats(rng, tokens, width), np.zeros(count, ROW)
    rows["token"] = rng.integers(0, tokens, count)
    taken = Guarded((count, width), np.float32)
    load(isa, "take_rows")(x, rows, taken.array, count, width, threads=threads)
    taken.check()
    np.testing.assert_array_equal(taken.array, x[rows["token"]])

    columns = int(rng.integers(1, width + 1))
    start, stride = int(rng.integers(0, width - columns + 1)), columns + int(rng.integers(0, 20))
    place = int(rng.integers(0, stride - columns + 1))
    out = Guarded((tokens, stride), np.float32)
    load(isa, "copy")(x, out.array, tokens, columns, width, start, stride, place, threads=threads)
    out.check()
    np.testing.assert_array_equal(out.array[:, place : place + columns], x[:, start : start + columns])
    assert np.isnan(np.delete(out.array, slice(place, place + columns), axis=1)).all()


@one_isa
def test_take_rows(isa: IsaName) -> None:
    x = random_floats(np.random.default_rng(0), 9, 70)
    rows = np.zeros(4, ROW)
    rows["token"] = [0, 3, 7, 8]
    out = Guarded((4, 70), np.float32)
    load(isa, "take_rows")(x, rows, out.array, 4, 70, threads=3)
    out.check()
    np.testing.assert_array_equal(out.array, x[[0, 3, 7, 8]])


@one_isa
def test_copy_between_strides(isa: IsaName) -> None:
    x, out = random_floats(np.random.default_rng(0), 5, 40), Guarded((5, 30), np.float32)
    load(isa, "copy")(x, out.array, 5, 13, 40, 4, 30, 9, threads=2)
    out.check()
    np.testing.assert_array_equal(out.array[:, 9:22], x[:, 4:17])
    assert np.isnan(np.delete(out.array, slice(9, 22), axis=1)).all()


def awkward_rows(width: int, seed: int) -> Floats:
    x = random_floats(np.random.default_rng(seed), 5, width, scale=4)
    x[3, -1], x[4, 0] = np.nan, -np.inf
    return x


@one_isa
@given(st.integers(1, 150), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_reduce(isa: IsaName, width: int, threads: int, seed: int) -> None:
    x = awkward_rows(width, seed)
    wide = x.astype(np.float64)
    for operation, want in (("sum", wide.sum(1)), ("mean", wide.mean(1)), ("max", wide.max(1))):
        out = Guarded(5, np.float32)
        load(isa, "reduce", op=operation)(x, out.array, 5, width, threads=threads)
        out.check()
        np.testing.assert_allclose(out.array, want, rtol=1e-5, atol=1e-5)


@every_isa
@given(st.integers(1, 150), st.integers(1, 6), st.integers(0, 2**32 - 1))
@settings(max_examples=25, deadline=None)
def test_softmax(isa: IsaName, width: int, threads: int, seed: int) -> None:
    x = awkward_rows(width, seed)
    out = Guarded(x.shape, np.float32)
    load(isa, "softmax")(x, out.array, 5, width, threads=threads)
    out.check()
    wide = x.astype(np.float64)
    with np.errstate(invalid="ignore"):
        weights = np.exp(wide - wide.max(axis=1, keepdims=True))
        np.testing.assert_allclose(out.array, weights / weights.sum(axis=1, keepdims=True), rtol=1e-5, atol=1e-7)
