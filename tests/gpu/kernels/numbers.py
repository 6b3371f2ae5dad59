"""Arrays in the number types of kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from toolkit.compiler.quantize import to_bfloat16

Array = npt.NDArray[Any]
STORED = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}
EPSILON = {"float32": 2.0**-23, "float16": 2.0**-10, "bfloat16": 2.0**-7}


def store(values: Array, real: str) -> Array:
    """Floats as a kernel reads them."""
    return to_bfloat16(values.astype(np.float32)) if real == "bfloat16" else values.astype(STORED[real])


def value(stored: Array, real: str) -> Array:
    """What stored numbers stand for, in float64."""
    if real == "bfloat16":
        stored = (stored.astype(np.uint32) << 16).view(np.float32)
    return stored.astype(np.float64)


def random(seed: int, *shape: int, real: str = "float32", scale: float = 1.0) -> Array:
    """Normal numbers, stored."""
    return store(np.random.default_rng(seed).standard_normal(shape) * scale, real)


def close(found: Array, expected: Array, real: str, steps: float = 2.0) -> None:
    """Assert that results are within rounding of their type, relative to the largest."""
    assert np.isfinite(found).all()
    error = np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-30)
    assert error <= steps * max(EPSILON[real], 1e-6), error
