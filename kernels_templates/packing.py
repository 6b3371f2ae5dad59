"""How weights and quantized activations lie in memory for kernels, as numpy functions.

`rows`     Floats, row-major, any shape: norms, biases, tables.

`panel16`  A matrix [N, K] as panels of 16 rows; N is padded with zeros to whole panels.
           float32, float16: per panel, per column: 16 numbers.
           bfloat16: per panel, per pair of columns: 16 pairs; an odd K is padded with a zero column.
           affine: per panel, per unit of columns (at least 32) one block (`block_dtype`): scales and minima, then by
           pieces of 32 columns factors and codes. Codes come in words of 4 columns of a row, so that one broadcast
           of 4 activations meets 16 rows; word j of a piece has columns 4j..4j+3. 8 bits: bytes. 4 bits: byte =
           word j in the low nibble, word j + 4 in the high one. Less than 4 bits and what is above them lie in planes
           of 1 or 2 bits: bit j of a byte is word j's, or bits 2i and 2i+1 in half h are those of word 4h + i. So 2 is
           a plane of 2, 3 adds one of 1 above it, and 5 and 6 add one of 1 or 2 to the nibbles.

`operand16`  An affine matrix for tensor cores: `panel16`, with every 16 columns in the order in which the lanes of a
           warp hold them: word j has columns 2j, 2j + 1, 2j + 8 and 2j + 9 of the 16.

`q8`       Rows of activations, quantized for products with affine weights: K int8 codes, then K/32 float32 scales, then
           K/32 float32 sums (scale times the sum of the group's codes), padded to a multiple of 64 bytes.
           scale = max|x| / 127 of the group of 32, code = round(x / scale).

Packing chunks of rows and joining them equals packing the whole if each chunk but the last has a multiple of 16 rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from itertools import product
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from ..runtime.encodings import BFLOAT16, FLOAT16, FLOAT32, LEVELS, Array, EncodedArray, Encoding
from ..runtime.errors import InternalError

Layout = Literal["rows", "panel16", "operand16"]
PANEL = 16
"""Rows of a panel."""
PIECE = 32
"""Columns whose codes share words, and whose activations share a scale."""
_OPERAND = np.arange(16).reshape(2, 4, 2).transpose(1, 0, 2).reshape(-1)
"""The columns of 16 in the order of `operand16`."""

Words = npt.NDArray[np.uint32]
_CHUNK = 1 << 18
"""Bytes of codes packed at a time, so that intermediate arrays stay in the CPU's caches."""
_FLOATS: dict[str, npt.DTypeLike] = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


@cache
def _panel_encodings() -> dict[str, Encoding]:
    """The encodings that `panel16` can hold, by name. The zero is that of the name: kernels know no other."""
    affine: list[Encoding] = []
    for bits, minimum in product((2, 3, 4, 5, 6, 8), (False, True)):
        usual = Encoding("affine", bits, zero=0 if minimum or bits == 8 else 1 << (bits - 1), has_minimum=minimum)
        affine += [replace(usual, group=group) for group in (16, 32, 64, 128)]
        affine += [replace(usual, group=group, block=256) for group in (16, 32)]
    for levels in LEVELS:
        usual = replace(Encoding("affine", 4), levels=levels)
        affine += [replace(usual, group=16), replace(usual, group=32), replace(usual, group=32, block=256)]
    affine += [Encoding("affine", 8, group, levels="e4m3") for group in (32, 64, 128)]
    wide = [replace(encoding, scale="float32") for encoding in affine]
    return {encoding.name: encoding for encoding in (FLOAT32, FLOAT16, BFLOAT16, *affine, *wide)}


def panel_encodings() -> tuple[str, ...]:
    """Names of the encodings that `panel16` can hold."""
    return tuple(_panel_encodings())


def panel_encoding(name: str) -> Encoding:
    """The encoding with one of these names."""
    return _panel_encodings()[name]


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
    if layout == "operand16":
        array = replace(array, data=_reordered(array.data, _OPERAND))
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
        array = _unpack_affine(encoding, rows, columns, data)
        return replace(array, data=_reordered(array.data, np.argsort(_OPERAND))) if layout == "operand16" else array
    return _unpack_floats(encoding, rows, columns, data)


