"""Triton kernels, run by Triton's interpreter, against numpy in float64: odd sizes, poisoned outputs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu.kernels.triton_interpreter import Interpreter

from toolkit.kernels_templates.catalog import POINTWISE_INPUTS, KernelSpec, ParamValue
from toolkit.kernels_templates.expression import BINARY, OPERATORS, REDUCTIONS, evaluate, parse
from toolkit.kernels_templates.reference import PagedCache, attention
from toolkit.kernels_templates.triton.choose import triton_kernels
from toolkit.kernels_templates.triton.expression import supported
from toolkit.runtime.plan import ArchName

Array = npt.NDArray[Any]
NUMBERS = ("rows", "W", "weight_rows", "N", "K", "S", "heads", "kv_heads", "page_tokens")


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    interpreter = Interpreter()
    yield interpreter
    interpreter.close()


def floats(seed: int, *shape: int, scale: float = 1.0) -> Array:
    return (np.random.default_rng(seed).standard_normal(shape) * scale).astype(np.float32)


def close(found: Array, expected: Array, steps: float = 16) -> None:
    """Assert that results are right to some roundings of their type, relative to the largest."""
    assert np.isfinite(found).all()
    error = np.abs(found.astype(np.float64) - expected).max() / np.abs(expected).max()
    assert error < steps * np.finfo(found.dtype).eps, error


def only(family: str, params: dict[str, ParamValue], values: dict[str, Any]) -> KernelSpec:
    """The Triton kernel in the place of a CUDA C++ kernel that gets these arguments."""
    sizes = {name: int(values[name]) for name in NUMBERS if name in values}
    return triton_kernels(KernelSpec(family, params), sizes)[0]


# --- rows -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["rms", "layer", "l2"])
@pytest.mark.parametrize(("rows", "width", "weight_rows"), [(1, 64, 1), (7, 100, 1), (6, 33, 3), (2, 5000, 1)])
@pytest.mark.parametrize("residual", [False, True])
def test_norm(*, interpreter: Interpreter, kind: str, rows: int, width: int, weight_rows: int, residual: bool) -> None:
    params: dict[str, ParamValue] = {"real": "float32", "kind": kind, "row_threads": 256, "has_residual": residual}
    flags = {"has_weight": True, "has_bias": kind == "layer"}
    values: dict[str, Any] = {"x": floats(1, rows, width), "weight": floats(2, weight_rows, width)}
    values |= {"rows": rows, "W": width, "weight_rows": weight_rows, "eps": 1e-3, "offset": 0.5}
    total, factor = values["x"].astype(np.float64), np.resize(values["weight"], (rows, width)) + 0.5
    shift = np.zeros((rows, width))
    if residual:
        values |= {"residual": floats(3, rows, width), "sum_out": np.empty((rows, width), np.float32)}
        total += values["residual"]
    if kind == "layer":
        values["bias"] = floats(4, weight_rows, width)
        shift = np.resize(values["bias"], (rows, width))
    values["out"] = np.empty((rows, width), np.float32)
    found = interpreter.run(only("norm", params | flags, values), "sm80", **values)
    if residual:
        close(found["sum_out"], total)
    total -= total.mean(axis=1, keepdims=True) if kind == "layer" else 0.0
    squares = (total**2).sum(axis=1, keepdims=True) / (1 if kind == "l2" else width)
    close(found["out"], total / np.sqrt(squares + 1e-3) * factor + shift)


def inputs_of(forms: str, rows: int, width: int) -> tuple[dict[str, ParamValue], dict[str, Array], list[Array]]:
    """Parameters and arrays of an expression's inputs, and their numbers in float64."""
    params = {f"in{index}": forms[index : index + 1] for index in range(POINTWISE_INPUTS)}
    shapes: dict[str, tuple[int, ...]] = {"t": (rows, width), "n": (width,), "1": (rows, 1), "s": (1,)}
    arrays = {f"in{index}": floats(index, *shapes[form]) for index, form in enumerate(forms)}
    return dict(params), arrays, [array.astype(np.float64) for array in arrays.values()]


@pytest.mark.parametrize(("rows", "width"), [(1, 64), (11, 77), (3, 1500), (70, 1)])
def test_pointwise(interpreter: Interpreter, rows: int, width: int) -> None:
    text = "(add (mul (tanh in0) in1) (sub in2 (sigmoid in3)))"
    params, arrays, numbers = inputs_of("tn1s", rows, width)
    values = {**arrays, "out": np.empty((rows, width), np.float32), "rows": rows, "W": width}
    kernel = only("pointwise", {"real": "float32", "expr": text, **params}, values)
    close(interpreter.run(kernel, "sm80", **values)["out"], evaluate(parse(text), numbers))


