"""How a random weight is made from random bytes: which bits stay random, and what the others are."""

from __future__ import annotations

import math

import numpy as np

from ..kernels_templates.packing import block_dtype
from ..runtime.encodings import Array, EncodedArray, Encoding
from ..runtime.plan import RandomFill
from .lowered import Weight
from .lowering import weight_shape

DEVIATION = 0.02
"""Of every random weight that is not a norm's, about."""


def fill_name(weight: Weight) -> str:
    """The name of a weight's fill: weights of one encoding share one, but norms are near 1."""
    encoding = weight.param.recipe.encoding
    assert encoding is not None
    return f"{encoding.name}-near-1" if _is_norm(weight) else encoding.name


def random_fill(weight: Weight) -> RandomFill:
    """The fill of a weight, whatever its layout: all layouts of floats are made of floats, and those of affine codes of
    blocks whose code bytes are all random.
    """
    encoding = weight.param.recipe.encoding
    assert encoding is not None
    if encoding.kind == "affine":
        return _affine(encoding)
    return _NEAR_ONE if _is_norm(weight) else _FLOATS[encoding.kind]


def _is_norm(weight: Weight) -> bool:
    """Vectors named `weight` are norms'."""
    return len(weight_shape(weight)) == 1 and weight.param.value.name.endswith("weight")


def _words(keep: int, value: int, size: int) -> RandomFill:
    return RandomFill(keep.to_bytes(size, "little").hex(), value.to_bytes(size, "little").hex())


_FLOATS = {
    # The sign, the lowest bit of the exponent and the mantissa are random: +-[2^-7, 2^-5).
    "float32": _words(0x80FFFFFF, 120 << 23, 4),
    "bfloat16": _words(0x80FF, 120 << 7, 2),
    "float16": _words(0x87FF, 8 << 10, 2),
}
_NEAR_ONE = _words(0x0007FFFF, 127 << 23, 4)
"""Float32 in [1, 1 + 1/16)."""


def _affine(encoding: Encoding) -> RandomFill:
    """Every code is equally likely, or every odd one where zero is between two odd codes; scales and minima are
    constants that center the values.
    """
    odd = encoding.zero > 0
    used: Array = np.arange(odd, 1 << encoding.bits, 1 + odd, dtype=np.uint8)
    if encoding.levels == "e4m3":
        used = np.concatenate((np.arange(0x30, 0x40, dtype=np.uint8), np.arange(0xB0, 0xC0, dtype=np.uint8)))
    if encoding.bits == 8:
        used = used.view(np.int8)
    codes = np.resize(used, math.lcm(len(used), encoding.unit))
    once = np.ones(len(codes) // encoding.unit, np.float32)
    ones = np.ones(len(codes) // encoding.group, np.int8) if encoding.block else None
    units = EncodedArray(encoding, codes, once, factors=ones).decode()
    scale = DEVIATION / float(units.std())
    keep, value = np.zeros(1, block_dtype(encoding)), np.zeros(1, block_dtype(encoding))
    value["scale"] = scale
    if encoding.has_minimum:
        value["minimum"] = -scale * float(units.mean())
    pieces_keep, pieces_value = keep["pieces"], value["pieces"]
    for name in pieces_keep.dtype.names or ():
        if name in ("codes", "high"):
            pieces_keep[name] = 0xFFFFFFFF
        else:
            pieces_value[name] = 1  # factors
    if encoding.levels == "e4m3":  # of exponents 6 and 7
        pieces_keep["codes"], pieces_value["codes"] = 0x8F8F8F8F, 0x30303030
    if odd:  # the lowest bit of every code is set
        pieces_value["codes"] = 0x55555555 if encoding.bits < 4 else 0x11111111
        pieces_keep["codes"] = ~pieces_value["codes"]
    return RandomFill(keep.tobytes().hex(), value.tobytes().hex())
