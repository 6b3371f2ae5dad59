"""The op table: numpy meanings against torch, shape rules against the meanings, attributes and their errors."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from toolkit.compiler.ir import Attr, Value
from toolkit.compiler.op_spec import Array, Packing
from toolkit.compiler.ops import OPS, GraphBuilder, complete, make_op
from toolkit.compiler.shapes import CACHE, Dim, Sym, TensorType
from toolkit.kernels_templates.expression import UNARY

TOKENS = 7
T = Sym("T", 64)
PACKING = Packing((0, 4, TOKENS), (4, 3), (0, 1))


def random(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(np.float32)


def evaluate(kind: str, /, *inputs: Any, **attrs: Attr) -> tuple[Any, ...]:
    """Results of one op, whose shapes must be those that its shape rule gives."""
    types = [_type(array) for array in inputs]
    full = complete(kind, types, attrs)
    results = OPS[kind].evaluate(inputs, full, PACKING)
    for result, type_ in zip(results, OPS[kind].infer(types, full), strict=True):
        if type_ != CACHE:
            assert result.shape == tuple(_size(dim) for dim in type_.shape)
            assert result.dtype == {"float32": np.float32, "bool": np.bool_, "int32": np.int32}[type_.dtype]
    return results


def _type(array: Any) -> TensorType:
    if isinstance(array, dict):
        return CACHE
    dims = tuple(T if size == TOKENS else size for size in array.shape)
    return TensorType("float32" if array.dtype == np.float32 else "bool" if array.dtype == bool else "int32", dims)


def _size(dim: Dim) -> int:
    return dim if isinstance(dim, int) else dim.factor * TOKENS


def close(found: Array, expected: torch.Tensor | Array, tolerance: float = 1e-5) -> None:
    np.testing.assert_allclose(found, np.asarray(expected), rtol=tolerance, atol=tolerance)


def test_embedding_and_take_rows_gather() -> None:
    table, ids = random(20, 6), np.array([3, 19, 0, 3, 3, 5, 6], np.int32)
    close(evaluate("embedding", table, ids, scale=3.0)[0], table[ids] * 3)
    rows = np.array([5, 1], np.int32)
    close(evaluate("take_rows", random(TOKENS, 3), rows)[0], random(TOKENS, 3)[rows])


def test_linear_with_bias_and_epilogue() -> None:
    x, w, b, t, n = random(TOKENS, 8), random(5, 8), random(5), random(TOKENS, 5), random(5, seed=1)
    product = F.linear(*map(torch.from_numpy, (x, w, b)))
    close(evaluate("linear", x, w, b, has_bias=True)[0], product)
    (found,) = evaluate("linear", x, w, b, t, n, has_bias=True, epilogue="(add (mul (silu in0) in2) in1)")
    close(found, F.silu(product) * torch.from_numpy(n) + torch.from_numpy(t))


@pytest.mark.parametrize("shape", [(TOKENS, 16), (TOKENS, 3, 16)])
def test_norms(shape: tuple[int, ...]) -> None:
    x, w, b = random(*shape), random(16), random(16, seed=1)
    tx, tw, tb = map(torch.from_numpy, (x, w, b))
    close(evaluate("norm", x, w, eps=1e-5)[0], F.rms_norm(tx, (16,), tw, 1e-5))
    close(evaluate("norm", x, w, eps=1e-5, offset=1.0)[0], F.rms_norm(tx, (16,), tw + 1, 1e-5))
    close(evaluate("norm", x, w, b, kind="layer", eps=1e-5, has_bias=True)[0], F.layer_norm(tx, (16,), tw, tb, 1e-5))
    close(evaluate("norm", x, kind="l2", eps=0.0, has_weight=False)[0], F.normalize(tx, dim=-1))
    total, normed = evaluate("add_norm", x, x, w, eps=1e-5)
    close(total, x + x)
    close(normed, F.rms_norm(2 * tx, (16,), tw, 1e-5))


def test_a_norm_weight_for_every_head() -> None:
    x, w = random(TOKENS, 3, 16), random(3, 16)
    close(evaluate("norm", x, w, eps=1e-5)[0], F.rms_norm(torch.from_numpy(x), (16,), None, 1e-5).numpy() * w)


@pytest.mark.parametrize("style", ["half", "pair"])
def test_rope_is_a_complex_rotation_that_spares_the_rest(style: str) -> None:
    x, angle = random(TOKENS, 2, 10), random(TOKENS, 3)
    (found,) = evaluate("rope", x, np.cos(angle), np.sin(angle), style=style)
    pairs = [(i, i + 3) if style == "half" else (2 * i, 2 * i + 1) for i in range(3)]
    for index, (a, b) in enumerate(pairs):
        turned = (x[..., a] + 1j * x[..., b]) * np.exp(1j * angle[:, index])[:, None]
        close(found[..., a], turned.real)
        close(found[..., b], turned.imag)
    close(found[..., 6:], x[..., 6:])


@pytest.mark.parametrize("function", ["cos", "sin"])
def test_rope_tables_go_by_the_length(function: str) -> None:
    frequencies = random(3, 5)
    positions, lengths = np.array([3, 0, 8, 9], np.int32), np.array([4, 10, 11, 90], np.int32)
    (found,) = evaluate("rope_table", positions, lengths, frequencies, function=function, first=10, scale=-2.0)
    angles = torch.from_numpy(positions)[:, None] * torch.from_numpy(frequencies[[0, 0, 1, 2]])
    close(found, -2.0 * getattr(torch, function)(angles))


@pytest.mark.parametrize("window", [0, 2])
@pytest.mark.parametrize("softcap", [0.0, 1.5])
@pytest.mark.parametrize("weights", [(), ("sinks",), ("slopes",), ("sinks", "slopes")])
@pytest.mark.parametrize("causal", [False, True])
def test_attention_of_packed_sequences(window: int, softcap: float, weights: tuple[str, ...], causal: bool) -> None:
    q, k, v = random(TOKENS, 4, 8), random(TOKENS, 2, 8), random(TOKENS, 2, 6)
    extra = {name: random(4, seed=seed) for seed, name in enumerate(weights)}
    flags = {f"has_{name}": name in weights for name in ("sinks", "slopes")}
    options: dict[str, Attr] = {
        "scale": 0.3, "window": window, "softcap": softcap, "causal": causal, "layer": 0, **flags,
    }  # fmt: skip
    (found,) = evaluate("attention", q, k, v, *extra.values(), **options)
    for span in (slice(0, 4), slice(4, 7)):
        close(found[span], torch_attention(q[span], k[span], v[span], extra, options))
    if causal:
        _, cache = evaluate("rope_kv_write", *fused_inputs(q, k), has_rope=False, heads=4, kv_heads=2, head_dim=8)
        (paged,) = evaluate("paged_attention", q, cache, *extra.values(), **options, kv_heads=2, value_dim=8)
        (plain,) = evaluate("attention", q, k, k, *extra.values(), **options)
        close(paged, plain)


def torch_attention(q: Array, k: Array, v: Array, extra: dict[str, Array], options: dict[str, Any]) -> torch.Tensor:
    scores = torch.einsum("ihd,jhd->hij", torch.from_numpy(q), torch.from_numpy(k).repeat_interleave(2, 1))
    scores = scores * options["scale"]
    if options["softcap"]:
        scores = options["softcap"] * torch.tanh(scores / options["softcap"])
    distance = torch.arange(len(q))[:, None] - torch.arange(len(q))[None]
    if "slopes" in extra:
        scores = scores - torch.from_numpy(extra["slopes"])[:, None, None] * distance
    hidden = distance < 0 if options["causal"] else torch.zeros_like(distance, dtype=torch.bool)
    if options["window"]:
        hidden = hidden | (distance.abs() >= options["window"])
    scores = scores.masked_fill(hidden, -math.inf)
    if "sinks" in extra:
        scores = torch.cat([scores, torch.from_numpy(extra["sinks"])[:, None, None].expand(-1, len(q), 1)], -1)
    weights = scores.softmax(-1)[..., : len(q)]
    return torch.einsum("hij,jhd->ihd", weights, torch.from_numpy(v).repeat_interleave(2, 1))


def fused_inputs(q: Array, k: Array) -> tuple[Any, ...]:
    """The projection of queries, keys and values (the keys again), and an empty cache."""
    return np.concatenate([x.reshape(TOKENS, -1) for x in (q, k, k)], axis=1), {}


@pytest.mark.parametrize("norms", [(), ((8,), (8,)), ((4, 8), (2, 8))])
def test_rope_kv_write_is_its_parts(norms: tuple[tuple[int, ...], ...]) -> None:
    q, k, v = random(TOKENS, 4, 8), random(TOKENS, 2, 8), random(TOKENS, 2, 8, seed=1)
    weights = [random(*shape) for shape in norms]
    cos, sin = np.cos(random(TOKENS, 3)), np.sin(random(TOKENS, 3))
    qkv = np.concatenate([x.reshape(TOKENS, -1) for x in (q, k, v)], axis=1)
    sizes: dict[str, Attr] = {"heads": 4, "kv_heads": 2, "head_dim": 8}
    norm: dict[str, Attr] = {"eps": 1e-6, "offset": 1.0}
    extra = {"has_qk_norm": True, **norm} if norms else {}
    turned, cache = evaluate("rope_kv_write", qkv, cos, sin, *weights, {}, **sizes, **extra)
    if norms:
        q, k = (evaluate("norm", x, w, **norm)[0] for x, w in zip((q, k), weights, strict=True))
    q, k = (evaluate("rope", x, cos, sin)[0] for x in (q, k))
    (expected,) = evaluate("kv_write", k, v, {})
    close(turned, q)
    for sequence in (0, 1):
        close(cache[sequence][0], expected[sequence][0])
        close(cache[sequence][1], expected[sequence][1])


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": torch.relu,
    "relu2": lambda x: torch.relu(x) ** 2,
    "sigmoid": torch.sigmoid,
    "tanh": torch.tanh,
    "softplus": F.softplus,
}


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations(kind: str) -> None:
    x = random(TOKENS, 12)
    close(evaluate("activation", x, kind=kind)[0], ACTIVATIONS[kind](torch.from_numpy(x)))


def test_arithmetic_broadcasts_and_takes_scalars() -> None:
    x, row, column = np.abs(random(TOKENS, 3)) + 1, random(3), random(TOKENS, 1)
    close(evaluate("add", x, row)[0], x + row)
    close(evaluate("mul", x, column)[0], x * column)
    close(evaluate("sub", x, scalar=2, reverse=True)[0], 2 - x)
    close(evaluate("pow", x, scalar=0.5)[0], np.sqrt(x))
    close(evaluate("clamp", x, high=1.5)[0], np.minimum(x, 1.5))
    (less,) = evaluate("compare", x, row, op="lt")
    close(evaluate("where", less, x, column)[0], np.where(x < row, x, column))
    close(evaluate("pointwise", x, row, expr="(where (lt in0 in1) in0 0.5)")[0], np.where(x < row, x, 0.5))


def test_shapes_and_reductions() -> None:
    x = random(TOKENS, 6)
    close(evaluate("reshape", x, shape=(-1, 2, 3))[0], x.reshape(-1, 2, 3))
    close(evaluate("reshape", x.reshape(TOKENS, 2, 3), shape=(-1, 3))[0], x.reshape(-1, 3))
    close(evaluate("transpose", x.reshape(TOKENS, 2, 3), perm=(1, 0, 2))[0], x.reshape(TOKENS, 2, 3).swapaxes(0, 1))
    close(evaluate("slice", x, axis=-1, start=2, stop=5)[0], x[:, 2:5])
    close(evaluate("concat", x, x[:, :2], axis=-1)[0], np.concatenate([x, x[:, :2]], 1))
    close(evaluate("reduce", x, op="mean")[0], x.mean(-1))
    close(evaluate("reduce", x, op="max", keepdims=True)[0], x.max(-1, keepdims=True))
    close(evaluate("softmax", x)[0], torch.from_numpy(x).softmax(-1))
    close(
        evaluate("bmm", x.reshape(TOKENS, 3, 2), x.reshape(TOKENS, 2, 3))[0], x.reshape(-1, 3, 2) @ x.reshape(-1, 2, 3)
    )
    assert evaluate("cast", x, dtype="int32")[0].dtype == np.int32


def test_every_activation_of_the_expression_language_is_an_attribute() -> None:
    assert OPS["activation"].attrs["kind"].choices == tuple(UNARY)


@pytest.mark.parametrize(
    ("kind", "shapes", "attrs", "message"),
    [
        ("frob", [], {}, "expected an op of the op table, found 'frob'"),
        ("clamp", [(2,)], {"lo": 1.0}, "clamp has attributes low, high, found lo"),
        ("norm", [(2,), (2,)], {}, "norm needs attribute eps: float, found None"),
        ("norm", [(2,), (2,)], {"eps": 1e-5, "kind": "max"}, "kind: rms or layer or l2, found 'max'"),
        ("norm", [(2,), (3,)], {"eps": 1e-5}, "norm: expected weights that match the last dimensions"),
        ("linear", [(T, 4), (3, 5)], {}, r"linear: expected x\[.., K\] and w\[N, K\], found \(float32\[T, 4\]"),
        ("linear", [(T, 4), (3, 4), (T, 3)], {}, "expected an epilogue for halves and extra inputs"),
        ("linear", [(T, 4), (6, 4)], {"gated": True}, "expected an epilogue for halves and extra inputs"),
        ("linear", [(T, 4), (3, 4)], {"gated": True, "epilogue": "in1"}, "expected a multiple of 2, found 3"),
        ("linear", [(T, 4), (3, 4)], {"epilogue": "(add in0 in1)"}, "expected extra inputs for the epilogue"),
        ("reshape", [(T, 6)], {"shape": (-1, 4)}, "expected a multiple of 4, found 6\\*T"),
        ("slice", [(T, 6)], {"axis": 0, "start": 0, "stop": 3}, "expected a fixed axis 0"),
        ("add", [(T, 6), (T, 5)], {}, "expected equal dimensions or 1, found 6, 5"),
        ("attention", [(T, 3, 4), (T, 2, 4), (T, 2, 4)], {"layer": 0, "scale": 1.0}, "Hq a multiple of Hk"),
    ],
)
def test_errors_say_what_was_expected(
    kind: str, shapes: list[tuple[Dim, ...]], attrs: dict[str, Attr], message: str
) -> None:
    inputs = [Value("x", TensorType("float32", shape)) for shape in shapes]
    with pytest.raises(ValueError, match=message):
        make_op(kind, inputs, ["y"], attrs)


def test_the_builder_keeps_names_unique() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 4))
    first, second = build.op("add", x, x, name="x"), build.op("add", x, x, name="x")
    assert (first, second) == (Value("x_1", x.type), Value("x_2", x.type))
