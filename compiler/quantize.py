"""Number conversion: float32 values into any stored encoding, by rounding to nearest or by least squared error."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import Array, EncodedArray, Encoding

Float32 = npt.NDArray[np.float32]

_RANGES = tuple(np.float32(1 + step / 25) for step in range(2, -11, -1))
"""Factors tried on the range of a group of narrow codes: clipping its outlier often lowers the total error."""
_REFITS = 2
"""How often scales are then fitted to the codes, and codes to the scales."""
_SEARCHED_BITS = 6
"""Codes up to this width are worth the search; 8-bit rounding error is far below the model's noise."""
_BLOCK = 1 << 16
"""Values encoded at a time, so that intermediate arrays stay in the CPU's caches."""


def encode(
    values: Float32, encoding: Encoding, importance: Float32 | None = None, *, search: bool = True
) -> EncodedArray:
    """Float32 values of shape [..., K] in the encoding; NaN and infinity must have been refused before.

    Affine groups choose scale and minimum by least squared error, in which `importance` [K] weighs the columns (8-bit
    codes, and all without `search`, by the largest magnitude). Raises ValueError if K is not a multiple of the group or
    a value does not fit the encoding's floats.
    """
    if encoding.kind == "float32":
        return EncodedArray(encoding, np.ascontiguousarray(values, dtype=np.float32))
    if encoding.kind == "float16":
        return EncodedArray(encoding, _to_float16(values))
    if encoding.kind == "bfloat16":
        return EncodedArray(encoding, to_bfloat16(values))
    return _to_affine(values, encoding, importance, search)


def to_bfloat16(values: Float32) -> npt.NDArray[np.uint16]:
    """Bit patterns of the nearest bfloat16, ties to even."""
    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = bits + (np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1)))
    return (rounded >> 16).astype(np.uint16)


def _to_float16(values: Float32) -> npt.NDArray[np.float16]:
    with np.errstate(over="ignore"):
        result = values.astype(np.float16)
    if not np.isfinite(result).all():
        raise ValueError(f"{np.abs(values).max():g} is beyond float16's largest value, 65504")
    return result


