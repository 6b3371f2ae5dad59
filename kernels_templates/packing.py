"""How weights and quantized activations lie in memory for the CPU kernels, as numpy functions.

`rows`     Floats, row-major, any shape: norms, biases, tables.

`panel16`  A matrix [N, K] as panels of 16 rows; N is padded with zeros to whole panels.
           float32, float16: per panel, per column: 16 numbers.
           bfloat16: per panel, per pair of columns: 16 pairs; an odd K is padded with a zero column.
           affine: per panel, per 32 columns one block: codes, scales, minima (`block_dtype`). Codes come in words of
           4 columns of a row, so that one broadcast of 4 activations meets 16 rows; word j of a row has columns
           4j..4j+3. 4 bits: byte = word j in the low nibble, word j + 4 in the high one. 5 and 6 bits: nibbles as for
           4 bits, and a plane of high bits: bit j of the byte is word j's (5 bits), or bits 2i and 2i+1 of half h are
           those of word 4h + i (6 bits). 8 bits: bytes. Groups above 32 columns repeat their scale in each block.

`q8`       Rows of activations, quantized for products with affine weights: K int8 codes, then K/32 float32 scales, then
           K/32 float32 sums (scale times the sum of the group's codes), padded to a multiple of 64 bytes.
           scale = max|x| / 127 of the group of 32, code = round(x / scale).

Packing chunks of rows and joining them equals packing the whole if each chunk but the last has a multiple of 16 rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import Array, EncodedArray, Encoding
from ..runtime.errors import InternalError

Layout = Literal["rows", "panel16"]
PANEL = 16
"""Rows of a panel."""

Words = npt.NDArray[np.uint32]
_CHUNK = 1 << 18
"""Bytes of codes packed at a time, so that intermediate arrays stay in the CPU's caches."""
_FLOATS: dict[str, npt.DTypeLike] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def panel_encodings() -> tuple[str, ...]:
    """Names of the encodings that `panel16` can hold."""
    affine = [f"a{b}g{g}{m}{w}" for b in (4, 5, 6, 8) for g in (16, 32, 64, 128) for m in ("", "m") for w in ("", "w")]
    return ("f32", "f16", "bf16", *affine)


