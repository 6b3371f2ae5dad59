"""GGUF block types, unpacked exactly: every code, scale and minimum as the file means it, and no rounding.

A row of a quantized tensor is a sequence of blocks of `size` values in `bytes` bytes. Each type below turns the blocks
of some rows, uint8 [n, bytes], into codes [n, size], scales and minima [n, size / unit], and factors of the scales and
of the minima [n, size / group].
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    IQ4_NL,
    IQ4_XS,
    Q2_K,
    Q3_K,
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
Parts = tuple[Array, *tuple[Array | None, ...]]
"""Codes, scales, minima, factors, factors of minima: as many of them as the type has."""

TERNARY = Encoding("affine", bits=3, group=128, zero=4)
MXFP4 = Encoding("affine", bits=4, group=32, scale="float32", levels="e2m1")
NVFP4 = Encoding("affine", bits=4, group=16, levels="e2m1")
WIDE8 = Encoding("affine", bits=8, group=32, scale="float32")
WIDE8_16 = Encoding("affine", bits=8, group=16, scale="float32")


@dataclass(frozen=True)
class BlockType:
    """A GGUF tensor type. Floats have no `unpack`: their bytes are the values."""

    name: str
    encoding: Encoding
    size: int
    """Values in a block."""
    bytes: int
    unpack: Callable[[Bytes], Parts] | None = None

    @property
    def grows(self) -> bool:
        """Whether the codes take half as much again as the whole block in the file, or more."""
        return self.encoding.bits * self.size >= 1.5 * 8 * self.bytes

    def decode_rows(self, rows: Bytes) -> EncodedArray:
        """Stored rows, uint8 [n, bytes a row], as an array of shape [n, K]."""
        if self.unpack is None:
            dtype = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}[self.encoding.kind]
            return EncodedArray(self.encoding, np.ascontiguousarray(rows).view(dtype))
        blocks = np.ascontiguousarray(rows).reshape(-1, self.bytes)
        with np.errstate(invalid="ignore", over="ignore"):  # a damaged scale stays NaN, and is refused when packed
            parts = self.unpack(blocks)

        def by_row(part: Array) -> Array:
            return part.reshape(len(rows), rows.shape[1] // self.bytes * part.shape[1])

        codes, *numbers = parts
        return EncodedArray(self.encoding, by_row(codes), *(None if part is None else by_row(part) for part in numbers))


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


def _k_scales(blocks: Bytes) -> tuple[Array, Array, Array, Array]:
    """The scales and minima of a Q4_K or Q5_K block: float16 d and dmin, then 8 + 8 six-bit factors in 12 bytes."""
    low_scale, low_min, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scale = np.concatenate([low_scale & 63, (high & 0x0F) | ((low_scale >> 6) << 4)], axis=1)
    minimum = np.concatenate([low_min & 63, (high >> 4) | ((low_min >> 6) << 4)], axis=1)
    return _half(blocks, 0), -_half(blocks, 2), scale.view(np.int8), minimum


def _q4_k(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 16:], 32), *_k_scales(blocks)


def _q5_k(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 48:], 32) | (_planes(blocks[:, 16:48], 32, 1) << 4), *_k_scales(blocks)


def _q6_k(blocks: Bytes) -> Parts:
    codes = _nibbles(blocks[:, :128], 64) | (_planes(blocks[:, 128:192], 32, 2) << 4)
    return codes, _half(blocks, 208), None, np.ascontiguousarray(blocks[:, 192:208]).view(np.int8)


def _q2_k(blocks: Bytes) -> Parts:
    factors = blocks[:, :16]
    codes = _planes(blocks[:, 16:80], 32, 2)
    return codes, _half(blocks, 80), -_half(blocks, 82), (factors & 0x0F).view(np.int8), factors >> 4


def _q3_k(blocks: Bytes) -> Parts:
    codes = _planes(blocks[:, 32:96], 32, 2) | (_planes(blocks[:, :32], 32, 1) << 2)
    factors = _nibbles(blocks[:, 96:104], 8) | (_planes(blocks[:, 104:108], 4, 2) << 4)
    return codes, _half(blocks, 108), None, factors.view(np.int8) - np.int8(32)


def _iq4_nl(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 2:], 16), _half(blocks, 0)


def _iq4_xs(blocks: Bytes) -> Parts:
    high = np.ascontiguousarray(blocks[:, 2:4]).view("<u2") >> np.arange(0, 16, 2, dtype=np.uint16)
    low = (blocks[:, 4:8, None] >> np.array([0, 4], np.uint8)) & 0x0F
    factors = (low.reshape(len(blocks), 8) | ((high & 3) << 4).astype(np.uint8)).view(np.int8) - np.int8(32)
    return _nibbles(blocks[:, 8:], 16), _half(blocks, 0), None, factors


# --- codebooks: each code of the file names a vector of 4 or 8 levels -------------------------------------------------

_SIGNS = np.array([index | (index.bit_count() & 1) << 7 for index in range(128)], np.uint8)
"""The 8 signs that 7 bits stand for: their number is even."""


@cache
def _codebook(name: str) -> npt.NDArray[np.int8]:
    """The vectors of an IQ type, int8 [codes, 4 or 8], from the gguf package."""
    from gguf import quants

    kind = getattr(quants, name)
    kind.init_grid()
    vectors: npt.NDArray[np.int8] = kind.grid[0, 0].astype(np.int8)
    return vectors


def _words(data: Bytes, dtype: str) -> npt.NDArray[np.unsignedinteger]:
    """Little-endian integers, [n, bytes / width]."""
    return np.ascontiguousarray(data).view(dtype)


def _fields(words: npt.NDArray[np.unsignedinteger], width: int, count: int) -> npt.NDArray[np.unsignedinteger]:
    """`count` fields of `width` bits of each word, least significant first: [n, words] -> [n, words * count]."""
    shifts = np.arange(0, width * count, width, dtype=words.dtype)
    fields: npt.NDArray[np.unsignedinteger] = (words[:, :, None] >> shifts) & words.dtype.type((1 << width) - 1)
    return fields.reshape(len(words), -1)


def _signed(vectors: npt.NDArray[np.int8], signs: Bytes) -> npt.NDArray[np.int8]:
    """Vectors [n, vectors, width] with the signs whose bits are set turned: [n, values]."""
    values = vectors.reshape(len(vectors), -1)
    return np.where(_bits(np.ascontiguousarray(signs)), -values, values)


def _scaled(blocks: Bytes, factors: Array) -> npt.NDArray[np.float32]:
    """Factors [n, groups] times the float16 at the start of each block."""
    return _half(blocks, 0).astype(np.float32) * factors.astype(np.float32)


def _iq2_xxs(blocks: Bytes) -> Parts:
    pairs = _words(blocks[:, 2:], "<u4").reshape(-1, 8, 2)
    index, word = _words(pairs[:, :, 0], "u1"), pairs[:, :, 1]
    scale = _scaled(blocks, np.float32(0.5) + (word >> 28).astype(np.float32)) * np.float32(0.25)
    return _signed(_codebook("IQ2_XXS")[index], _SIGNS[_fields(word, 7, 4)]), scale, None


def _iq2_xs(blocks: Bytes) -> Parts:
    code = _words(blocks[:, 2:66], "<u2")
    scale = _scaled(blocks, np.float32(0.5) + _fields(blocks[:, 66:], 4, 2).astype(np.float32)) * np.float32(0.25)
    return _signed(_codebook("IQ2_XS")[code & 511], _SIGNS[code >> 9]), scale, None


def _iq2_s(blocks: Bytes) -> Parts:
    code = blocks[:, 2:34] | (_fields(blocks[:, 66:74], 2, 4).astype(np.uint16) << 8)
    scale = _scaled(blocks, np.float32(0.5) + _fields(blocks[:, 74:], 4, 2).astype(np.float32)) * np.float32(0.25)
    return _signed(_codebook("IQ2_S")[code], blocks[:, 34:66]), scale, None


def _iq3_xxs(blocks: Bytes) -> Parts:
    word = _words(blocks[:, 66:], "<u4")
    scale = _scaled(blocks, np.float32(0.5) + (word >> 28).astype(np.float32)) * np.float32(0.5)
    return _signed(_codebook("IQ3_XXS")[blocks[:, 2:66]], _SIGNS[_fields(word, 7, 4)]), scale, None


def _iq3_s(blocks: Bytes) -> Parts:
    code = blocks[:, 2:66] | (_bits(blocks[:, 66:74]).astype(np.uint16) << 8)
    scale = _scaled(blocks, 1 + 2 * _fields(blocks[:, 106:], 4, 2))
    return _signed(_codebook("IQ3_S")[code], blocks[:, 74:106]), scale, None


def _shifted(vectors: npt.NDArray[np.int8], down: npt.NDArray[np.bool_]) -> npt.NDArray[np.int8]:
    """Vectors of -1, 0 and 1, an eighth less or more each, in eighths: [n, values]."""
    eighths = 8 * vectors + np.where(down, np.int8(-1), np.int8(1))[:, :, None]
    return eighths.reshape(len(vectors), -1)


def _iq1_s(blocks: Bytes) -> Parts:
    high = _words(blocks[:, 34:], "<u2")
    code = blocks[:, 2:34] | (_fields(high, 3, 4) << 8)
    scale = _scaled(blocks, 2 * ((high >> 12) & 7) + 1) / np.float32(8)
    return _shifted(_codebook("IQ1_S")[code], np.repeat(high >= 0x8000, 4, axis=1)), scale, None


def _iq1_m(blocks: Bytes) -> Parts:
    high, word = _fields(blocks[:, 32:48], 4, 2), _words(blocks[:, 48:], "<u2")
    code = blocks[:, :32] | ((high & 7).astype(np.uint16) << 8)
    d = (word >> 12 << np.array([0, 4, 8, 12], np.uint16)).sum(axis=1, dtype=np.uint16)[:, None].view("<f2")
    scale = d.astype(np.float32) * (2 * _fields(word, 3, 4) + 1).astype(np.float32) / np.float32(8)
    return _shifted(_codebook("IQ1_M")[code], high >= 8), scale, None


# --- ternary and FP4 --------------------------------------------------------------------------------------------------


def _ternary(codes: Bytes, blocks: Bytes) -> Parts:
    """Codes 0, 1, 2 mean -1, 0, 1; the block's scale is its last float16."""
    return codes + np.uint8(3), np.repeat(_half(blocks, blocks.shape[1] - 2), 2, axis=1), None


