"""Weights stored in 8-bit floats with scales, as checkpoints for GPUs have them.

    value = code * scale            of the whole tensor, of each row, or of each block of rows and columns

Where kernels multiply E4M3, codes and scales are kept, a scale for each group of a row's columns; else values are
decoded exactly into float32.

The scales of `X.weight` are `X.weight_scale` or `X.weight_scale_inv`; both multiply. Formats: "OCP 8-bit Floating Point
Specification", E4M3 (no infinity) and E5M2; scales as Hugging Face's `fp8` and compressed-tensors' float checkpoints.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import FLOAT32, EncodedArray, Encoding, e4m3_values
from ..runtime.errors import UserError

if TYPE_CHECKING:
    from .checkpoint import FileTensor

FORMATS = ("F8_E4M3", "F8_E5M2")
SCALES = ("_scale_inv", "_scale")
"""What is appended to a weight's name for its scales'."""
_GROUPS = (128, 64, 32)
"""Columns that share a scale, as kernels know."""
BLOCK = (128, 128)
"""Rows and columns that share a scale, where the configuration does not say."""


@cache
def values(format_: str) -> npt.NDArray[np.float32]:
    """The number of each code."""
    if format_ == "F8_E5M2":
        codes = np.arange(256, dtype=np.uint16)
        wide: npt.NDArray[np.float32] = (codes << 8).view(np.float16).astype(np.float32)
        return wide
    return e4m3_values()


@dataclass(frozen=True)
class Float8Tensor:
    """A `LazyTensor` of codes with its scales."""

    codes: FileTensor
    scales: FileTensor
    block: tuple[int, int] = BLOCK
    keeps: bool = False
    """Whether codes may be kept."""

    def __post_init__(self) -> None:
        """Raises UserError if the scales are of no known arrangement."""
        rows, columns = self.shape
        known = ((), (1,), (1, 1), (rows,), (rows, 1), (-(-rows // self.block[0]), -(-columns // self.block[1])))
        if self.scales.shape not in known:
            raise UserError(
                f"expected a scale for the tensor, each row, or each {self.block[0]}x{self.block[1]} block of "
                f"{self.name} {list(self.shape)}, found {self.scales.name} {list(self.scales.shape)}: use the original"
            )

    @property
    def name(self) -> str:
        return self.codes.name

    @property
    def shape(self) -> tuple[int, int]:
        if len(self.codes.shape) != 2:
            raise UserError(f"expected a matrix, but {self.name}, in 8-bit floats, has shape {list(self.codes.shape)}")
        rows, columns = self.codes.shape
        return rows, columns

    @property
    def format(self) -> str:
        return self.codes.format

    @cached_property
    def encoding(self) -> Encoding:
        """The codes, or where they can't be kept the values."""
        rows, columns = self.shape
        width = columns if self.scales.shape in ((), (1,), (1, 1), (rows,), (rows, 1)) else gcd(columns, self.block[1])
        group = next((size for size in _GROUPS if width % size == 0), 0)
        if not self.keeps or self.format != "F8_E4M3" or not group:
            return FLOAT32
        return Encoding("affine", bits=8, group=group, scale="float32", levels="e4m3")

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows `start:stop`."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        codes, scales = self.codes.read_raw(first, last), self._row_scales(first, last)
        if self.encoding == FLOAT32:
            return EncodedArray(FLOAT32, values(self.format)[codes] * scales)
        groups = np.broadcast_to(scales, codes.shape)[:, :: self.encoding.group]
        return EncodedArray(self.encoding, codes.view(np.int8), np.ascontiguousarray(groups))

    def _row_scales(self, first: int, last: int) -> npt.NDArray[np.float32]:
        """Broadcast over rows `first:last`."""
        scales = self.scales.read().decode()
        if scales.size == 1:
            return scales.reshape(1, 1)
        if scales.size == self.shape[0]:
            return scales.reshape(-1, 1)[first:last]
        rows = scales[np.arange(first, last) // self.block[0]]
        return np.repeat(rows, self.block[1], axis=1)[:, : self.shape[1]]
