"""Weights whose integer codes are packed into 32-bit words, as AWQ, GPTQ and compressed-tensors store them.

    value = scale * (code - zero)            scale and zero are shared by a group of a row's columns

A matrix [N, K] in G groups, 32 / bits codes a word, of which the first is in the lowest bits:

| format                | codes                  | zeros                  | scales | order of columns      |
|-----------------------|------------------------|------------------------|--------|-----------------------|
| AWQ (GEMM)            | qweight [K, N/8]       | qzeros [G, N/8]        | [G, N] |                       |
| GPTQ                  | qweight [K/per word, N]| qzeros [G, N/per word] | [G, N] | g_idx [K]             |
| compressed-tensors    | weight_packed          | weight_zero_point      | [N, G] | weight_g_idx [K]      |
|                       | [N, K/per word]        | [N/per word, G]        |        |                       |

AWQ's words have their codes in the order 0 2 4 6 1 3 5 7. GPTQ's first format stores zeros less 1. Without zeros the
middle code is 0. `g_idx` is the group of each column, where columns were quantized in an order of their own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import FLOAT32, Q8_0, EncodedArray, Encoding
from ..runtime.errors import UserError

if TYPE_CHECKING:
    from .checkpoint import FileTensor

Codes = npt.NDArray[np.uint8]
Float32 = npt.NDArray[np.float32]

_BITS = (2, 4, 8)
_GROUPS = (128, 64, 32)
"""Groups that kernels know; a wider one is several of these."""
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where in a word each of 8 codes is."""