def _check(layout: Layout, encoding: Encoding, shape: tuple[int, ...]) -> None:
    if layout == "rows":
        fits = encoding.kind != "affine"
    else:
        fits = len(shape) == 2 and _panel_encodings().get(encoding.name) == encoding
        fits = fits and (layout == "panel16" if encoding.kind != "affine" else shape[1] % block_columns(encoding) == 0)
    if not fits:
        raise InternalError(f"layout {layout} cannot hold {encoding} of shape {shape}")


def _reordered(codes: Array, order: npt.NDArray[np.intp]) -> Array:
    """The columns of every 16 in another order."""
    reordered: Array = codes.reshape(len(codes), -1, 16)[..., order].reshape(codes.shape)
    return reordered


def _panel_bytes(encoding: Encoding, columns: int) -> int:
    if encoding.kind == "affine":
        return columns // block_columns(encoding) * block_dtype(encoding).itemsize
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
        data = np.pad(data, ((0, 0), (0, 1))) if data.shape[1] % 2 else data
        data = np.ascontiguousarray(data).view(np.uint32)
    panels = data.reshape(-1, PANEL, data.shape[1]).transpose(0, 2, 1)
    return np.ascontiguousarray(panels).reshape(-1).view(np.uint8)


def _unpack_floats(encoding: Encoding, rows: int, columns: int, data: npt.NDArray[np.uint8]) -> EncodedArray:
    kind = np.uint32 if encoding.kind == "bfloat16" else _FLOATS[encoding.kind]
    panels = data.view(kind).reshape(-(-rows // PANEL), -1, PANEL).transpose(0, 2, 1)
    matrix = np.ascontiguousarray(panels).reshape(-1, panels.shape[2])[:rows]
    return EncodedArray(encoding, matrix.view(_FLOATS[encoding.kind])[:, :columns])


# --- affine -----------------------------------------------------------------------------------------------------------


def block_columns(encoding: Encoding) -> int:
    """Columns of a block."""
    return max(encoding.unit, PIECE)


def block_offsets(encoding: Encoding) -> dict[str, int]:
    """Where each field begins in a block or in its piece, the `bytes` of a block and of a `piece`, and those of a
    `part` of a block, which tensor maps can count: a multiple of 16, at most 2048."""
    block, piece = block_dtype(encoding), _piece_dtype(encoding)
    assert block.fields is not None
    assert piece.fields is not None
    fields = {**block.fields, **piece.fields}
    part = next(size for size in range(2048, 0, -16) if block.itemsize % size == 0)
    sizes = {"bytes": block.itemsize, "piece": piece.itemsize, "part": part}
    return {name: field[1] for name, field in fields.items()} | sizes


def block_dtype(encoding: Encoding) -> np.dtype[Any]:
    """The block of 16 rows, in the order in which kernels read it, so that memory delivers one stream: `scale` and
    `minimum`, then `pieces` of 32 columns."""
    columns = block_columns(encoding)
    scales = ("<f4" if encoding.scale == "float32" else "<f2", (columns // encoding.unit, PANEL))
    minima = [("minimum", *scales)] if encoding.has_minimum else []
    return np.dtype([("scale", *scales), *minima, ("pieces", _piece_dtype(encoding), (columns // PIECE,))])


def _piece_dtype(encoding: Encoding) -> np.dtype[Any]:
    """`factors`, `minimum_factors` and `high` bits, as far as the encoding has them, and `codes`."""
    fields: list[tuple[str, str, tuple[int, ...]]] = []
    if encoding.block:
        fields.append(("factors", "i1", (PIECE // encoding.group, PANEL)))
    if encoding.block and encoding.has_minimum:
        fields.append(("minimum_factors", "u1", (PIECE // encoding.group, PANEL)))
    if encoding.bits in _HIGH:
        fields.append(("high", "<u4", (_HIGH[encoding.bits], PANEL)))
    return np.dtype([*fields, ("codes", "<u4", (_WORDS[encoding.bits], PANEL))])


_WORDS = {2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 8: 8}
"""By bits: vectors of 16 words that hold the lower bits of a piece (2, 4 or 8 of them a code)."""
_HIGH = {3: 1, 5: 1, 6: 2}
"""By bits: how many of them are in planes above the lower ones, which is also how many vectors those take."""


def _pack_affine(array: EncodedArray) -> npt.NDArray[np.uint8]:
    encoding, columns = array.encoding, array.shape[1]
    codes = np.ascontiguousarray(_pad_rows(array.data)).view(np.uint32).reshape(-1, PANEL, columns // PIECE, 8)
    blocks = np.empty((len(codes), columns // block_columns(encoding)), block_dtype(encoding))
    step = max(_CHUNK // codes[0].nbytes, 1)
    for start in range(0, len(codes), step):
        _pack_codes(codes[start : start + step], encoding.bits, blocks["pieces"][start : start + step])
    for name, field in _numbers(blocks).items():
        field[...] = np.moveaxis(_pad_rows(getattr(array, name)).reshape(-1, PANEL, *field.shape[1:-1]), 1, -1)
    return blocks.reshape(-1).view(np.uint8)


def _numbers(blocks: npt.NDArray[Any]) -> dict[str, npt.NDArray[Any]]:
    """The fields that are arrays of an `EncodedArray` too, [panels, blocks, .., 16]."""
    pieces = blocks["pieces"]
    found = {name: blocks[name] for name in ("scale", "minimum") if name in (blocks.dtype.names or ())}
    return found | {name: pieces[name] for name in ("factors", "minimum_factors") if name in (pieces.dtype.names or ())}


def _pack_codes(codes: Words, bits: int, pieces: npt.NDArray[Any]) -> None:
    """Codes [panels, 16, columns / 32, 8 words] into pieces [panels, blocks, pieces of a block]."""

    def put(name: str, words: Words) -> None:
        pieces[name] = words.transpose(0, 2, 3, 1).reshape(pieces[name].shape)

    if bits == 8:
        put("codes", codes)
    elif bits < 4:
        put("codes", _to_planes(codes, 2))
    else:
        nibbles: Words = codes & np.uint32(0x0F0F0F0F) if bits > 4 else codes
        put("codes", nibbles[..., :4] | nibbles[..., 4:] << np.uint32(4))
    if bits in _HIGH:
        put("high", _to_planes(codes >> np.uint32(bits - _HIGH[bits]), _HIGH[bits]))


def _unpack_affine(encoding: Encoding, rows: int, columns: int, data: npt.NDArray[np.uint8]) -> EncodedArray:
    panels, bits = -(-rows // PANEL), encoding.bits
    blocks = data.view(block_dtype(encoding)).reshape(panels, columns // block_columns(encoding))

    def words(name: str) -> Words:
        """[panels, 16, pieces, words]"""
        field: Words = blocks["pieces"][name]
        return field.reshape(panels, columns // PIECE, -1, PANEL).transpose(0, 3, 1, 2)

    codes = words("codes")
    if bits < 4:
        codes = _from_planes(codes, 2)
    elif bits < 8:
        codes = np.concatenate((codes & 0x0F0F0F0F, codes >> 4 & 0x0F0F0F0F), axis=3)
    if bits in _HIGH:
        codes = codes | _from_planes(words("high"), _HIGH[bits]) << np.uint32(bits - _HIGH[bits])
    matrix = np.ascontiguousarray(codes).reshape(-1, columns // 4)[:rows]
    numbers: dict[str, Array] = {
        name: np.ascontiguousarray(np.moveaxis(field, -1, 1)).reshape(panels * PANEL, -1)[:rows]
        for name, field in _numbers(blocks).items()
    }
    return EncodedArray(encoding, matrix.view(np.int8 if bits == 8 else np.uint8), **numbers)


def _to_planes(words: Words, width: int) -> Words:
    """The lowest `width` bits of every byte, 8 / width words to a byte: [.., 8 words] -> [.., width]."""
    bits = words & 0x01010101 * (2**width - 1)
    planes = bits.reshape(*bits.shape[:-1], width, -1)
    shift = width
    while planes.shape[-1] > 1:
        planes = planes[..., 0::2] | planes[..., 1::2] << shift
        shift *= 2
    first: Words = planes[..., 0]
    return first


def _from_planes(planes: Words, width: int) -> Words:
    """The words of planes: [.., width] -> [.., 8 words]."""
    shifts = np.arange(0, 8, width, dtype=np.uint32)
    words: Words = planes[..., None] >> shifts & np.uint32(0x01010101 * (2**width - 1))
    return words.reshape(*planes.shape[:-1], 8)


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
