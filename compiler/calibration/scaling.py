"""Activation-aware scaling: which channels of a layer's input are worth finer steps of its weight.

The columns that meet large activations are multiplied by s before the weight is rounded, and the activation is divided
by s, so that their rounding error counts less. s is a power of the channel's mean magnitude; which one is found by
trying. Lin et al.: "AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration", 2023 (arXiv
2306.00978).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from ...runtime.encodings import Encoding
from ..quantize import Float32, encode
from .fold import Index

Float64 = npt.NDArray[np.float64]

POWERS = tuple(float(power) for power in np.linspace(0.0, 0.9, 10))
_SMALLEST = 1e-4
"""A channel's magnitude counts as at least this share of the largest."""


def candidates(magnitude: Float32, rows: Index) -> list[Float32]:
    """A scale [K] for each of `POWERS`; channels with equal `rows` [K] have equal scales."""
    shared = (np.bincount(rows, magnitude) / np.maximum(np.bincount(rows), 1))[rows]
    floored = np.maximum(shared, _SMALLEST * shared.max(initial=1e-30))
    logs = np.log(floored)
    centered = logs - logs.mean()
    return [np.exp(power * centered).astype(np.float32) for power in POWERS]


def losses(scales: Sequence[Float32], weights: Iterable[Float32], importance: Float32, encoding: Encoding) -> Float64:
    """For each scale the squared error that rounding causes in a layer, as a share of its products' square.

    `weights` are the layer's rows [n, K] in pieces. Channels count by their mean square, `importance` [K], as if they
    were not correlated.
    """
    errors, power = np.zeros(len(scales)), 0.0
    for rows in weights:
        power += float(np.square(rows).sum(axis=0) @ importance)
        for index, scale in enumerate(scales):
            rounded = encode(rows * scale, encoding, search=False).decode() / scale
            errors[index] += float(np.square(rounded - rows).sum(axis=0) @ importance)
    return errors / max(power, 1e-30)