def _tq1_0(blocks: Bytes) -> Parts:
    digits = [_ternary_digits(blocks[:, :32], 5), _ternary_digits(blocks[:, 32:48], 5)]
    return _ternary(np.concatenate([*digits, _ternary_digits(blocks[:, 48:52], 4)], axis=1), blocks)


def _ternary_digits(data: Bytes, count: int) -> Bytes:
    """The first digit of all bytes, then the next, ...: a byte is a base-3 fraction of 256."""
    powers = np.array([1, 3, 9, 27, 81], np.uint8)[:count, None]
    return ((data[:, None, :] * powers).astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(len(data), -1)


def _tq2_0(blocks: Bytes) -> Parts:
    return _ternary(_planes(blocks[:, :64], 32, 2), blocks)


def _mxfp4(blocks: Bytes) -> Parts:
    exponent = blocks[:, :1].astype(np.uint32)
    half = np.where(exponent < 2, np.uint32(0x00200000) << exponent, (exponent - 1) << 23)  # 2 ** (exponent - 128)
    return _nibbles(blocks[:, 1:], 16), half.view(np.float32)


def _nvfp4(blocks: Bytes) -> Parts:
    return _nibbles(blocks[:, 4:], 8), (_unsigned_e4m3()[blocks[:, :4]] * np.float32(0.5)).astype(np.float16)


@cache
def _unsigned_e4m3() -> npt.NDArray[np.float32]:
    """The numbers of float8 E4M3 without a sign; its NaN is read as 0."""
    code = np.arange(256)
    exponent, mantissa = (code >> 3) & 15, (code & 7) / 8
    values = np.where(exponent == 0, mantissa * 2.0**-6, (1 + mantissa) * 2.0 ** (exponent - 7))
    values[127] = 0.0
    return values.astype(np.float32)


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
    16: BlockType("IQ2_XXS", WIDE8, 256, 66, _iq2_xxs),
    17: BlockType("IQ2_XS", WIDE8_16, 256, 74, _iq2_xs),
    18: BlockType("IQ3_XXS", WIDE8, 256, 98, _iq3_xxs),
    19: BlockType("IQ1_S", WIDE8, 256, 50, _iq1_s),
    20: BlockType("IQ4_NL", IQ4_NL, 32, 18, _iq4_nl),
    21: BlockType("IQ3_S", WIDE8, 256, 110, _iq3_s),
    22: BlockType("IQ2_S", WIDE8_16, 256, 82, _iq2_s),
    23: BlockType("IQ4_XS", IQ4_XS, 256, 136, _iq4_xs),
    29: BlockType("IQ1_M", WIDE8_16, 256, 56, _iq1_m),
    30: BlockType("BF16", BFLOAT16, 1, 2),
    34: BlockType("TQ1_0", TERNARY, 256, 54, _tq1_0),
    35: BlockType("TQ2_0", TERNARY, 256, 66, _tq2_0),
    39: BlockType("MXFP4", MXFP4, 32, 17, _mxfp4),
    40: BlockType("NVFP4", NVFP4, 64, 36, _nvfp4),
}
"""Block types by their number in the file."""