def test_every_operator(interpreter: Interpreter) -> None:
    """Each by itself, where it is defined; what Triton has no form of is named."""
    lacking = []
    for operator, count in OPERATORS.items():
        if operator in REDUCTIONS:
            continue
        domain = "(abs in0)" if operator in ("sqrt", "rsqrt", "log", "div", "pow") else "in0"
        rest = {"clamp": "-0.5 0.75", "where": "in1 0.25"}.get(operator, "in1" if operator in BINARY else "")
        text = f"({operator} {domain}{' ' if rest else ''}{rest})" if count > 1 else f"({operator} {domain})"
        if not supported(text):
            lacking.append(operator)
            continue
        params, arrays, numbers = inputs_of("tt", 5, 65)
        arrays["in1"][:, ::3] = arrays["in0"][:, ::3]  # equal numbers too
        numbers = [array.astype(np.float64) for array in arrays.values()]
        if len({text.find("in1"), -1}) == 1:
            del arrays["in1"]
            params["in1"], numbers = "", numbers[:1]
        values = {**arrays, "out": np.empty((5, 65), np.float32), "rows": 5, "W": 65}
        kernel = only("pointwise", {"real": "float32", "expr": text, **params}, values)
        close(interpreter.run(kernel, "sm80", **values)["out"], evaluate(parse(text), numbers))
    assert lacking == ["pow"]
    assert supported("(add (pow in0 3.0) in1)")
    assert not supported("(pow in0 0.5)")
    assert not supported("(add in0 (exp 1.0))")


def test_powers_are_products(interpreter: Interpreter) -> None:
    params, arrays, numbers = inputs_of("t", 2, 40)
    values = {**arrays, "out": np.empty((2, 40), np.float32), "rows": 2, "W": 40}
    kernel = only("pointwise", {"real": "float32", "expr": "(pow (sub in0 1.0) 3.0)", **params}, values)
    close(interpreter.run(kernel, "sm80", **values)["out"], (numbers[0] - 1) ** 3)


@pytest.mark.parametrize("width", [77, 2048])
def test_reduction(interpreter: Interpreter, width: int) -> None:
    total = "(add (mul in0 (rsqrt (mean (mul in0 in0)))) in1)"
    text = f"{total} (mul (sub {total} (max {total})) (add in2 in3))"
    params, arrays, (a, b, c, d) = inputs_of("tn1s", 5, width)
    outs = {name: np.empty((5, width), np.float32) for name in ("first", "out")}
    forms: dict[str, ParamValue] = {"real": "float32", "exprs": text, "column": False, "first_out": True}
    values: dict[str, Any] = {**arrays, **outs, "rows": 5, "W": width}
    found = interpreter.run(only("reduction", forms | params, values), "sm80", **values)
    expected = a / np.sqrt((a**2).mean(axis=1, keepdims=True)) + b
    close(found["first"], expected)
    close(found["out"], (expected - expected.max(axis=1, keepdims=True)) * (c + d))
    forms |= {"exprs": "(sqrt (sum (abs in0)))", "column": True, "first_out": False}
    params |= dict.fromkeys(("in1", "in2", "in3"), "")
    values = {"in0": arrays["in0"], "out": np.empty(5, np.float32), "rows": 5, "W": width}
    found = interpreter.run(only("reduction", forms | params, values), "sm80", **values)
    close(found["out"], np.sqrt(np.abs(a).sum(axis=1)))


def test_a_maximum_of_nan_is_nan(interpreter: Interpreter) -> None:
    params, arrays, _ = inputs_of("t", 3, 50)
    arrays["in0"][1, 7] = np.nan
    forms: dict[str, ParamValue] = {"real": "float32", "exprs": "(max in0)", "column": True, "first_out": False}
    values: dict[str, Any] = {**arrays, "out": np.empty(3, np.float32), "rows": 3, "W": 50}
    found = interpreter.run(only("reduction", forms | params, values), "sm80", **values)["out"]
    assert np.isnan(found).tolist() == [False, True, False]


# --- attention --------------------------------------------------------------------------------------------------------

PAGE = 64


