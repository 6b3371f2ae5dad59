"""CUDA attention over pages, and what fills them, against numpy: every number type, mask and head size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from gpu.kernels.harness import run
from gpu.kernels.numbers import EPSILON, close, random, store, value

from toolkit.kernels_templates.catalog import ParamValue
from toolkit.kernels_templates.cuda.attention import BLOCKS, decode_scratch
from toolkit.kernels_templates.reference import PagedCache, attention, restore
from toolkit.runtime.plan import LARGEST_CODE, KvDType

Array = npt.NDArray[Any]
PAGE = 64


@dataclass(frozen=True)
class Shape:
    """An attention layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    real: str = "bfloat16"
    dtype: KvDType = "bfloat16"
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False


SHAPES = (
    Shape(8, 8, 64, 64),
    Shape(8, 2, 128, 128),
    Shape(16, 2, 128, 128, "float16", "float16", window=50),
    Shape(12, 2, 80, 80, softcap=2.0),
    Shape(9, 3, 96, 96, "float16", "float16", slopes=True),
    Shape(4, 1, 256, 256, window=100, softcap=5.0),
    Shape(8, 1, 64, 64, window=128, sinks=True),
    Shape(32, 2, 64, 128, "float16", "float16", sinks=True),
    Shape(8, 2, 128, 128, dtype="int8"),
    Shape(5, 1, 72, 80, "float16", "int8", 70, 3.0, True, True),
    Shape(8, 2, 128, 128, dtype="fp8"),
    Shape(4, 1, 256, 256, dtype="fp8", window=100),
    Shape(5, 1, 72, 80, "float16", "fp8", 70, 3.0, True, True),
    Shape(7, 7, 40, 88, "bfloat16", "bfloat16", 70, 3.0, True, True),
    Shape(6, 2, 64, 64, "float32", "float32", 70, 3.0, True, True),
    Shape(4, 2, 80, 64, "float32", "int8"),
    Shape(4, 2, 80, 64, "float32", "fp8"),
    Shape(4, 4, 64, 64, "bfloat16", "float16"),
)


