"""GPTQ: rounding a matrix so that its products, not its numbers, stay close.

Columns are rounded one after another, and each one's error is made up for by the columns that are not rounded yet, as
far as the inputs of the layer are correlated. Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training
Quantization for Generative Pre-trained Transformers", 2022 (arXiv 2210.17323). Shrinking a covariance estimate
towards its diagonal: Ledoit, Wolf, "A well-conditioned estimator for large-dimensional covariance matrices", 2004.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ...runtime.encodings import EncodedArray, Encoding
from ..quantize import Float32, encode, nearest

Float64 = npt.NDArray[np.float64]

SHRINKAGE = 0.5
"""Share by which correlations count less than in the text: what the model will read has others, and columns that make
up for each other too closely add errors there.
"""
DAMPING = 0.01
"""Added to the diagonal of the Hessian, as a share of its mean, so that it can be inverted."""
_BLOCK = 128
"""Columns whose errors reach the columns behind them together."""
_SMALL = 64
"""Triangles up to this size are inverted at once."""


@dataclass(frozen=True)
class Compensation:
    """How the error of each column of a weight [N, K] is best made up for by others."""

    order: npt.NDArray[np.intp]
    """[K]: which column is rounded when. Those that meet the largest inputs come first: most are left to help them."""
    spread: Float32
    """[K, K], in this order: upper triangular U with UᵀU the inverse of the Hessian. Row j is for column j."""


def compensation(hessian: Float64, shrinkage: float = SHRINKAGE) -> Compensation:
    """For a layer whose inputs X [T, K] have the Hessian XᵀX, of which all but the diagonal is shrunk."""
    diagonal = hessian.diagonal()
    order = np.argsort(-diagonal, kind="stable")
    shrunk: Float64 = (1 - shrinkage) * hessian[np.ix_(order, order)]
    np.fill_diagonal(shrunk, diagonal[order] + max(DAMPING * diagonal.mean(), 1e-12))
    lower: Float64 = np.linalg.cholesky(shrunk[::-1, ::-1]).astype(np.float64)
    return Compensation(order, _inverse_of_lower(lower)[::-1, ::-1].astype(np.float32))


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


def gptq(weights: Float32, how: Compensation, encoding: Encoding, importance: Float32) -> EncodedArray:
    """Weights [N, K] in an affine encoding.

    Scales are fitted first, as if nothing were made up for; `importance` [K] weighs the errors in that. So columns of a
    group can be rounded at any time. Raises ValueError if a scale does not fit.
    """
    fitted = encode(weights, encoding, importance)
    assert fitted.scale is not None
    scale = fitted.scale.T.astype(np.float32)
    minimum = None if fitted.minimum is None else fitted.minimum.T.astype(np.float32)
    columns, codes = weights.shape[1], np.empty_like(fitted.data.T)
    left = weights.T[how.order]  # what is still to be rounded, a column each row
    for start in range(0, columns, _BLOCK):
        stop = min(start + _BLOCK, columns)
        errors = np.empty((stop - start, len(weights)), np.float32)
        for turn in range(start, stop):
            column = how.order[turn]
            group = column // encoding.group
            low = None if minimum is None else minimum[group]
            code = nearest(left[turn][:, None], scale[group], low, encoding)[:, 0]
            codes[column] = code
            value = (code - np.float32(encoding.zero)) * scale[group]
            if low is not None:
                value += low
            error = errors[turn - start] = (left[turn] - value) / how.spread[turn, turn]
            left[turn + 1 : stop] -= how.spread[turn, turn + 1 : stop, None] * error
        left[stop:] -= how.spread[start:stop, stop:].T @ errors
    return replace(fitted, data=np.ascontiguousarray(codes.T))
