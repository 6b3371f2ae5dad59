"""The numpy meaning of kernels that are no IR op: the paged cache, attention over it, and sampling.

A *page* of one layer holds `page_tokens` tokens, a multiple of 16, in the layout "kv-head-major":

    keys    [kv_heads][page_tokens / 16][key_dim][16]     a panel of 16 tokens, column by column
    values  [kv_heads][page_tokens][value_dim]
    scales  [2][kv_heads][page_tokens]                    float16, of keys, then of values: in int8 and fp8 caches alone

Keys lie column by column so that 16 scores are computed together, without sums across a vector. Token t of a page is
lane t % 16 of panel t / 16. A slot is `page * page_tokens + t`; page 0 is the trash page, which is never read.

On GPUs the layout is "kv-rows": keys lie as values do, [kv_heads][page_tokens][key_dim].
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import e4m3_values
from ..runtime.plan import LARGEST_CODE, KvDType

Array = npt.NDArray[Any]

PANEL = 16
"""Tokens of a panel of keys."""

_STORAGE: dict[KvDType, np.dtype[Any]] = {
    "float32": np.dtype(np.float32),
    "float16": np.dtype(np.float16),
    "bfloat16": np.dtype(np.uint16),
    "int8": np.dtype(np.int8),
    "fp8": np.dtype(np.uint8),
}


def page_bytes(heads: int, key_dim: int, value_dim: int, page_tokens: int, dtype: KvDType) -> int:
    """Bytes of a page of one layer. Raises ValueError unless `page_tokens` is a multiple of 16."""
    if page_tokens <= 0 or page_tokens % PANEL:
        raise ValueError(f"page_tokens must be a multiple of {PANEL}, found {page_tokens}")
    numbers = heads * page_tokens * (key_dim + value_dim) * _STORAGE[dtype].itemsize
    return numbers + (2 * heads * page_tokens * np.dtype(np.float16).itemsize if dtype in LARGEST_CODE else 0)


def store_scales(x: npt.NDArray[np.float32], dtype: KvDType) -> npt.NDArray[np.float16]:
    """The scales [..] of vectors x[.., dim] in a cache of codes."""
    with np.errstate(over="ignore"):
        scales: npt.NDArray[np.float16] = (np.abs(x).max(axis=-1) / np.float32(LARGEST_CODE[dtype])).astype(np.float16)
    return scales


def _float8(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """The nearest 8-bit floats (E4M3), ties to even; numbers are at most 448."""
    sizes = e4m3_values()[:127]
    between = (sizes[1:] + sizes[:-1]) / 2
    code = np.searchsorted(between, np.abs(x))
    code += (np.abs(x) == between[np.minimum(code, 125)]) & (code % 2 == 1)
    return (code + 128 * (x < 0)).astype(np.uint8)


def store(x: npt.NDArray[np.float32], dtype: KvDType) -> Array:
    """Vectors x[.., dim] as numbers of a cache, rounded to nearest even; bfloat16 as uint16 bit patterns."""
    if dtype in LARGEST_CODE:
        scales, most = store_scales(x, dtype).astype(np.float32)[..., None], LARGEST_CODE[dtype]
        with np.errstate(invalid="ignore", divide="ignore"):
            codes = np.where(scales > 0, np.nan_to_num(np.clip(x / scales, -most, most)), 0).astype(np.float32)
        return np.rint(codes).astype(np.int8) if dtype == "int8" else _float8(codes)
    if dtype != "bfloat16":
        return x.astype(_STORAGE[dtype])
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(x), (bits >> 16) | 0x40, rounded).astype(np.uint16)


def restore(x: Array, dtype: KvDType) -> npt.NDArray[np.float32]:
    """The floats that `store` kept; those of a cache of codes are still without their scales."""
    if dtype == "fp8":
        return e4m3_values()[x]
    if dtype != "bfloat16":
        return x.astype(np.float32)
    return (x.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class PagedCache:
    """The K/V pages of one layer: `data` is uint8 [pages, page_bytes], written in place."""

    data: npt.NDArray[np.uint8]
    heads: int
    key_dim: int
    value_dim: int
    page_tokens: int
    dtype: KvDType
    in_rows: bool = False
    """Whether the layout is "kv-rows"."""

    @staticmethod
    def empty(
        pages: int,
        *,
        heads: int,
        key_dim: int,
        value_dim: int,
        page_tokens: int,
        dtype: KvDType,
        in_rows: bool = False,
    ) -> PagedCache:
        """Pages full of 0xFF bytes, which are NaN in every dtype."""
        size = page_bytes(heads, key_dim, value_dim, page_tokens, dtype)
        data = np.full((pages, size), 0xFF, np.uint8)
        return PagedCache(data, heads, key_dim, value_dim, page_tokens, dtype, in_rows)

    @property
    def keys(self) -> Array:
        """A view [pages, heads, page_tokens / 16, key_dim, 16], or [pages, heads, page_tokens, key_dim] of rows."""
        width = self.heads * self.page_tokens * self.key_dim
        rows = (self.page_tokens, self.key_dim)
        shape = rows if self.in_rows else (self.page_tokens // PANEL, self.key_dim, PANEL)
        return self.data.view(_STORAGE[self.dtype])[:, :width].reshape(-1, self.heads, *shape)

    @property
    def values(self) -> Array:
        """A view [pages, heads, page_tokens, value_dim]."""
        start = self.heads * self.page_tokens * self.key_dim
        shape = (-1, self.heads, self.page_tokens, self.value_dim)
        end = start + self.heads * self.page_tokens * self.value_dim
        return self.data.view(_STORAGE[self.dtype])[:, start:end].reshape(shape)

    @property
    def scales(self) -> npt.NDArray[np.float16]:
        """A view [pages, 2, heads, page_tokens] of a cache of codes: scales of keys, then of values."""
        start = self.heads * self.page_tokens * (self.key_dim + self.value_dim)
        view: npt.NDArray[np.float16] = self.data[:, start:].view(np.float16)
        return view.reshape(-1, 2, self.heads, self.page_tokens)

    def write(self, k: npt.NDArray[np.float32], v: npt.NDArray[np.float32], slots: Array) -> None:
        """The meaning of `kv_write`: k[T, heads, key_dim] and v[T, heads, value_dim] go to slots[T]."""
        pages, tokens = slots // self.page_tokens, slots % self.page_tokens
        if self.in_rows:
            self.keys[pages, :, tokens] = store(k, self.dtype)
        else:
            self.keys[pages, :, tokens // PANEL, :, tokens % PANEL] = store(k, self.dtype)
        self.values[pages, :, tokens] = store(v, self.dtype)
        if self.dtype in LARGEST_CODE:
            for which, x in enumerate((k, v)):
                self.scales[pages, which, :, tokens] = store_scales(x, self.dtype)

    def read(self, pages: Array, length: int) -> tuple[npt.NDArray[np.float32], npt.NDArray[np.float32]]:
        """Keys [length, heads, key_dim] and values [length, heads, value_dim] of a sequence with these pages."""
        order = (0, 2, 1, 3) if self.in_rows else (0, 2, 4, 1, 3)
        k = self.keys[pages].transpose(order).reshape(-1, self.heads, self.key_dim)[:length]
        v = self.values[pages].transpose(0, 2, 1, 3).reshape(-1, self.heads, self.value_dim)[:length]
        keys, values = restore(k, self.dtype), restore(v, self.dtype)
        if self.dtype in LARGEST_CODE:
            scales = self.scales[pages].transpose(1, 0, 3, 2).reshape(2, -1, self.heads, 1)[:, :length]
            with np.errstate(invalid="ignore"):
                keys, values = keys * scales[0], values * scales[1]
        return keys, values


def attention(
    q: npt.NDArray[np.float32],
    cache: PagedCache,
    pages: Array,
    seq_start: Array,
    context: Array,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    sinks: npt.NDArray[np.float32] | None = None,
    slopes: npt.NDArray[np.float32] | None = None,
) -> npt.NDArray[np.float32]:
    """Causal attention of q[T, heads, key_dim] over pages[S, P], in float64; the result is [T, heads, value_dim].

    Query i of sequence s has position `context[s] - (seq_start[s + 1] - seq_start[s]) + i` and sees the keys up to it,
    the last `window` of them if there is a window. A sink is one more score of its head, without a value. With slopes
    (ALiBi) a score sinks by its head's slope for each position that the key is behind.
    """
    heads = q.shape[1]
    out = np.empty((len(q), heads, cache.value_dim), np.float32)
    for s, length in enumerate(context):
        k, v = (x.astype(np.float64).repeat(heads // cache.heads, axis=1) for x in cache.read(pages[s], length))
        for row in range(seq_start[s], seq_start[s + 1]):
            last = length - seq_start[s + 1] + row + 1
            seen = slice(max(0, last - window) if window else 0, last)
            scores = np.einsum("hd,jhd->hj", q[row].astype(np.float64) * scale, k[seen])
            if softcap:
                scores = np.tanh(scores / softcap) * softcap
            if slopes is not None:
                scores = scores - slopes[:, None].astype(np.float64) * np.arange(scores.shape[1])[::-1]
            extra = np.full(heads, -np.inf) if sinks is None else sinks.astype(np.float64)
            top = np.maximum(scores.max(axis=1), extra)
            weights = np.exp(scores - top[:, None])
            total = weights.sum(axis=1) + np.exp(extra - top)
            out[row] = np.einsum("hj,jhd->hd", weights / total[:, None], v[seen])
    return out


# --- sampling ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SampleRow:
    """What a row asks of the sampler: the fields of `runtime.step.ROW` with arrays for pointers."""

    sample: bool = True
    target: int = -1
    top_k: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    seed: int = 0
    index: int = 0
    prompt: tuple[int, ...] = ()
    output: tuple[int, ...] = ()
    bias: tuple[tuple[int, float], ...] = ()
    mask: npt.NDArray[np.bool_] | None = None
    """[V], True where a token is allowed."""


def philox(key: tuple[int, int], counter: tuple[int, int, int, int]) -> tuple[int, int, int, int]:
    """Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011)."""
    (k0, k1), (c0, c1, c2, c3) = key, counter
    for _ in range(10):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (b >> 32) ^ c1 ^ k0, b & 0xFFFFFFFF, (a >> 32) ^ c3 ^ k1, a & 0xFFFFFFFF
        k0, k1 = (k0 + 0x9E3779B9) & 0xFFFFFFFF, (k1 + 0xBB67AE85) & 0xFFFFFFFF
    return c0, c1, c2, c3


def uniform(seed: int, index: int) -> float:
    """The random number in [0, 1) of an output index: 53 bits of philox(seed, index)."""
    high, low, _, _ = philox((seed & 0xFFFFFFFF, seed >> 32), (index & 0xFFFFFFFF, index >> 32, 0, 0))
    return float((high << 32 | low) >> 11) * 2.0**-53


def scores_of(logits: npt.NDArray[np.float32], row: SampleRow) -> npt.NDArray[np.float64]:
    """The logits with mask, bias and penalties. Tokens outside the vocabulary are ignored."""
    size = len(logits)
    scores = logits.astype(np.float64)
    if row.mask is not None:
        scores[~row.mask] = -np.inf
    for token, value in row.bias:
        if 0 <= token < size:
            scores[token] += value
    prompt, output = (np.array([t for t in tokens if 0 <= t < size], int) for tokens in (row.prompt, row.output))
    seen = np.unique(np.concatenate([prompt, output]))
    penalty = row.repetition_penalty
    scores[seen] = np.where(scores[seen] > 0, scores[seen] / penalty, scores[seen] * penalty)
    counts = np.bincount(output, minlength=size)
    scores -= row.frequency_penalty * counts + row.presence_penalty * (counts > 0)
    return scores


def kept_probabilities(scores: npt.NDArray[np.float64], row: SampleRow) -> npt.NDArray[np.float64]:
    """Probabilities of the tokens that may be drawn: temperature, top-k, top-p of what is left, then min-p.

    top-p keeps the best tokens until their probabilities reach it. Tokens equal to the last one kept stay too.
    """
    weights = np.exp((scores - scores.max()) / row.temperature)
    order = np.sort(scores)[::-1]
    if 0 < row.top_k < len(scores):
        weights[scores < order[row.top_k - 1]] = 0
    if row.top_p < 1:
        best = np.sort(weights)[::-1]
        last = min(int(np.searchsorted(np.cumsum(best), row.top_p * best.sum())), len(best) - 1)
        weights[weights < best[last]] = 0
    weights[weights < min(row.min_p, 1.0)] = 0  # the best token weighs 1
    result: npt.NDArray[np.float64] = weights / weights.sum()
    return result
