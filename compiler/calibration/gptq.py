"""GPTQ: rounding a matrix so that its products, not its numbers, stay close.

Columns are rounded one after another, and each one's error is made up for by the columns that are not rounded yet, as
far as the inputs of the layer are correlated. Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training
Quantization for Generative Pre-trained Transformers", 2022 (arXiv 2210.17323).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ...runtime.encodings import EncodedArray, Encoding
from ..quantize import Float32, fit, nearest

Float64 = npt.NDArray[np.float64]

DAMPING = 0.01
"""Added to the diagonal of the Hessian, as a share of its mean, so that it can be inverted."""
_BLOCK = 128
"""Columns whose errors reach the columns behind them together."""
_SMALL = 64
"""Triangles up to this size are inverted at once."""


def compensation(hessian: Float64) -> Float32:
    """The upper triangular U [K, K] with UᵀU the inverse of the damped Hessian XᵀX of a layer's inputs X [T, K].

    Row j says how the error of column j is best spread over the columns behind it.
    """
    damped = hessian + np.eye(len(hessian)) * max(DAMPING * hessian.diagonal().mean(), 1e-12)
    lower = np.linalg.cholesky(damped[::-1, ::-1])
    result: Float32 = _inverse_of_lower(lower)[::-1, ::-1].astype(np.float32)
    return result


def _inverse_of_lower(lower: Float64) -> Float64:
    """The inverse of a lower triangular matrix, by halves."""
    half = len(lower) // 2
    if len(lower) <= _SMALL:
        whole: Float64 = np.tril(np.linalg.inv(lower))
        return whole
    first, second = _inverse_of_lower(lower[:half, :half]), _inverse_of_lower(lower[half:, half:])
    inverse = np.zeros_like(lower)
    inverse[:half, :half], inverse[half:, half:] = first, second
    inverse[half:, :half] = -second @ lower[half:, :half] @ first
    return inverse


def gptq(weights: Float32, spread: Float32, encoding: Encoding, importance: Float32) -> EncodedArray:
    """Weights [N, K] in an affine encoding; `spread` is the layer's `compensation`.

    Each group's scale is fitted when its turn comes, to its columns as they are then, in which `importance` [K] weighs
    the errors. Raises ValueError if a scale does not fit.
    """
    rows, columns = weights.shape
    group = encoding.group
    left = np.ascontiguousarray(weights.T)  # what is still to be rounded, a column each row
    codes = np.empty((columns, rows), np.int8 if encoding.bits == 8 else np.uint8)
    scale = np.empty((columns // group, rows), encoding.scale)
    minimum = np.empty_like(scale) if encoding.has_minimum else None
    step = max(_BLOCK, group)
    for start in range(0, columns, step):
        stop = min(start + step, columns)
        errors = np.empty((stop - start, rows), np.float32)
        for column in range(start, stop):
            at = column // group
            if column % group == 0:
                turn = slice(column, column + group)
                scale[at], found = fit(np.ascontiguousarray(left[turn].T), encoding, importance[turn])
                if minimum is not None and found is not None:
                    minimum[at] = found
            code = nearest(left[column][:, None], scale[at], None if minimum is None else minimum[at], encoding)[:, 0]
            codes[column] = code
            value = (code - np.float32(encoding.zero)) * scale[at].astype(np.float32)
            if minimum is not None:
                value += minimum[at].astype(np.float32)
            error = errors[column - start] = (left[column] - value) / spread[column, column]
            left[column + 1 : stop] -= spread[column, column + 1 : stop, None] * error
        left[stop:] -= spread[start:stop, stop:].T @ errors
    return EncodedArray(
        encoding,
        np.ascontiguousarray(codes.T),
        np.ascontiguousarray(scale.T),
        None if minimum is None else np.ascontiguousarray(minimum.T),
    )
