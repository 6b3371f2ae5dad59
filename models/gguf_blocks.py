"""GGUF block types, unpacked exactly: every code, scale and minimum as the file means it, and no rounding.

A row of a quantized tensor is a sequence of blocks of `size` values in `bytes` bytes. Each type below turns the blocks
of some rows, uint8 [n, bytes], into codes [n, size], scales [n, size / group] and minima of the same shape.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    Q4_0,
    Q4_1,
    Q4_K,
    Q5_0,
    Q5_1,
    Q5_K,
    Q6_K,
    Q8_0,
    Array,
    EncodedArray,
    Encoding,
)

Bytes = npt.NDArray[np.uint8]
Parts = tuple[Array, Array, Array | None]
"""Codes, scales, minima."""

Q2_K = Encoding("affine", bits=4, group=16, scale="float32", has_minimum=True)
Q3_K = Encoding("affine", bits=4, group=16, zero=4, scale="float32")
IQ4_XS = Encoding("affine", bits=8, group=32, scale="float32")

# The 16 levels of the IQ4 types: a fixed non-linear grid, so their exact affine form has 8-bit codes.
_IQ4_LEVELS = np.array([-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113], np.int8)


@dataclass(frozen=True)
class BlockType:
    """A GGUF tensor type. Floats have no `unpack`: their bytes are the values."""

    name: str
    encoding: Encoding
    size: int
    """Values in a block."""
    bytes: int
    unpack: Callable[[Bytes], Parts] | None = None

    def decode_rows(self, rows: Bytes) -> EncodedArray:
        """Stored rows, uint8 [n, bytes a row], as an array of shape [n, K]."""
        if self.unpack is None:
            dtype = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[self.encoding.kind]
            return EncodedArray(self.encoding, np.ascontiguousarray(rows).view(dtype))
        blocks = np.ascontiguousarray(rows).reshape(-1, self.bytes)
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale stays NaN, and is refused when packed
            parts = self.unpack(blocks)
        codes, *scales = parts
        columns = rows.shape[1] // self.bytes * self.size
        groups = (len(rows), columns // self.encoding.group)
        scale, minimum = (None if part is None else part.reshape(groups) for part in scales)
        return EncodedArray(self.encoding, codes.reshape(len(rows), columns), scale, minimum)


def _half(blocks: Bytes, start: int) -> npt.NDArray[np.float16]:
    """The float16 at byte `start` of each block, [n, 1]."""
    return np.ascontiguousarray(blocks[:, start : start + 2]).view("<f2")


def _nibbles(data: Bytes, run: int) -> Bytes:
    """Low nibbles of each run of bytes, then its high nibbles: [n, bytes] -> [n, 2 * bytes]."""
    runs = data.reshape(len(data), -1, 1, run)
    return (np.concatenate([runs & 0x0F, runs >> 4], axis=2)).reshape(len(data), -1)


def _bits(data: Bytes) -> Bytes:
    """Single bits, least significant first: [n, bytes] -> [n, 8 * bytes]."""
    return np.unpackbits(data, axis=1, bitorder="little")


def _planes(data: Bytes, run: int, width: int) -> Bytes:
    """Bit planes of each run of bytes: the lowest `width` bits of all its bytes, then the next, ..."""
    shifts = np.arange(0, 8, width, dtype=np.uint8)[:, None]
    runs = data.reshape(len(data), -1, 1, run)
    return ((runs >> shifts) & np.uint8((1 << width) - 1)).reshape(len(data), -1)


def _q4_0(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 2:], 16), _half(blocks, 0), None


def _q4_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:], 16), _half(blocks, 0), _half(blocks, 2)


def _q5_0(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 6:], 16) | (_bits(blocks[:, 2:6]) << 4), _half(blocks, 0), None


def _q5_1(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 8:], 16) | (_bits(blocks[:, 4:8]) << 4), _half(blocks, 0), _half(blocks, 2)


def _q8_0(blocks: Bytes) -> Parts:
    return np.ascontiguousarray(blocks[:, 2:]).view(np.int8), _half(blocks, 0), None


def _k_scales(blocks: Bytes) -> tuple[Array, Array]:
    """The 8 scales and minima of a Q4_K or Q5_K block: float16 d and dmin, then 8 + 8 six-bit factors in 12 bytes."""
    d, dmin = _half(blocks, 0).astype(np.float32), _half(blocks, 2).astype(np.float32)
    low_scale, low_min, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low_scale & 63, (high & 0x0F) | ((low_scale >> 6) << 4)], axis=1)
    minimum = np.concatenate([low_min & 63, (high >> 4) | ((low_min >> 6) << 4)], axis=1)
    return d * scale.astype(np.float32), -(dmin * minimum.astype(np.float32))


def _q4_k(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 48:], 32) | (_planes(blocks[:, 16:48], 32, 1) << 4), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[:, :128], 64) | (_planes(blocks[:, 128:192], 32, 2) << 4)
    factors = np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)
    return codes, _half(blocks, 208).astype(np.float32) * factors.astype(np.float32), None


def _q2_k(blocks: Bytes) -> Parts:
    factors, d, dmin = blocks[:, :16], _half(blocks, 80).astype(np.float32), _half(blocks, 82).astype(np.float32)
    scale, minimum = d * (factors & 0x0F).astype(np.float32), -(dmin * (factors >> 4).astype(np.float32))
    return _planes(blocks[:, 16:80], 32, 2), scale, minimum


def _q3_k(blocks: Bytes) -> Parts:
    codes = _planes(blocks[:, 32:96], 32, 2) | (_planes(blocks[:, :32], 32, 1) << 2)
    factors = _nibbles(blocks[:, 96:104], 8) | (_planes(blocks[:, 104:108], 4, 2) << 4)
    scale = _half(blocks, 108).astype(np.float32) * (factors.astype(np.float32) - np.float32(32))
    return codes, scale, None


def _iq4_nl(blocks: Bytes) -> Parts:
    return _IQ4_LEVELS[_nibbles(blocks[:, 2:], 16)], _half(blocks, 0), None


def _iq4_xs(blocks: Bytes) -> Parts:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)) & 0x0F
    factors = low.reshape(len(blocks), 8).astype(np.float32) + ((high & 3) << 4).astype(np.float32) - np.float32(32)
    return _IQ4_LEVELS[_nibbles(blocks[:, 8:], 16)], _half(blocks, 0).astype(np.float32) * factors, None


BLOCKS: dict[int, BlockType] = {
    0: BlockType("F32", FLOAT32, 1, 4),
    1: BlockType("F16", FLOAT16, 1, 2),
    2: BlockType("Q4_0", Q4_0, 32, 18, _q4_0),
    3: BlockType("Q4_1", Q4_1, 32, 20, _q4_1),
    6: BlockType("Q5_0", Q5_0, 32, 22, _q5_0),
    7: BlockType("Q5_1", Q5_1, 32, 24, _q5_1),
    8: BlockType("Q8_0", Q8_0, 32, 34, _q8_0),
    10: BlockType("Q2_K", Q2_K, 256, 84, _q2_k),
    11: BlockType("Q3_K", Q3_K, 256, 110, _q3_k),
    12: BlockType("Q4_K", Q4_K, 256, 144, _q4_k),
    13: BlockType("Q5_K", Q5_K, 256, 176, _q5_k),
    14: BlockType("Q6_K", Q6_K, 256, 210, _q6_k),
    20: BlockType("IQ4_NL", Q8_0, 32, 18, _iq4_nl),
    23: BlockType("IQ4_XS", IQ4_XS, 256, 136, _iq4_xs),
    30: BlockType("BF16", BFLOAT16, 1, 2),
}
"""Block types by their number in the file."""
