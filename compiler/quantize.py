"""Number conversion: float32 values into any stored encoding, by rounding to nearest or by least squared error."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import EncodedArray, Encoding

Float32 = npt.NDArray[np.float32]

_SHRINKS = tuple(np.float32(factor) for factor in np.linspace(1.0, 0.7, 16))
"""Range factors tried for narrow codes: clipping a group's outlier often lowers its total error."""
_SEARCHED_BITS = 6
"""Codes up to this width are worth the search; 8-bit rounding error is far below the model's noise."""


def encode(values: Float32, encoding: Encoding) -> EncodedArray:
    """Float32 values of shape [..., K] in the encoding; NaN and infinity must have been refused before.

    Affine groups choose their range by least squared error (8-bit codes: by the largest magnitude). Raises ValueError
    if K is not a multiple of the group or a value does not fit the encoding's floats.
    """
    if encoding.kind == "float32":
        return EncodedArray(encoding, np.ascontiguousarray(values, dtype=np.float32))
    if encoding.kind == "float16":
        return EncodedArray(encoding, _to_float16(values))
    if encoding.kind == "bfloat16":
        return EncodedArray(encoding, to_bfloat16(values))
    return _to_affine(values, encoding)


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


def _to_affine(values: Float32, encoding: Encoding) -> EncodedArray:
    columns = values.shape[-1]
    if columns % encoding.group:
        raise ValueError(f"{columns} columns are not a multiple of the group of {encoding.group}")
    groups = values.reshape(-1, encoding.group).astype(np.float32)
    codes, scale, minimum = _best(groups, encoding)
    lead = values.shape[:-1]
    return EncodedArray(
        encoding,
        codes.astype(np.int8 if encoding.bits == 8 else np.uint8).reshape(values.shape),
        scale.reshape(*lead, -1),
        None if minimum is None else minimum.reshape(*lead, -1),
    )


_Groups = tuple[Float32, npt.NDArray[np.generic], npt.NDArray[np.generic] | None]
"""Codes [n, group], scales [n], minima [n] if any."""


def _best(groups: Float32, encoding: Encoding) -> _Groups:
    """The candidate range with the least squared error, group by group."""
    shrinks = _SHRINKS if encoding.bits <= _SEARCHED_BITS else _SHRINKS[:1]
    codes, scale, minimum = _rounded(groups, encoding, shrinks[0])
    if len(shrinks) == 1:
        return codes, scale, minimum
    least = _error(groups, codes, scale, minimum, encoding)
    for shrink in shrinks[1:]:
        tried = _rounded(groups, encoding, shrink)
        error = _error(groups, *tried, encoding)
        better = error < least
        least = np.where(better, error, least)
        codes = np.where(better[:, None], tried[0], codes)
        scale = np.where(better, tried[1], scale)
        if minimum is not None and tried[2] is not None:
            minimum = np.where(better, tried[2], minimum)
    return codes, scale, minimum


def _rounded(groups: Float32, encoding: Encoding, shrink: np.float32) -> _Groups:
    """Groups rounded to codes over their range times `shrink`.

    The scale is rounded to its stored dtype first, so that codes are the nearest to what a decoder will compute.
    """
    low, high = _code_range(encoding)
    if encoding.has_minimum:
        least, most = groups.min(axis=1), groups.max(axis=1)
        span = (most - least) * shrink
        scale = _stored(span / np.float32(high - low), encoding)
        minimum = _stored((least + most - span) * np.float32(0.5), encoding)
        exact = (groups - minimum.astype(np.float32)[:, None]) * _reciprocal(scale)[:, None]
        return np.clip(np.rint(exact + encoding.zero), low, high), scale, minimum
    # The code range is one wider below zero: give that side to the value of the largest magnitude.
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=1)[:, None], axis=1)[:, 0]
    deepest = np.float32(low - encoding.zero) if encoding.bits < 8 else np.float32(-high)
    scale = _stored(extreme * shrink / deepest, encoding)
    if encoding.bits == 8:
        scale = np.abs(scale)
    return np.clip(np.rint(groups * _reciprocal(scale)[:, None] + encoding.zero), low, high), scale, None


def _code_range(encoding: Encoding) -> tuple[int, int]:
    return (-128, 127) if encoding.bits == 8 else (0, 2**encoding.bits - 1)


def _stored(values: Float32, encoding: Encoding) -> npt.NDArray[np.generic]:
    if encoding.scale == "float32":
        return values.astype(np.float32)
    return _to_float16(values)


def _reciprocal(scale: npt.NDArray[np.generic]) -> Float32:
    wide = scale.astype(np.float32)
    return np.divide(np.float32(1.0), wide, out=np.zeros_like(wide), where=wide != 0)


def _error(
    groups: Float32,
    codes: Float32,
    scale: npt.NDArray[np.generic],
    minimum: npt.NDArray[np.generic] | None,
    encoding: Encoding,
) -> Float32:
    decoded = (codes - np.float32(encoding.zero)) * scale.astype(np.float32)[:, None]
    if minimum is not None:
        decoded = decoded + minimum.astype(np.float32)[:, None]
    error: Float32 = np.square(decoded - groups).sum(axis=1)
    return error