def layout_bytes(layout: Layout, encoding: Encoding, shape: Sequence[int]) -> int:
    """Bytes of a packed tensor. Raises InternalError where the layout cannot hold it."""
    _check(layout, encoding, tuple(shape))
    if layout == "rows":
        return math.prod(shape) * np.dtype(_FLOATS[encoding.kind]).itemsize
    rows, columns = shape
    return -(-rows // PANEL) * _panel_bytes(encoding, columns)


def pack(layout: Layout, array: EncodedArray) -> npt.NDArray[np.uint8]:
    """The bytes of a tensor, or of a chunk of its rows, in a layout."""
    _check(layout, array.encoding, array.shape)
    if layout == "rows":
        return np.ascontiguousarray(array.data).reshape(-1).view(np.uint8)
    if array.encoding.kind == "affine":
        return _pack_affine(array)
    return _pack_floats(array)


def unpack(layout: Layout, encoding: Encoding, shape: Sequence[int], data: npt.NDArray[np.uint8]) -> EncodedArray:
    """The tensor whose packed bytes are `data`; the inverse of `pack`."""
    expected = layout_bytes(layout, encoding, shape)
    if data.nbytes != expected:
        raise InternalError(f"{layout} {encoding.name} {tuple(shape)} has {expected} bytes, found {data.nbytes}")
    if layout == "rows":
        return EncodedArray(encoding, data.view(_FLOATS[encoding.kind]).reshape(tuple(shape)))
    rows, columns = shape
    if encoding.kind == "affine":
        return _unpack_affine(encoding, rows, columns, data)
    return _unpack_floats(encoding, rows, columns, data)


def _check(layout: Layout, encoding: Encoding, shape: tuple[int, ...]) -> None:
    known = len(shape) == 2 and encoding.name in panel_encodings()
    fits = encoding.kind != "affine" if layout == "rows" else known
    if encoding.kind == "affine":
        # The kernels know the zero from the encoding's name.
        usual = 0 if encoding.bits == 8 or encoding.has_minimum else 1 << (encoding.bits - 1)
        whole = shape[-1] % max(encoding.group, 32) == 0
        fits = fits and encoding.zero == usual and encoding.scale != "bfloat16" and whole
    if not fits:
        raise InternalError(f"layout {layout} cannot hold {encoding} of shape {shape}")


def _panel_bytes(encoding: Encoding, columns: int) -> int:
    if encoding.kind == "affine":
        return columns // 32 * block_dtype(encoding).itemsize
    if encoding.kind == "bfloat16":
        columns += columns % 2
    return columns * PANEL * np.dtype(_FLOATS[encoding.kind]).itemsize


def _pad_rows(array: Array) -> Array:
    missing = -array.shape[0] % PANEL
    return np.pad(array, ((0, missing), (0, 0))) if missing else array


# --- floats -----------------------------------------------------------------------------------------------------------


def _pack_floats(array: EncodedArray) -> npt.NDArray[np.uint8]:
    data = _pad_rows(array.data)
    if array.encoding.kind == "bfloat16":
        data = np.pad(data, ((0, 0), (0, data.shape[1] % 2)))
        data = np.ascontiguousarray(data).view(np.uint32)
    panels = data.reshape(-1, PANEL, data.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(panels).reshape(-1).view(np.uint8)


def _unpack_floats(encoding: Encoding, rows: int, columns: int, data: npt.NDArray[np.uint8]) -> EncodedArray:
    kind = np.uint32 if encoding.kind == "bfloat16" else _FLOATS[encoding.kind]
    panels = data.view(kind).reshape(-(-rows // PANEL), -1, PANEL).transpose(0, 2, 1)
    matrix = np.ascontiguousarray(panels).reshape(-1, panels.shape[2])[:rows]
    return EncodedArray(encoding, matrix.view(_FLOATS[encoding.kind])[:, :columns])


# --- affine -----------------------------------------------------------------------------------------------------------


def block_dtype(encoding: Encoding) -> np.dtype[Any]:
    """The block of 16 rows by 32 columns: `codes`, `high` bits, `scale`, `minimum`, as far as the encoding has them."""
    words = 8 if encoding.bits == 8 else 4
    scales = (1 if encoding.group >= 32 else 2, PANEL)
    scale = "<f4" if encoding.scale == "float32" else "<f2"
    fields: list[tuple[str, str, tuple[int, int]]] = [("codes", "<u4", (words, PANEL))]
    if encoding.bits in (5, 6):
        fields.append(("high", "<u4", (encoding.bits - 4, PANEL)))
    fields.append(("scale", scale, scales))
    if encoding.has_minimum:
        fields.append(("minimum", scale, scales))
    return np.dtype(fields)


def _pack_affine(array: EncodedArray) -> npt.NDArray[np.uint8]:
    encoding, columns = array.encoding, array.shape[1]
    assert array.scale is not None
    codes = np.ascontiguousarray(_pad_rows(array.data)).view(np.uint32).reshape(-1, PANEL, columns // 32, 8)
    blocks = np.empty((len(codes), columns // 32), block_dtype(encoding))
    step = max(_CHUNK // codes[0].nbytes, 1)
    for start in range(0, len(codes), step):
        _pack_codes(codes[start : start + step], encoding.bits, blocks[start : start + step])
    blocks["scale"] = _pack_scales(array.scale, encoding.group)
    if encoding.has_minimum:
        assert array.minimum is not None
        blocks["minimum"] = _pack_scales(array.minimum, encoding.group)
    return blocks.reshape(-1).view(np.uint8)


def _pack_codes(codes: Words, bits: int, blocks: npt.NDArray[Any]) -> None:
    """Codes [panels, 16, groups, 8 words] into the code fields of blocks [panels, groups]."""
    order = (0, 2, 3, 1)
    if bits == 8:
        blocks["codes"] = codes.transpose(order)
        return
    nibbles = codes & 0x0F0F0F0F if bits > 4 else codes
    blocks["codes"] = (nibbles[..., :4] | nibbles[..., 4:] << 4).transpose(order)
    if bits > 4:
        blocks["high"] = _high_bits(codes, bits - 4).transpose(order)


def _unpack_affine(encoding: Encoding, rows: int, columns: int, data: npt.NDArray[np.uint8]) -> EncodedArray:
    blocks = data.view(block_dtype(encoding)).reshape(-(-rows // PANEL), columns // 32)
    stored: Words = blocks["codes"]
    words = stored if encoding.bits == 8 else np.concatenate((stored & 0x0F0F0F0F, stored >> 4 & 0x0F0F0F0F), axis=2)
    if encoding.bits in (5, 6):
        width = encoding.bits - 4
        shifts = np.arange(0, 8, width, dtype=np.uint32)[:, None]
        planes: Words = blocks["high"][:, :, :, None, :] >> shifts & (0x01010101 * (2**width - 1))
        words = words | planes.reshape(words.shape) << 4
    codes = np.ascontiguousarray(words.transpose(0, 3, 1, 2)).reshape(-1, columns // 4)[:rows]
    minimum = _unpack_scales(blocks["minimum"], encoding.group, rows) if encoding.has_minimum else None
    scale = _unpack_scales(blocks["scale"], encoding.group, rows)
    return EncodedArray(encoding, codes.view(np.int8 if encoding.bits == 8 else np.uint8), scale, minimum)


def _high_bits(codes: Words, width: int) -> Words:
    """The `width` bits above the nibbles, 8 / width words to a byte: [.., 8 words] -> [.., width]."""
    bits = codes >> 4 & 0x01010101 * (2**width - 1)
    planes = bits.reshape(*bits.shape[:-1], width, -1)
    shift = width
    while planes.shape[-1] > 1:
        planes = planes[..., 0::2] | planes[..., 1::2] << shift
        shift *= 2
    first: Words = planes[..., 0]
    return first


def _pack_scales(scales: Array, group: int) -> Array:
    """[N, K / group] -> [panels, blocks, 1 or 2, 16]."""
    if group > 32:
        scales = np.repeat(scales, group // 32, axis=1)
    each = 2 if group == 16 else 1
    padded = _pad_rows(scales)
    return padded.reshape(-1, PANEL, padded.shape[1] // each, each).transpose(0, 2, 3, 1)


def _unpack_scales(scales: Array, group: int, rows: int) -> Array:
    matrix = scales.transpose(0, 3, 1, 2).reshape(scales.shape[0] * PANEL, -1)
    return np.ascontiguousarray(matrix[:rows, :: max(group // 32, 1)])


# --- activations ------------------------------------------------------------------------------------------------------


def q8_row_bytes(columns: int) -> int:
    """Bytes of one quantized row; `columns` is a multiple of 32."""
    return -(-(columns + columns // 32 * 8) // 64) * 64


def q8_pack(x: npt.NDArray[np.float32]) -> npt.NDArray[np.uint8]:
    """Quantizes [rows, K] floats to [rows, q8_row_bytes(K)] bytes."""
    rows, columns = x.shape
    groups = x.reshape(rows, -1, 32)
    top = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.where(top < 1e-30, np.float32(0), np.float32(127) / np.maximum(top, np.float32(1e-30)))
    codes = np.rint(groups * inverse)
    scale = top[..., 0] / np.float32(127)
    sums = scale * codes.sum(axis=2)
    packed = np.zeros((rows, q8_row_bytes(columns)), np.uint8)
    parts = (np.nan_to_num(codes).astype(np.int8).reshape(rows, -1), scale, sums)
    joined = np.concatenate([np.ascontiguousarray(part).view(np.uint8) for part in parts], axis=1)
    packed[:, : joined.shape[1]] = joined
    return packed


def q8_unpack(packed: npt.NDArray[np.uint8], columns: int) -> npt.NDArray[np.float32]:
    """The floats [rows, K] that quantized rows stand for."""
    codes = packed[:, :columns].view(np.int8).astype(np.float32)
    scale = np.ascontiguousarray(packed[:, columns : columns + columns // 8]).view(np.float32)
    result: npt.NDArray[np.float32] = codes * np.repeat(scale, 32, axis=1)
    return result