def _to_affine(values: Float32, encoding: Encoding, importance: Float32 | None, search: bool) -> EncodedArray:
    *lead, columns = values.shape
    if columns % encoding.group:
        raise ValueError(f"{columns} columns are not a multiple of the group of {encoding.group}")
    groups = values.reshape(-1, columns // encoding.group, encoding.group)
    weights = None if importance is None else importance.reshape(groups.shape[1:])
    codes = np.empty(groups.shape, np.int8 if encoding.bits == 8 else np.uint8)
    scale = np.empty(groups.shape[:2], encoding.scale)
    minimum = np.empty_like(scale) if encoding.has_minimum else None
    step = max(1, _BLOCK // max(1, columns))

    def encode_rows(start: int) -> None:
        rows = slice(start, start + step)
        scale[rows], found = fit(groups[rows], encoding, weights, search=search)
        if minimum is not None and found is not None:
            minimum[rows] = found
        codes[rows] = nearest(groups[rows], scale[rows], found, encoding)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        list(pool.map(encode_rows, range(0, len(groups), step)))
    return EncodedArray(
        encoding,
        codes.reshape(values.shape),
        scale.reshape(*lead, -1),
        None if minimum is None else minimum.reshape(*lead, -1),
    )


# --- groups -----------------------------------------------------------------------------------------------------------


def nearest(groups: Float32, scale: Array, minimum: Array | None, encoding: Encoding) -> Float32:
    """The codes [.., group] nearest to values [.., group], whose scales and minima [..] are as stored."""
    if encoding.levels == "e4m3":
        return _to_e4m3(groups * _reciprocal(scale.astype(np.float32))[..., None])
    low, high = _code_range(encoding)
    if minimum is not None:
        groups = groups - minimum.astype(np.float32)[..., None]
    codes = groups * _reciprocal(scale.astype(np.float32))[..., None]
    codes += np.float32(encoding.zero)
    np.rint(codes, out=codes)
    return np.clip(codes, low, high, out=codes)


def fit(
    groups: Float32, encoding: Encoding, weights: Float32 | None = None, *, search: bool = True
) -> tuple[Array, Array | None]:
    """Stored scales [..], and minima if the encoding has them, for values [.., group] by least squared error.

    `weights` [.., group] say how much the error of each value counts. Raises ValueError if a scale does not fit.
    """
    if encoding.levels == "e4m3":
        return _stored(np.abs(groups).max(axis=-1) / np.float32(448), encoding), None
    low, high = (np.float32(limit - encoding.zero) for limit in _code_range(encoding))
    search = search and encoding.bits <= _SEARCHED_BITS
    if encoding.has_minimum:
        least, most = groups.min(axis=-1), groups.max(axis=-1)
        middle, offset = (least + most) * np.float32(0.5), (low + high) * np.float32(0.5)
        scale = (most - least) / (high - low)
        if search:
            scale, middle = _refine(groups, scale, middle, (low - offset, high - offset), weights)
        return _stored(scale, encoding), _stored(middle - offset * scale, encoding)
    if encoding.bits > _SEARCHED_BITS:
        return _stored(np.abs(groups).max(axis=-1) / high, encoding), None
    # The code range is one wider below zero: give that side to the value of the largest magnitude.
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    scale = extreme / low
    if search:
        scale, _ = _refine(groups, scale, None, (low, high), weights)
    return _stored(scale, encoding), None


def _refine(
    groups: Float32,
    scale: Float32,
    middle: Float32 | None,
    limits: tuple[np.float32, np.float32],
    weights: Float32 | None,
) -> tuple[Float32, Float32]:
    """Better scales and middles than those given: value = scale * step + middle, with steps of 1 within `limits`."""
    low, high = limits
    half = np.float32(low - np.floor(low))  # 0.5 if steps lie between whole numbers
    centered = groups if middle is None else groups - middle[..., None]
    unit = centered * _reciprocal(scale)[..., None]
    steps, error = np.empty_like(unit), np.empty_like(unit)

    def round_to_steps(values: Float32, factor: Float32) -> None:
        np.multiply(values, factor, out=steps)
        np.subtract(steps, half, out=steps)
        np.rint(steps, out=steps)
        np.add(steps, half, out=steps)
        np.clip(steps, low, high, out=steps)

    least, best = np.full(scale.shape, np.inf, np.float32), np.ones(scale.shape, np.float32)
    for factor in _RANGES:
        round_to_steps(unit, np.float32(1) / np.asarray(factor))
        np.multiply(steps, factor, out=error)
        np.subtract(error, unit, out=error)
        found = _dot(error, error, weights)
        better = found < least
        np.copyto(least, found, where=better)
        np.copyto(best, factor, where=better)
    scale, shift = scale * best, np.zeros_like(scale)
    for _ in range(_REFITS):
        round_to_steps(centered - shift[..., None], _reciprocal(scale)[..., None])
        scale, shift = _least_squares(steps, centered, scale, weights, shifted=middle is not None)
    return scale, shift if middle is None else middle + shift


def _least_squares(
    steps: Float32, values: Float32, scale: Float32, weights: Float32 | None, *, shifted: bool
) -> tuple[Float32, Float32]:
    """The scale (as given, where all steps are equal) and shift for which scale * step + shift is nearest to values."""
    step_mean = value_mean = np.zeros_like(scale)
    if shifted:
        ones = np.ones_like(steps)
        total = _dot(ones, ones, weights)
        step_mean = _dot(steps, ones, weights) * _reciprocal(total)
        value_mean = _dot(values, ones, weights) * _reciprocal(total)
        steps = steps - step_mean[..., None]
    squares = _dot(steps, steps, weights)
    scale = np.divide(_dot(steps, values, weights), squares, out=scale.copy(), where=squares > 0)
    return scale, value_mean - scale * step_mean


def _dot(a: Float32, b: Float32, weights: Float32 | None) -> Float32:
    """Sums over groups, [.., group] -> [..]."""
    if weights is None:
        result: Float32 = np.einsum("...k,...k->...", a, b)
    else:
        result = np.einsum("...k,...k,...k->...", a, b, weights)
    return result


def _to_e4m3(values: Float32) -> Float32:
    """The codes (as int8 numbers) of the nearest 8-bit floats, ties to even; 448 is the largest."""
    sizes = np.minimum(np.abs(values), np.float32(448))
    exponent = np.where(sizes < 2.0**-6, -6, np.frexp(sizes)[1] - 1)  # below 2^-6 steps stay as they are
    steps = np.rint(np.ldexp(sizes, 3 - exponent)).astype(np.int32)  # 8 to 16, below 2^-6 0 to 8
    codes = (exponent + 6) * 8 + steps
    signed: Float32 = np.where(np.signbit(values), codes - 128, codes).astype(np.float32)
    return signed


def _code_range(encoding: Encoding) -> tuple[int, int]:
    return (-128, 127) if encoding.bits == 8 else (0, 2**encoding.bits - 1)


def _stored(values: Float32, encoding: Encoding) -> Array:
    return values.astype(np.float32) if encoding.scale == "float32" else _to_float16(values)


def _reciprocal(values: Float32) -> Float32:
    return np.divide(np.float32(1.0), values, out=np.zeros_like(values), where=values != 0)