@dataclass(frozen=True)
class Layer:
    """An attention layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    window: int = 0
    softcap: float = 0.0
    weights: str = ""
    """sinks or slopes, if the heads have any."""


@pytest.mark.parametrize(
    "layer",
    [
        Layer(4, 2, 64, 64),
        Layer(3, 1, 40, 24, 50, 2.0),
        Layer(2, 2, 16, 32, 0, 0.0, "slopes"),
        Layer(6, 2, 32, 16, 70, 0.0, "sinks"),
    ],
    ids=str,
)
def test_attention(interpreter: Interpreter, layer: Layer) -> None:
    """Several sequences, one without queries, whose pages are shuffled and poisoned where no token is."""
    length, queries = np.array([1, 130, 5, 70], np.int32), [1, 40, 0, 70]
    rng = np.random.default_rng(0)
    dims = {"key_dim": layer.key_dim, "value_dim": layer.value_dim}
    cache = PagedCache.empty(13, heads=layer.kv_heads, **dims, page_tokens=PAGE, dtype="float32", in_rows=True)
    pages = (1 + rng.permutation(12).astype(np.int32)).reshape(4, 3)
    for s, tokens in enumerate(length):
        at = np.arange(tokens)
        k, v = (
            floats(seed, tokens, layer.kv_heads, dim)
            for seed, dim in ((2 * s, layer.key_dim), (2 * s + 1, layer.value_dim))
        )
        cache.write(k, v, pages[s, at // PAGE] * PAGE + at % PAGE)
    params: dict[str, ParamValue] = {"real": "float32", "dtype": "float32", **dims}
    params |= {"has_window": layer.window > 0, "has_softcap": layer.softcap > 0}
    params |= {f"has_{name}": layer.weights == name for name in ("sinks", "slopes")}
    options: dict[str, Any] = {layer.weights: floats(20, layer.heads, scale=0.1)} if layer.weights else {}
    options |= {"window": layer.window} if layer.window else {}
    options |= {"softcap": layer.softcap} if layer.softcap else {}
    q, seq_start = floats(21, sum(queries), layer.heads, layer.key_dim), np.cumsum([0, *queries], dtype=np.int32)
    values: dict[str, Any] = {"q": q, "cache": cache.data.reshape(-1).view(np.float32), "pages": pages.reshape(-1)}
    values |= {"page_stride": np.array([3], np.int32), "seq_start": seq_start, "context": length, "S": 4}
    values |= {"heads": layer.heads, "kv_heads": layer.kv_heads, "page_tokens": PAGE, "scale": 0.25, "blocks": 256}
    values |= {"out": np.empty((sum(queries), layer.heads, layer.value_dim), np.float32), **options}
    kernel = only("attention_prefill", params, values)
    found = interpreter.run(kernel, "sm80", **values)["out"]
    close(found, attention(q, cache, pages, seq_start, length, scale=0.25, **options))


# --- linear layers ----------------------------------------------------------------------------------------------------


def silu(x: Array) -> Array:
    result: Array = x / (1 + np.exp(-x))
    return result


SMALL: dict[str, ParamValue] = {"tile_rows": 32, "tile_columns": 32, "stages": 2, "warps": 4}
LARGE: dict[str, ParamValue] = {"tile_rows": 64, "tile_columns": 256, "stages": 2, "warps": 4}


@pytest.mark.parametrize(("arch", "real"), [("sm80", np.float32), ("sm90", np.float16)])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(
    ("tile", "shape"),
    [
        (SMALL, (1, 30, 40)),
        (SMALL, (70, 130, 72)),
        (SMALL, (100, 64, 128)),
        (LARGE, (33, 300, 16)),
        (LARGE, (3, 256, 64)),
    ],
)
def test_linear(
    *,
    interpreter: Interpreter,
    arch: ArchName,
    real: Any,
    gated: bool,
    tile: dict[str, ParamValue],
    shape: tuple[int, int, int],
) -> None:
    """A bias, an epilogue of two extras; on sm90 tiles come by tensor maps, which float32 has none of."""
    rows, columns, inner = shape
    results = columns // 2 if gated else columns
    text = "(add (mul (silu in0) in1) (mul in2 in3))" if gated else "(add (mul (silu in0) in1) in2)"
    layer: dict[str, ParamValue] = {"real": np.dtype(real).name, "has_bias": True, "epilogue": text, "gated": gated}
    layer |= {"extra1": "t", "extra2": "n", "extra3": "", "extra4": "", "band": 2, "flatten": True}
    x, weight = floats(1, rows, inner).astype(real), floats(2, columns, inner, scale=inner**-0.5).astype(real)
    bias, full, row = floats(3, columns), floats(4, rows, results).astype(real), floats(5, results).astype(real)
    values: dict[str, Any] = {"x": x, "weight": weight, "bias": bias, "extra1": full, "extra2": row}
    values |= {"out": np.empty((rows, results), real), "rows": rows, "N": columns, "K": inner}
    kernel = KernelSpec("linear_triton", {**layer, **tile}, {"N": columns, "K": inner})
    found = interpreter.run(kernel, arch, **values)["out"]
    product = x.astype(np.float64) @ weight.astype(np.float64).T + bias
    if gated:
        expected = silu(product[:, :results]) * product[:, results:] + full.astype(np.float64) * row
    else:
        expected = silu(product) * full + row
    close(found, expected, 4 if real is np.float16 else 16)
