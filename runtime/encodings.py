"""Number formats of stored tensors, shared by the checkpoint readers, the quantizer, the packers and the kernels.

A weight is either plain floats or *group affine* integers. Group affine covers int8, int4 and every GGUF type that we
keep exactly: along the last axis each group of `group` columns shares a scale and, for some, a minimum:

    value = scale * (code - zero) + minimum          (minimum is 0 where `has_minimum` is False)

Q4_0 is (bits 4, group 32, zero 8); Q4_1 adds a minimum; Q5_0 is (5, 32, 16); Q8_0 is (8, 32, 0) with signed codes.

A *block* of several groups may share one scale and minimum, which each group multiplies by small integers of its own
(its *factors*): the K types of GGUF. Q4_K is (4, 32, 0) in blocks of 256, Q6_K (6, 16, 32).

The codes of a few types are numbers of fixed `levels`, which then take the place of `code` in the formula: so are 8-bit
floats (E4M3), whose bits are the code.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

import msgspec

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt

    Array: TypeAlias = npt.NDArray[np.generic]
else:
    Array = (
        Any  # numpy is loaded when a value is decoded: reading a plan, which starting a server waits for, needs none
    )

FloatName = Literal["float32", "float16", "bfloat16"]


class Encoding(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a tensor's numbers are stored. `kind` is a float dtype name or "affine"."""

    kind: Literal["float32", "float16", "bfloat16", "affine"]
    bits: int = 0
    """Affine only: width of a code, 2 to 6 or 8."""
    group: int = 0
    """Affine only: columns that share a scale, 16 or a multiple of 32."""
    zero: int = 0
    """Affine only: the code that means 0 before the minimum is added. 8-bit codes are signed and have zero 0."""
    scale: FloatName = "float16"
    """Affine only: dtype of scales and minima."""
    has_minimum: bool = False
    block: int = 0
    """Affine only: columns that share a scale and minimum, with factors for each group; 0 is one group, without."""
    levels: Literal["", "iq4", "e2m1", "e4m3"] = ""
    """Affine only: the `LEVELS`, or 8-bit floats, that codes number; "" is the codes themselves."""

    @property
    def name(self) -> str:
        """A short name fit for file names and reports, e.g. `bf16` or `a4g32m`."""
        if self.kind != "affine":
            return {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[self.kind]
        flags = (("m", self.has_minimum), ("w", self.scale == "float32"), ("k", self.block > 0))
        return f"{self.levels or f'a{self.bits}'}g{self.group}{''.join(flag for flag, is_set in flags if is_set)}"

    @property
    def unit(self) -> int:
        """Affine only: columns whose codes, scales and factors belong together: whole units make a row."""
        return max(self.group, self.block)


FLOAT32 = Encoding("float32")
FLOAT16 = Encoding("float16")
BFLOAT16 = Encoding("bfloat16")
Q4_0 = Encoding("affine", bits=4, group=32, zero=8)
Q4_1 = Encoding("affine", bits=4, group=32, has_minimum=True)
Q5_0 = Encoding("affine", bits=5, group=32, zero=16)
Q5_1 = Encoding("affine", bits=5, group=32, has_minimum=True)
Q8_0 = Encoding("affine", bits=8, group=32)
Q2_K = Encoding("affine", bits=2, group=16, has_minimum=True, block=256)
Q3_K = Encoding("affine", bits=3, group=16, zero=4, block=256)
Q4_K = Encoding("affine", bits=4, group=32, has_minimum=True, block=256)
Q5_K = Encoding("affine", bits=5, group=32, has_minimum=True, block=256)
Q6_K = Encoding("affine", bits=6, group=16, zero=32, block=256)
IQ4_NL = Encoding("affine", bits=4, group=32, levels="iq4")
IQ4_XS = Encoding("affine", bits=4, group=32, block=256, levels="iq4")
INT8 = Q8_0
INT4 = Q4_0

LEVELS: Mapping[str, tuple[int, ...]] = {
    "iq4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "e2m1": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
"""int8 levels of 4-bit codes: those of GGUF's IQ4 types, and the 4-bit floats of MXFP4 and NVFP4 times 2."""


def e4m3_values() -> npt.NDArray[np.float32]:
    """The number of each code of the 8-bit floats E4M3 ("OCP 8-bit Floating Point Specification")."""
    import numpy as np

    codes = np.arange(256, dtype=np.uint16)
    exponent, mantissa = codes >> 3 & 15, codes & 7
    tiny, normal = mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent.astype(np.float64) - 10)
    sizes = np.where(exponent == 0, tiny, normal)
    sizes[codes & 0x7F == 0x7F] = np.nan
    return np.where(codes < 128, sizes, -sizes).astype(np.float32)


class EncodedArray(msgspec.Struct, frozen=True):
    """A tensor in one encoding, unpacked: the neutral form between readers, quantizer, packers and references.

    Floats: `data` holds the values (bfloat16 as uint16 bit patterns). Affine: `data` holds one code a byte, uint8
    (int8 for 8 bits), shape [..., K]; `scale` and `minimum` have shape [..., K / unit] and dtype float16 or float32;
    with blocks, `factors` and `minimum_factors` have shape [..., K / group] and dtype int8 and uint8.
    """

    encoding: Encoding
    data: Array
    scale: Array | None = None
    minimum: Array | None = None
    factors: Array | None = None
    minimum_factors: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def rows(self, start: int, stop: int) -> EncodedArray:
        """Rows `start:stop` of the first axis."""

        def cut(part: Array | None) -> Array | None:
            return None if part is None else part[start:stop]

        floats, factors = (cut(self.scale), cut(self.minimum)), (cut(self.factors), cut(self.minimum_factors))
        return EncodedArray(self.encoding, self.data[start:stop], *floats, *factors)

    def decode(self) -> npt.NDArray[np.float32]:
        """The values as float32."""
        import numpy as np

        enc = self.encoding
        if enc.kind == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if enc.kind != "affine":
            return self.data.astype(np.float32)
        assert self.scale is not None
        codes = self.data
        if enc.levels == "e4m3":
            codes = e4m3_values()[self.data.view(np.uint8)]
        elif enc.levels:
            codes = np.array(LEVELS[enc.levels], np.int8)[self.data]
        groups = codes.reshape(*codes.shape[:-1], -1, enc.group).astype(np.float32) - np.float32(enc.zero)
        values = groups * _of_groups(enc, self.scale, self.factors)
        if self.minimum is not None:
            values = values + _of_groups(enc, self.minimum, self.minimum_factors)
        return values.reshape(self.data.shape)


def _of_groups(encoding: Encoding, floats: Array, factors: Array | None) -> npt.NDArray[np.float32]:
    """The float32 scales or minima [..., K / group, 1] of groups."""
    import numpy as np

    wide = floats.astype(np.float32)
    if factors is not None:
        wide = np.repeat(wide, encoding.block // encoding.group, axis=-1) * factors.astype(np.float32)
    return wide[..., None]
