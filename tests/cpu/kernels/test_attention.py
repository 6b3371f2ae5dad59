"""Attention over pages, and the writes that fill them, against numpy; equal to the bit under batching and chunking."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu.kernels.harness import Guarded, aligned, assert_q8, isas, load_kernel, random_floats
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.kernels_templates.catalog import KernelSpec
from toolkit.kernels_templates.cpu.dense import KV_DTYPES
from toolkit.kernels_templates.packing import q8_row_bytes
from toolkit.kernels_templates.reference import PagedCache, attention, page_bytes, restore, store
from toolkit.runtime.plan import IsaName, KvDType

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]


@dataclass(frozen=True)
class Shape:
    """An attention layer."""

    heads: int
    kv_heads: int
    key_dim: int
    value_dim: int
    dtype: KvDType = "float32"
    page_tokens: int = 16
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False
    slopes: bool = False
    q8: bool = False
    """Whether results are written as codes too."""

    @property
    def kernel(self) -> KernelSpec:
        params = {"key_dim": self.key_dim, "value_dim": self.value_dim, "dtype": self.dtype}
        flags = {"has_window": self.window > 0, "has_softcap": self.softcap > 0}
        weights = {"has_sinks": self.sinks, "has_slopes": self.slopes}
        return KernelSpec("attention", {**params, **flags, **weights, "float_out": True, "q8_out": self.q8})


@dataclass
class Batch:
    """Sequences whose pages hold `context` tokens each, of which the last `queries` are asked about."""

    shape: Shape
    cache: PagedCache
    pages: Array
    q: list[Floats]
    context: list[int]
    sinks: Floats
    slopes: Floats

    def run(self, isa: IsaName, chosen: list[tuple[int, int, int]], threads: int = 1) -> list[Floats]:
        """Results of steps (sequence, first query position, end position), all in one call."""
        shape, scale = self.shape, 1.0 / np.sqrt(self.shape.key_dim)
        q = aligned(np.concatenate([self.q[s][first:end] for s, first, end in chosen]))
        counts = [end - first for _, first, end in chosen]
        seq_start = np.cumsum([0, *counts], dtype=np.int32)
        context = np.array([end for _, _, end in chosen], np.int32)
        pages = self._visible_pages(chosen)
        out = Guarded((len(q), shape.heads, shape.value_dim), np.float32)
        width = shape.heads * shape.value_dim
        q8 = Guarded((len(q), q8_row_bytes(width)), np.uint8)
        optional = [shape.window] * (shape.window > 0) + [shape.softcap] * (shape.softcap > 0)
        weights = [self.sinks] * shape.sinks + [self.slopes] * shape.slopes
        load_kernel(shape.kernel, isa)(
            *(q, self.cache.data, pages, pages.shape[1], seq_start, context, *weights, out.array),
            *[q8.array] * shape.q8,
            *(len(chosen), shape.heads, shape.kv_heads, shape.page_tokens, scale, *optional),
            threads=threads,
        )
        out.check()
        q8.check()
        if shape.q8:
            rows = out.array.reshape(len(q), width)
            finite = np.isfinite(rows).all(axis=1)
            assert_q8(q8.array[finite], rows[finite])
        return np.split(out.array, seq_start[1:-1])

    def expected(self, chosen: list[tuple[int, int, int]]) -> list[Floats]:
        shape = self.shape
        q = np.concatenate([self.q[s][first:end] for s, first, end in chosen])
        seq_start = np.cumsum([0, *(end - first for _, first, end in chosen)])
        result = attention(
            q,
            self.cache,
            self.pages[[s for s, _, _ in chosen]],
            seq_start,
            np.array([end for _, _, end in chosen]),
            scale=1.0 / np.sqrt(shape.key_dim),
            window=shape.window,
            softcap=shape.softcap,
            sinks=self.sinks if shape.sinks else None,
            slopes=self.slopes if shape.slopes else None,
        )
        return np.split(result, seq_start[1:-1])

    def _visible_pages(self, chosen: list[tuple[int, int, int]]) -> Array:
        """Page tables in which pages that no query sees are 0, the trash page, or far out of range."""
        pages = self.pages[[s for s, _, _ in chosen]].copy()
        for row, (_, first, end) in zip(pages, chosen, strict=True):
            row[-(-end // self.shape.page_tokens) :] = 1 << 30
            if self.shape.window:
                row[: max(0, first - self.shape.window + 1) // self.shape.page_tokens] = 0
        return np.ascontiguousarray(pages)


def make_batch(shape: Shape, context: list[int], seed: int = 0) -> Batch:
    """Random queries, keys and values; pages in random order; page 0 and unwritten tokens hold NaN."""
    rng = np.random.default_rng(seed)
    needed = [-(-length // shape.page_tokens) for length in context]
    ids = rng.permutation(sum(needed)) + 1
    pages = np.zeros((len(context), max(needed) + 2), np.int32)
    for row, first, count in zip(pages, np.cumsum([0, *needed[:-1]]), needed, strict=True):
        row[:count] = ids[first : first + count]
    cache = PagedCache.empty(
        sum(needed) + 1,
        heads=shape.kv_heads,
        key_dim=shape.key_dim,
        value_dim=shape.value_dim,
        page_tokens=shape.page_tokens,
        dtype=shape.dtype,
    )
    cache = replace(cache, data=aligned(cache.data))
    for s, length in enumerate(context):
        k = random_floats(rng, length, shape.kv_heads, shape.key_dim)
        v = random_floats(rng, length, shape.kv_heads, shape.value_dim)
        at = np.arange(length)
        cache.write(k, v, pages[s][at // shape.page_tokens] * shape.page_tokens + at % shape.page_tokens)
    q = [random_floats(rng, length, shape.heads, shape.key_dim) for length in context]
    slopes = rng.uniform(0.01, 0.5, shape.heads).astype(np.float32)
    return Batch(shape, cache, pages, q, context, random_floats(rng, shape.heads), slopes)


SHAPES = {
    "smollm": Shape(9, 3, 64, 64, q8=True),
    "mha": Shape(4, 4, 32, 32, page_tokens=32),
    "mqa": Shape(13, 1, 16, 16, dtype="float16"),
    "gemma": Shape(4, 1, 256, 256, dtype="bfloat16", window=40, softcap=5.0),
    "latent": Shape(6, 2, 72, 40, dtype="float16", page_tokens=48),
    "sinks": Shape(8, 2, 64, 64, window=100, sinks=True, dtype="bfloat16", q8=True),
    "many heads": Shape(70, 1, 24, 88),
    "int8": Shape(9, 3, 64, 64, dtype="int8"),
    "int8 latent": Shape(6, 2, 72, 40, dtype="int8", page_tokens=48, window=100, softcap=5.0),
    "int8 odd": Shape(5, 1, 20, 11, dtype="int8", page_tokens=32, sinks=True),
    "alibi": Shape(6, 2, 64, 64, slopes=True),
}


NARROW = ("mha", "mqa", "many heads", "int8 odd")  # shapes whose paths another shape walks on wide vectors
CASES = [(name, isa) for name in SHAPES for isa in isas() if isa == "x86-64-v3" or name not in NARROW]


@pytest.mark.parametrize(("name", "isa"), CASES)
def test_decode_and_prefill_match_numpy(name: str, isa: IsaName) -> None:
    batch = make_batch(SHAPES[name], [1, 200, 63, 64, 65, 130])
    chosen = [(0, 0, 1), (1, 150, 200), (2, 62, 63), (3, 0, 64), (4, 64, 65), (5, 129, 130)]
    for got, want in zip(batch.run(isa, chosen), batch.expected(chosen), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=3e-6)


@given(
    shape=st.sampled_from(
        [SHAPES["smollm"], SHAPES["sinks"], SHAPES["latent"], SHAPES["alibi"], SHAPES["int8 latent"]]
    ),
    cuts=st.lists(st.integers(1, 149), max_size=4, unique=True),
    threads=st.integers(1, 5),
    neighbor=st.integers(1, 90),
)
@settings(max_examples=25, deadline=None)
def test_a_query_is_the_same_to_the_bit_in_any_batch_and_chunking(
    shape: Shape, cuts: list[int], threads: int, neighbor: int
) -> None:
    batch = make_batch(shape, [150, neighbor])
    (whole,) = batch.run("x86-64-v3", [(0, 0, 150)])
    bounds = [0, *sorted(cuts), 150]
    for first, end in pairwise(bounds):
        _, chunk = batch.run("x86-64-v3", [(1, 0, neighbor), (0, first, end)], threads=threads)
        np.testing.assert_array_equal(chunk, whole[first:end])


@pytest.mark.parametrize("isa", isas())
def test_decode_is_prefill_to_the_bit(isa: IsaName) -> None:
    batch = make_batch(SHAPES["smollm"], [70])
    (whole,) = batch.run(isa, [(0, 0, 70)])
    steps = [batch.run(isa, [(0, t, t + 1)], threads=2)[0] for t in range(70)]
    np.testing.assert_array_equal(np.concatenate(steps), whole)


@pytest.mark.parametrize("isa", isas())
def test_extreme_scores_stay_finite_and_nan_stays_nan(isa: IsaName) -> None:
    batch = make_batch(SHAPES["smollm"], [80, 80])
    batch.q[0] *= 1e4
    batch.q[1][3] = np.nan
    big, poisoned = batch.run(isa, [(0, 0, 80), (1, 0, 80)])
    assert np.isfinite(big).all()
    assert np.isnan(poisoned[3]).all()
    assert np.isfinite(np.delete(poisoned, 3, axis=0)).all()


@pytest.mark.parametrize("isa", isas())
@pytest.mark.parametrize("dtype", KV_DTYPES)
@pytest.mark.parametrize(("key_dim", "value_dim"), [(40, 24), (35, 13)])
def test_kv_write(key_dim: int, value_dim: int, dtype: KvDType, isa: IsaName) -> None:
    rng = np.random.default_rng()
    tokens, heads, page_tokens = int(rng.integers(5, 90)), int(rng.integers(2, 6)), 32
    k, v = random_floats(rng, tokens, heads * key_dim + 5), random_floats(rng, tokens, heads * value_dim)
    k[0, 0], v[0, 0], v[1, 1] = np.nan, np.inf, 1e-41
    k[2, :key_dim], v[3, value_dim : 2 * value_dim], k[4, :key_dim] = 0, 1e-9, random_floats(rng, key_dim, scale=1e-5)
    slots = rng.permutation(5 * page_tokens)[:tokens].astype(np.int32)
    want = PagedCache.empty(5, heads=heads, key_dim=key_dim, value_dim=value_dim, page_tokens=page_tokens, dtype=dtype)
    want.write(k[:, :-5].reshape(tokens, heads, key_dim), v.reshape(tokens, heads, value_dim), slots)
    got = Guarded(want.data.shape, np.uint8)
    got.array[:] = 0xFF
    kernel = load_kernel(KernelSpec("kv_write", {"key_dim": key_dim, "value_dim": value_dim, "dtype": dtype}), isa)
    kernel(k, v, slots, got.array, tokens, heads, page_tokens, k.shape[1], v.shape[1], threads=3)
    got.check()
    stored = replace(want, data=got.array)
    for mine, theirs in zip(stored.read(np.arange(5), 160), want.read(np.arange(5), 160), strict=True):
        np.testing.assert_array_equal(mine, theirs)
    if dtype != "int8":  # whose NaN are in the scales
        np.testing.assert_array_equal(restore(stored.keys, dtype), restore(want.keys, dtype))
        np.testing.assert_array_equal(restore(stored.values, dtype), restore(want.values, dtype))


def test_an_int8_cache_is_within_half_a_step_and_half_the_size() -> None:
    rng = np.random.default_rng(0)
    k, v = (random_floats(rng, 64, 3, 64, scale=size) for size in (1.0, 40.0))
    k[:, :, 5] *= 20  # keys have outliers
    caches = {}
    for dtype in ("float32", "int8"):
        cache = PagedCache.empty(4, heads=3, key_dim=64, value_dim=64, page_tokens=16, dtype=dtype)
        cache.write(k, v, np.arange(64))
        caches[dtype] = cache
    for exact, kept in zip(
        caches["float32"].read(np.arange(4), 64), caches["int8"].read(np.arange(4), 64), strict=True
    ):
        step = np.abs(exact).max(axis=2, keepdims=True) / 127
        assert (np.abs(kept - exact) <= 0.5005 * step).all()
    half, whole = page_bytes(3, 64, 64, 16, "int8"), page_bytes(3, 64, 64, 16, "float16")
    assert half == whole * (64 + 2) // 128


@pytest.mark.parametrize("isa", isas())
def test_attention_over_int8_is_close_to_float32(isa: IsaName) -> None:
    """Against the float64 result over what was written, not over what the cache kept of it."""
    exact = make_batch(SHAPES["smollm"], [200, 77])
    rounded = make_batch(SHAPES["int8"], [200, 77])
    chosen = [(0, 0, 200), (1, 70, 77)]
    for got, want in zip(rounded.run(isa, chosen), exact.expected(chosen), strict=True):
        error = np.abs(got - want)
        assert 1e-6 < error.max() < 0.03
        assert np.sqrt(np.mean(error**2)) < 0.004


@given(st.lists(st.floats(width=32), min_size=1, max_size=64))
def test_stored_bfloat16_is_the_nearest(values: list[float]) -> None:
    x = np.array(values, np.float32)
    kept = restore(store(x, "bfloat16"), "bfloat16")
    np.testing.assert_array_equal(np.isnan(kept), np.isnan(x))
    both = np.isfinite(x) & np.isfinite(kept)
    error = np.abs(kept[both].astype(np.float64) - x[both])
    assert (error <= np.abs(x[both].astype(np.float64)) / 256 + 1e-40).all()