def fill(shape: Shape, context: list[int], seed: int) -> tuple[PagedCache, Array]:
    """A cache with random keys and values of each sequence in shuffled pages, and the table of those. All else is NaN;
    pages behind the window are freed."""
    rng = np.random.default_rng(seed)
    counts = [-(-length // PAGE) for length in context]
    cache = PagedCache.empty(
        sum(counts) + 3,
        heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        page_tokens=PAGE,
        dtype=shape.dtype,
        in_rows=True,
    )
    order, pages = (
        1 + rng.permutation(sum(counts) + 2).astype(np.int32),
        np.zeros((len(context), max(counts) + 1), np.int32),
    )
    for s, (length, count) in enumerate(zip(context, counts, strict=True)):
        pages[s, :count], order = order[:count], order[count:]
        at = np.arange(length)
        k, v = (
            rng.standard_normal((length, shape.kv_heads, dim)).astype(np.float32)
            for dim in (shape.key_dim, shape.value_dim)
        )
        cache.write(k, v, pages[s, at // PAGE] * PAGE + at % PAGE)
    return cache, pages


def check(family: str, shape: Shape, context: list[int], queries: list[int], seed: int) -> None:
    cache, pages = fill(shape, context, seed)
    tokens = sum(queries)
    q = random(seed + 1, tokens, shape.heads, shape.key_dim, real=shape.real)
    seq_start = np.cumsum([0, *queries], dtype=np.int32)
    flags = {"has_window": shape.window > 0, "has_softcap": shape.softcap > 0}
    weights = {"has_sinks": shape.sinks, "has_slopes": shape.slopes}
    sinks, slopes = random(seed + 2, shape.heads), random(seed + 3, shape.heads, scale=0.05)
    options: dict[str, Any] = {}
    options |= {"sinks": sinks} if shape.sinks else {}
    options |= {"slopes": slopes} if shape.slopes else {}
    options |= {"window": shape.window} if shape.window else {}
    options |= {"softcap": shape.softcap} if shape.softcap else {}
    dims = {"key_dim": shape.key_dim, "value_dim": shape.value_dim}
    params: dict[str, ParamValue] = {"real": shape.real, "dtype": shape.dtype, **dims, **flags, **weights}
    scale = 1.0 / np.sqrt(shape.key_dim)
    expected = attention(
        value(q, shape.real).astype(np.float32), cache, pages, seq_start, np.array(context), scale=scale, **options
    )
    seen = pages.copy()
    if shape.window:
        for s, (length, count) in enumerate(zip(context, queries, strict=True)):
            seen[s, : max(0, length - count + 1 - shape.window) // PAGE] = 0
    scratch = (
        {"scratch": np.full(decode_scratch(shape.value_dim), 0xFF, np.uint8)} if family == "attention_decode" else {}
    )
    found = run(
        family,
        params,
        q=q,
        cache=cache.data,
        pages=seen,
        page_stride=np.array([seen.shape[1]], np.int32),
        seq_start=seq_start,
        context=np.array(context, np.int32),
        out=np.empty((tokens, shape.heads, shape.value_dim), q.dtype),
        S=len(context),
        heads=shape.heads,
        kv_heads=shape.kv_heads,
        page_tokens=PAGE,
        scale=scale,
        blocks=BLOCKS,
        **options,
        **scratch,
    )
    close(value(found["out"], shape.real), expected.astype(np.float64), shape.real, 3.0)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "context",
    [
        [1],
        [63],
        [64, 65],
        [700],
        [3000],
        [17, 1, 2000, 5, 640, 333, 64],
        [int(n) for n in np.random.default_rng(1).integers(1, 300, 90)],
        [int(n) for n in np.random.default_rng(2).integers(1, 1500, 150)],
        [9000, *(int(n) for n in np.random.default_rng(3).integers(1, 400, 120))],
    ],
    ids=len,
)
def test_decode(shape: Shape, context: list[int]) -> None:
    check("attention_decode", shape, context, [1] * len(context), len(context))


@pytest.mark.parametrize("shape", SHAPES[1:3], ids=str)
def test_decode_passes_over_sequences_without_a_query(shape: Shape) -> None:
    check("attention_decode", shape, [100, 9, 400, 64, 300], [0, 1, 0, 1, 0], 11)


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
def test_prefill(shape: Shape, steps: list[tuple[int, int]]) -> None:
    check("attention_prefill", shape, [length for length, _ in steps], [count for _, count in steps], len(steps))


def rotated(x: Array, cos: Array, sin: Array, style: str) -> Array:
    half = cos.shape[-1]
    result = x.copy()
    first, second = (
        (slice(0, half), slice(half, 2 * half)) if style == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    result[..., first] = x[..., first] * cos - x[..., second] * sin
    result[..., second] = x[..., second] * cos + x[..., first] * sin
    return result


@pytest.mark.parametrize("real", ["float32", "float16", "bfloat16"])
@pytest.mark.parametrize(
    ("width", "rotary", "style"), [(64, 64, "half"), (80, 32, "half"), (128, 128, "pair"), (96, 24, "pair")]
)
def test_rope(real: str, width: int, rotary: int, style: str) -> None:
    tokens, heads, stride = 7, 3, 3 * width + 8
    x, cos, sin = (random(i, tokens, n, real=real) for i, n in enumerate((stride, rotary // 2, rotary // 2)))
    params: dict[str, ParamValue] = {"real": real, "head_dim": width, "rotary": rotary, "style": style}
    out = np.empty((tokens, heads, width), x.dtype)
    found = run("rope", params, x=x, cos=cos, sin=sin, out=out, T=tokens, heads=heads, x_stride=stride)["out"]
    exact = value(x, real)[:, : heads * width].reshape(tokens, heads, width)
    close(value(found, real), rotated(exact, value(cos, real)[:, None], value(sin, real)[:, None], style), real)


@pytest.mark.parametrize("real", ["float32", "bfloat16"])
@pytest.mark.parametrize("function", ["cos", "sin"])
def test_rope_table(real: str, function: str) -> None:
    rng = np.random.default_rng(4)
    positions, lengths = (rng.integers(0, 9000, 37).astype(np.int32) for _ in range(2))
    frequencies = (rng.random((5, 24)) * 0.01).astype(np.float32)
    found = run(
        "rope_table",
        {"real": real, "function": function},
        positions=positions,
        lengths=lengths,
        frequencies=frequencies,
        out=np.empty((37, 24), random(0, 1, real=real).dtype),
        **{"T": 37, "W": 24, "first": 3000, "last": 4, "scale": 1.5},
    )["out"]
    rows = np.clip(lengths - 3000, 0, 4)
    angle = (positions[:, None].astype(np.float32) * frequencies[rows]).astype(np.float64)
    close(value(found, real), 1.5 * (np.cos(angle) if function == "cos" else np.sin(angle)), real)


def normed_and_rotated(
    qkv: Array,
    counts: tuple[int, int],
    weights: dict[str, Array],
    rotation: tuple[Array, Array],
    *,
    real: str,
    style: str,
    norm: str,
) -> tuple[Array, Array, Array]:
    """Queries, keys and values in float64, with their norms (weights are 0.25 short) and rotated."""
    heads, kv_heads = counts
    x = value(qkv, real)
    q, k, v = x[:, :heads].copy(), x[:, heads : heads + kv_heads].copy(), x[:, heads + kv_heads :]
    if norm:
        for name, part in (("q_weight", q), ("k_weight", k)):
            centered = part - (part.mean(axis=2, keepdims=True) if norm == "layer" else 0)
            weight = weights[name][: part.shape[1]].astype(np.float64) + 0.25
            part[...] = centered / np.sqrt((centered**2).mean(axis=2, keepdims=True) + 1e-5) * weight
    if rotation[0].size:
        cos, sin = (value(each, real)[:, None] for each in rotation)
        q, k = (rotated(part, cos, sin, style) for part in (q, k))
    return q, k, v


@pytest.mark.parametrize(
    "form",
    [
        ("bfloat16", "bfloat16", 128, 128, "half", "rms", True),
        ("float16", "float16", 64, 64, "half", "", True),
        ("float32", "float32", 80, 32, "pair", "layer", False),
        ("bfloat16", "int8", 256, 256, "half", "rms", False),
        ("float32", "bfloat16", 72, 0, "half", "rms", True),
        ("float16", "int8", 96, 0, "half", "", True),
        ("bfloat16", "fp8", 128, 128, "half", "rms", True),
        ("float16", "fp8", 96, 64, "pair", "", True),
        ("bfloat16", "bfloat16", 80, 32, "half", "layer", False),
        ("float16", "float16", 96, 64, "pair", "rms", False),
        ("bfloat16", "bfloat16", 128, 0, "half", "", True),
    ],
)
@pytest.mark.parametrize(("heads", "kv_heads"), [(8, 2), (3, 3)])
def test_rope_kv_write(form: tuple[str, KvDType, int, int, str, str, bool], heads: int, kv_heads: int) -> None:
    real, dtype, width, rotary, style, norm, shared = form
    tokens, rng = 9, np.random.default_rng(width)
    qkv = random(1, tokens, heads + 2 * kv_heads, width, real=real)
    cos, sin = (random(i, tokens, rotary // 2, real=real) for i in (2, 3))
    count = 1 if shared else heads
    weights = {name: random(5 + i, count, width) for i, name in enumerate(("q_weight", "k_weight"))} if norm else {}
    cache, expected = (
        PagedCache.empty(4, heads=kv_heads, key_dim=width, value_dim=width, page_tokens=PAGE, dtype=dtype, in_rows=True)
        for _ in range(2)
    )
    slots = PAGE + rng.permutation(3 * PAGE)[:tokens].astype(np.int32)
    params: dict[str, ParamValue] = {
        **{"real": real, "head_dim": width, "rotary": rotary, "style": style},
        **{"has_rope": rotary > 0, "qk_norm": norm, "dtype": dtype},
    }
    found = run(
        "rope_kv_write",
        params,
        qkv=qkv,
        **({"cos": cos, "sin": sin} if rotary else {}),
        **weights,
        slots=slots,
        cache=cache.data,
        out=np.empty((tokens, heads, width), qkv.dtype),
        **{"T": tokens, "heads": heads, "kv_heads": kv_heads, "page_tokens": PAGE, "eps": 1e-5, "offset": 0.25},
        **({"weight_stride": 0 if shared else width} if norm else {}),
    )
    q, k, v = normed_and_rotated(qkv, (heads, kv_heads), weights, (cos, sin), real=real, style=style, norm=norm)
    close(value(found["out"], real), q, real)
    expected.write(k.astype(np.float32), v.astype(np.float32), slots)
    written = PagedCache(found["cache"], kv_heads, width, width, PAGE, dtype, True)
    pages, at = slots // PAGE, slots % PAGE
    untouched = np.ones((4, PAGE), bool)
    untouched[pages, at] = False
    assert (written.keys.view(np.uint8).reshape(4, kv_heads, PAGE, -1).transpose(0, 2, 1, 3)[untouched] == 0xFF).all()
    for both in ((written.keys, expected.keys), (written.values, expected.values)):
        mine, other = (restore(each[pages, :, at], dtype).astype(np.float64) for each in both)
        if dtype in LARGEST_CODE:  # the next code at most
            assert (np.abs(mine - other) <= (1 if dtype == "int8" else np.maximum(np.abs(other) / 8, 2.0**-9))).all()
        else:
            assert (np.abs(mine - other) <= 2 * EPSILON[dtype] * np.abs(other) + 1e-5).all()
    if dtype in LARGEST_CODE:
        scales, wanted = (each.scales[pages, :, :, at].astype(np.float64) for each in (written, expected))
        np.testing.assert_allclose(scales, wanted, rtol=2e-3)


@pytest.mark.parametrize(
    "form",
    [
        ("bfloat16", 128, 128, "half", "", True, 8, 2),
        ("float16", 64, 64, "half", "rms", True, 32, 2),
        ("bfloat16", 128, 64, "half", "layer", False, 3, 3),
        ("bfloat16", 80, 48, "pair", "rms", False, 6, 1),
        ("float16", 96, 0, "half", "rms", True, 4, 2),
        ("bfloat16", 256, 256, "half", "", True, 4, 1),
    ],
)
@pytest.mark.parametrize("context", [[1], [65, 64, 1], [700, 17, 16, 5], list(range(1, 800, 9))], ids=len)
def test_decode_and_write(form: tuple[str, int, int, str, str, bool, int, int], context: list[int]) -> None:
    """Against attention over what `rope_kv_write` should have written, and that."""
    real, width, rotary, style, norm, shared, heads, kv_heads = form
    S = len(context)
    dtype: Any = real
    shape = Shape(heads, kv_heads, width, width, real, dtype, window=300 if width == 96 else 0, sinks=width == 64)
    cache, pages = fill(shape, context, S)
    last = np.array(context) - 1
    slots = (pages[np.arange(S), last // PAGE] * PAGE + last % PAGE).astype(np.int32)
    before = cache.data.copy()
    qkv = random(1, S, heads + 2 * kv_heads, width, real=real)
    cos, sin = (random(i, S, rotary // 2, real=real) for i in (2, 3))
    count = 1 if shared else heads
    weights = {name: random(5 + i, count, width) for i, name in enumerate(("q_weight", "k_weight"))} if norm else {}
    options: dict[str, Any] = {"sinks": random(9, heads)} if shape.sinks else {}
    options |= {"window": shape.window} if shape.window else {}
    q, k, v = normed_and_rotated(qkv, (heads, kv_heads), weights, (cos, sin), real=real, style=style, norm=norm)
    q, k = (value(store(part, real), real) for part in (q, k))
    cache.write(k.astype(np.float32), v.astype(np.float32), slots)
    seq_start = np.arange(S + 1, dtype=np.int32)
    expected = attention(q.astype(np.float32), cache, pages, seq_start, np.array(context), scale=width**-0.5, **options)
    params: dict[str, ParamValue] = {
        **{"real": real, "dtype": dtype, "key_dim": width, "value_dim": width, "has_window": shape.window > 0},
        **{"has_softcap": False, "has_sinks": shape.sinks, "has_slopes": False, "qk_norm": norm},
        **{"rotary": rotary, "style": style, "has_rope": rotary > 0},
    }
    found = run(
        "attention_decode_write",
        params,
        **{"q": qkv, "cache": before, "pages": pages, "page_stride": np.array([pages.shape[1]], np.int32)},
        **{"seq_start": seq_start, "context": np.array(context, np.int32)},
        out=np.empty((S, heads, width), qkv.dtype),
        **{"S": S, "heads": heads, "kv_heads": kv_heads, "page_tokens": PAGE, "scale": width**-0.5, "blocks": BLOCKS},
        **{"scratch": np.full(decode_scratch(width), 0xFF, np.uint8), "slots": slots, "eps": 1e-5, "offset": 0.25},
        **({"cos": cos, "sin": sin} if rotary else {}),
        **({"weight_stride": 0 if shared else width} if norm else {}),
        **weights,
        **options,
    )
    close(value(found["out"], real), expected.astype(np.float64), real, 4.0)
    written = PagedCache(found["cache"], kv_heads, width, width, PAGE, dtype, True)
    for mine, other in ((written.keys, cache.keys), (written.values, cache.values)):
        one, two = (restore(each, dtype).astype(np.float64) for each in (mine, other))
        assert (np.isnan(one) == np.isnan(two)).all()
        assert (np.abs(one - two)[~np.isnan(one)] <= 2 * EPSILON[dtype] * np.abs(two[~np.isnan(two)]) + 1e-5).all()


@pytest.mark.parametrize("real", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "int8", "fp8"])
def test_kv_write(real: str, dtype: KvDType) -> None:
    tokens, kv_heads, dims = 11, 3, (72, 40)
    k, v = (random(i, tokens, kv_heads * dim + 16, real=real) for i, dim in enumerate(dims))
    k[3] = 0
    cache, expected = (
        PagedCache.empty(3, heads=kv_heads, key_dim=72, value_dim=40, page_tokens=PAGE, dtype=dtype, in_rows=True)
        for _ in range(2)
    )
    slots = np.random.default_rng(2).permutation(3 * PAGE)[:tokens].astype(np.int32)
    found = run(
        "kv_write",
        {"real": real, "key_dim": 72, "value_dim": 40, "dtype": dtype},
        **{"k": k, "v": v, "slots": slots, "cache": cache.data},
        **{"T": tokens, "kv_heads": kv_heads, "page_tokens": PAGE, "k_stride": k.shape[1], "v_stride": v.shape[1]},
    )["cache"]
    keys, values = (
        value(x, real).astype(np.float32)[:, : kv_heads * dim].reshape(tokens, kv_heads, dim)
        for x, dim in zip((k, v), dims, strict=True)
    )
    expected.write(keys, values, slots)
    np.testing.assert_array_equal(found, expected.data)