@dataclass(frozen=True)
class Words:
    """Codes [N, columns], several to a word of a file's tensor."""

    tensor: FileTensor
    bits: int
    turned: bool = False
    """The tensor has the matrix's columns as its rows."""
    down: bool = False
    """A word holds codes of several rows, not of several columns."""
    places: tuple[int, ...] = ()
    """Where in a word each of its codes is; () is in their order."""

    def __post_init__(self) -> None:
        """Raises UserError if the tensor does not hold words."""
        if self.tensor.format not in ("I32", "U32"):
            raise UserError(f"expected I32 words of codes in {self.tensor.name}, found {self.tensor.format}")

    def read(self, start: int, stop: int, columns: int) -> Codes:
        """Rows `start:stop`."""
        stored = self.tensor.integers().view(np.uint32)
        words = stored.T if self.turned else stored
        count = 32 // self.bits
        first, last = (start // count, -(-stop // count)) if self.down else (start, stop)
        shifts = np.uint32(self.bits) * np.array(self.places or range(count), np.uint32)
        codes = (words[first:last, :, None] >> shifts & np.uint32(2**self.bits - 1)).astype(np.uint8)
        if not self.down:
            return codes.reshape(last - first, -1)[:, :columns]
        rows = codes.transpose(0, 2, 1).reshape(-1, codes.shape[1])
        return rows[start - first * count : stop - first * count, :columns]


@dataclass(frozen=True)
class PackedTensor:
    """A `LazyTensor` of codes in words. It is [out, in] whatever the model has, so `turned` is the tensor itself."""

    name: str
    method: str
    """Who stores weights so: `GPTQ`, say."""
    shape: tuple[int, int]
    codes: Words
    scales: FileTensor
    turned_scales: bool
    zeros: Words | None
    zero_offset: int
    """What is added to stored zeros."""
    groups: FileTensor | None
    """The group of each column."""

    @property
    def turned(self) -> PackedTensor:
        return self

    @property
    def format(self) -> str:
        return self.method if self._regular else f"{self.method} with reordered columns"

    @cached_property
    def encoding(self) -> Encoding:
        """The codes as they are. Where columns of a group don't lie together, or no kernel knows groups of that size,
        the values.
        """
        width = next((size for size in _GROUPS if self._group % size == 0), 0)
        if not width or not self._regular:
            return FLOAT32
        exact = self._symmetric and self.scales.encoding.kind == "float16"
        return Encoding(
            "affine",
            bits=self.codes.bits,
            group=width,
            zero=self._middle if self._symmetric and self.codes.bits < 8 else 0,
            scale="float16" if exact else "float32",
            has_minimum=not self._symmetric,
        )

    @property
    def kept(self) -> Encoding:
        """Codes of 8 bits where the values can't be kept in the checkpoint's own."""
        return Q8_0 if self.encoding == FLOAT32 and self.shape[1] % Q8_0.group == 0 else self.encoding

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows `start:stop`."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        codes, scales, zeros = self.codes.read(first, last, self.shape[1]), self._scales(first, last), None
        if self.zeros is not None and not self._symmetric:
            zeros = self._zeros(first, last).astype(np.float32)
        encoding = self.encoding
        if encoding == FLOAT32:
            group = self._group_of_column
            shifts = np.float32(self._middle) if zeros is None else zeros[:, group]
            return EncodedArray(FLOAT32, (codes.astype(np.float32) - shifts) * scales[:, group])
        minima = None if zeros is None else scales * ((self._middle if encoding.bits == 8 else 0) - zeros)
        times = self._group // encoding.group
        return EncodedArray(
            encoding,
            (codes ^ np.uint8(128)).view(np.int8) if encoding.bits == 8 else codes,
            np.repeat(scales.astype(encoding.scale), times, axis=1),
            None if minima is None else np.repeat(minima, times, axis=1),
        )

    @property
    def _middle(self) -> int:
        return 1 << (self.codes.bits - 1)

    @property
    def _count(self) -> int:
        return self.scales.shape[0 if self.turned_scales else 1]

    @property
    def _group(self) -> int:
        return self.shape[1] // self._count

    @cached_property
    def _group_of_column(self) -> npt.NDArray[np.int64]:
        if self.groups is None:
            return np.arange(self.shape[1]) // self._group
        found: npt.NDArray[np.int64] = np.asarray(self.groups.integers(), np.int64)
        if found.min() < 0 or found.max() >= self._count:
            raise UserError(f"{self.groups.name} numbers groups from {found.min()} to {found.max()} of {self._count}")
        return found

    @cached_property
    def _regular(self) -> bool:
        """Whether the columns of a group lie together, in the order of the groups."""
        return bool((self._group_of_column == np.arange(self.shape[1]) // self._group).all())

    @cached_property
    def _symmetric(self) -> bool:
        """Whether the middle code always means 0."""
        return self.zeros is None or bool((self._zeros(0, self.shape[0]) == self._middle).all())

    def _scales(self, first: int, last: int) -> Float32:
        if not self.turned_scales:
            return self.scales.read(first, last).decode()
        return np.ascontiguousarray(self.scales.read().decode().T[first:last])

    def _zeros(self, first: int, last: int) -> Codes:
        assert self.zeros is not None
        stored = self.zeros.read(first, last, self._count)
        return (stored + np.uint8(self.zero_offset)) & np.uint8(2 * self._middle - 1)


# --- finding them in a checkpoint -------------------------------------------------------------------------------------

_QWEIGHT = (".qweight", ".qzeros", ".scales", ".g_idx")
_PACKED = (".weight_packed", ".weight_scale", ".weight_zero_point", ".weight_g_idx", ".weight_shape")


def packed_tensors(stored: Mapping[str, FileTensor], zero_offset: int) -> tuple[dict[str, PackedTensor], set[str]]:
    """The packed weights among a checkpoint's tensors, by name, and the names of what they are made of.

    `zero_offset` is what GPTQ's zeros lack. Raises UserError for shapes that are none of the formats'.
    """
    found: dict[str, PackedTensor] = {}
    used: set[str] = set()
    for name in stored:
        for suffixes, make in ((_QWEIGHT, _qweight), (_PACKED, _weight_packed)):
            if name.endswith(suffixes[0]):
                stem = name.removesuffix(suffixes[0])
                parts = {suffix: stored[stem + suffix] for suffix in suffixes if stem + suffix in stored}
                found[f"{stem}.weight"] = make(f"{stem}.weight", parts, zero_offset)
                used |= {stem + suffix for suffix in parts}
    return found, used


def _qweight(name: str, parts: Mapping[str, FileTensor], zero_offset: int) -> PackedTensor:
    """AWQ or GPTQ: which of them, and how many bits, is in the shapes."""
    codes, zeros, scales = (_matrix(name, parts, part) for part in _QWEIGHT[:3])
    (count, size), width = scales.shape, zeros.shape[1]
    bits, order = 32 * width // size, parts.get(".g_idx")
    if (codes.shape[1], bits, zeros.shape[0]) == (width, 4, count):
        words = [Words(tensor, bits, turned=True, down=True, places=_AWQ_PLACES) for tensor in (codes, zeros)]
        columns, method, offset = codes.shape[0], "AWQ", 0
    elif codes.shape[1] == size and zeros.shape[0] == count and bits in _BITS and bits * size == 32 * width:
        words = [Words(codes, bits, turned=True), Words(zeros, bits, turned=True, down=True)]
        columns, method, offset = codes.shape[0] * (32 // bits), "GPTQ", zero_offset
    else:
        raise _unknown(name, parts)
    if columns % count or (order is not None and order.shape != (columns,)):
        raise _unknown(name, parts)
    return PackedTensor(name, method, (size, columns), words[0], scales, True, words[1], offset, order)


def _weight_packed(name: str, parts: Mapping[str, FileTensor], _: int) -> PackedTensor:
    codes, scales = _matrix(name, parts, ".weight_packed"), _matrix(name, parts, ".weight_scale")
    zeros, order, sizes = (parts.get(part) for part in _PACKED[2:])
    rows, columns = (0, 0) if sizes is None or sizes.shape != (2,) else map(int, sizes.integers())
    bits = next((bits for bits in _BITS if columns and codes.shape == (rows, -(-columns * bits // 32))), 0)
    count = scales.shape[1]
    fits = bits and scales.shape[0] == rows and columns % count == 0
    if zeros is not None:
        fits = fits and zeros.shape == (-(-rows * bits // 32), count)
    if not fits or (order is not None and order.shape != (columns,)):
        raise _unknown(name, parts)
    zero_words = None if zeros is None else Words(zeros, bits, down=True)
    return PackedTensor(
        name, "compressed-tensors", (rows, columns), Words(codes, bits), scales, False, zero_words, 0, order
    )


def _matrix(name: str, parts: Mapping[str, FileTensor], part: str) -> FileTensor:
    tensor = parts.get(part)
    if tensor is None or len(tensor.shape) != 2 or 0 in tensor.shape:
        raise _unknown(name, parts)
    return tensor


def _unknown(name: str, parts: Mapping[str, Any]) -> UserError:
    found = ", ".join(f"{part[1:]} {list(tensor.shape)}" for part, tensor in parts.items())
    return UserError(
        f"{name} is packed in a way that is not supported ({found}): expected codes of 2, 4 or 8 bits as AWQ (GEMM), "
        "GPTQ or compressed-tensors store them; use the original or a GGUF"
    )
