"""Number formats of stored tensors, shared by the checkpoint readers, the quantizer, the packers and the kernels.

A weight is either plain floats or *group affine* integers. Group affine covers int8, int4 and every GGUF type that we
keep exactly: along the last axis each group of `group` columns shares a scale and, for some, a minimum:

    value = scale * (code - zero) + minimum          (minimum is 0 where `has_minimum` is False)

Q4_0 is (bits 4, group 32, zero 8); Q4_1 adds a minimum; Q5_0 is (5, 32, 16); Q8_0 is (8, 32, 0) with signed codes;
Q4_K is (4, 32, 0) with float32 scale d*sc and float32 minimum -dmin*m; Q6_K is (6, 16, 32) with float32 scales.
"""

from __future__ import annotations

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
    """Affine only: width of a code, 4, 5, 6 or 8."""
    group: int = 0
    """Affine only: columns that share a scale, 16 or a multiple of 32."""
    zero: int = 0
    """Affine only: the code that means 0 before the minimum is added. 8-bit codes are signed and have zero 0."""
    scale: FloatName = "float16"
    """Affine only: dtype of scales and minima."""
    has_minimum: bool = False

    @property
    def name(self) -> str:
        """A short name fit for file names and reports, e.g. `bf16` or `a4g32m`."""
        if self.kind != "affine":
            return {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}[self.kind]
        wide = "w" if self.scale == "float32" else ""
        return f"a{self.bits}g{self.group}{'m' if self.has_minimum else ''}{wide}"


FLOAT32 = Encoding("float32")
FLOAT16 = Encoding("float16")
BFLOAT16 = Encoding("bfloat16")
Q4_0 = Encoding("affine", bits=4, group=32, zero=8)
Q4_1 = Encoding("affine", bits=4, group=32, has_minimum=True)
Q5_0 = Encoding("affine", bits=5, group=32, zero=16)
Q5_1 = Encoding("affine", bits=5, group=32, has_minimum=True)
Q8_0 = Encoding("affine", bits=8, group=32)
Q4_K = Encoding("affine", bits=4, group=32, scale="float32", has_minimum=True)
Q5_K = Encoding("affine", bits=5, group=32, scale="float32", has_minimum=True)
Q6_K = Encoding("affine", bits=6, group=16, zero=32, scale="float32")
INT8 = Q8_0
INT4 = Q4_0


class EncodedArray(msgspec.Struct, frozen=True):
    """A tensor in one encoding, unpacked: the neutral form between readers, quantizer, packers and references.

    Floats: `data` holds the values (bfloat16 as uint16 bit patterns). Affine: `data` holds one code a byte, uint8
    (int8 for 8 bits), shape [..., K]; `scale` and `minimum` have shape [..., K / group] and dtype float16 or float32.
    """

    encoding: Encoding
    data: Array
    scale: Array | None = None
    minimum: Array | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        return self.data.shape

    def decode(self) -> npt.NDArray[np.float32]:
        """The values as float32."""
        import numpy as np

        enc = self.encoding
        if enc.kind == "bfloat16":
            return (self.data.astype(np.uint32) << 16).view(np.float32)
        if enc.kind != "affine":
            return self.data.astype(np.float32)
        assert self.scale is not None
        groups = self.data.reshape(*self.data.shape[:-1], -1, enc.group).astype(np.float32) - np.float32(enc.zero)
        values = groups * self.scale.astype(np.float32)[..., None]
        if self.minimum is not None:
            values = values + self.minimum.astype(np.float32)[..., None]
        return values.reshape(self.data.shape)
