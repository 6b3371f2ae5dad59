"""Weights on their way into the plan: read, joined, encoded and packed by chunks of rows, into one safetensors file.

Peak memory stays near one chunk, whatever the size of the model.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import msgspec
import numpy as np
import numpy.typing as npt

from ..kernels_templates.packing import PANEL, pack
from ..runtime.encodings import FLOAT32, Array, EncodedArray, Encoding
from ..runtime.errors import InternalError, UserError
from ..runtime.plan import RandomFill, WeightEntry, WeightFile
from .ir import Graph, Param
from .losses import Losses
from .lowered import Weight
from .lowering import static, weight_bytes, weight_shape
from .memory import align
from .quantize import encode
from .random_fill import fill_name, random_fill
from .weights import LazyTensor, Piece, Recipe, TensorSource, TurnedTensor, kept_encoding

FILE = "weights.safetensors"
RANDOM_FILE = "random"
"""What the entries of random weights name; there is no such file."""
CHUNK_BYTES = 4 << 20
"""Float32 bytes of a chunk of rows: what is made of it stays in the CPU's caches. It has a multiple of `PANEL` rows, so
that packed chunks join into the whole."""


def resolve_encodings(graph: Graph, source: TensorSource) -> Graph:
    """The graph with every parameter's stored encoding known: the checkpoint's own, where the recipe keeps that.

    Pieces that differ, and affine pieces that are transposed, become float32. Raises UserError if a tensor is missing
    or the pieces do not make the parameter's shape.
    """
    return replace(graph, params=tuple(_resolve(param, source) for param in graph.params))


def _resolve(param: Param, source: TensorSource) -> Param:
    recipe = param.recipe
    _check_shape(param, source)
    if recipe.encoding is not None:
        return param
    if recipe.constant is not None:
        return replace(param, recipe=replace(recipe, encoding=FLOAT32))
    opened = [_open(piece, source) for piece in recipe.pieces]
    found = {kept_encoding(tensor) for tensor, _ in opened}
    turned = any(transpose for _, transpose in opened)
    kept = found.pop() if len(found) == 1 else FLOAT32
    if turned and kept.kind == "affine":
        kept = FLOAT32
    return replace(param, recipe=replace(recipe, encoding=kept))


def _check_shape(param: Param, source: TensorSource) -> None:
    recipe = param.recipe
    if recipe.constant is not None:
        return
    shapes = [_piece_shape(piece, source) for piece in recipe.pieces]
    rows, rest = sum(shape[0] for shape in shapes), {shape[1:] for shape in shapes}
    wanted = param.value.type.shape
    if len(rest) != 1 or (rows, *rest.pop()) != wanted:
        names = ", ".join(f"{piece.tensor} {list(source[piece.tensor].shape)}" for piece in recipe.pieces)
        raise UserError(
            f"expected shape [{', '.join(map(str, wanted))}] for {param.value.name}, but the checkpoint has {names}: "
            "the weights do not belong to this config.json"
        )


def _open(piece: Piece, source: TensorSource) -> tuple[LazyTensor, bool]:
    """The tensor of a piece, and whether it is still to be transposed."""
    tensor = source[piece.tensor]
    if piece.transpose and isinstance(tensor, TurnedTensor):
        return tensor.turned, False
    return tensor, piece.transpose


def _piece_shape(piece: Piece, source: TensorSource) -> tuple[int, ...]:
    tensor, transpose = _open(piece, source)
    shape = tensor.shape[::-1] if transpose else tensor.shape
    if not shape:
        raise UserError(f"expected rows in tensor {piece.tensor}, found a scalar: the checkpoint is damaged")
    start, stop, _ = slice(piece.start, piece.stop).indices(shape[0])
    return (stop - start, *shape[1:])


# --- reading ----------------------------------------------------------------------------------------------------------


def read_chunks(param: Param, source: TensorSource, losses: Losses | None = None) -> Iterator[EncodedArray]:
    """A resolved parameter in its encoding, by chunks of rows that are a multiple of 16 but for the last.

    What re-encoding costs is added to `losses`. Raises UserError naming the tensor if it holds NaN or infinity, or
    numbers that the encoding can't hold.
    """
    encoding = param.recipe.encoding
    if encoding is None:
        raise InternalError(f"the encoding of {param.value.name} was not resolved")
    if param.recipe.constant is not None:
        table = EncodedArray(FLOAT32, param.recipe.constant.array.astype(np.float32))
        yield table if encoding == FLOAT32 else encode(table.decode(), encoding)
        return
    row_bytes = 4 * math.prod(static(size) for size in param.value.type.shape[1:])
    rows = max(PANEL, CHUNK_BYTES // max(1, row_bytes) // PANEL * PANEL)
    parts: list[EncodedArray] = []
    for piece in param.recipe.pieces:
        for part in _read_piece(piece, source, encoding, rows, losses):
            parts.append(part)
            ready = sum(part.shape[0] for part in parts)
            if ready >= rows:
                whole, full = _join(parts), ready // PANEL * PANEL
                yield whole.rows(0, full)
                parts = [whole.rows(full, ready)] if full < ready else []
    if parts:
        yield _join(parts)


def _read_piece(
    piece: Piece, source: TensorSource, encoding: Encoding, rows: int, losses: Losses | None
) -> Iterator[EncodedArray]:
    tensor, transpose = _open(piece, source)
    if transpose:
        # A row of the result is a column of the stored tensor, so it is read whole.
        turned = np.ascontiguousarray(_checked(tensor, 0, tensor.shape[0]).decode().T)
        whole = EncodedArray(FLOAT32, turned[slice(piece.start, piece.stop)])
        for start in range(0, whole.shape[0], rows):
            yield _encoded(whole.rows(start, start + rows), encoding, tensor, losses)
        return
    start, stop, _ = slice(piece.start, piece.stop).indices(tensor.shape[0])
    for at in range(start, stop, rows):
        yield _encoded(_checked(tensor, at, min(at + rows, stop)), encoding, tensor, losses)


def _encoded(chunk: EncodedArray, encoding: Encoding, tensor: LazyTensor, losses: Losses | None) -> EncodedArray:
    if chunk.encoding == encoding:
        return chunk
    values = chunk.decode()
    try:
        stored = encode(values, encoding)
    except ValueError as problem:
        raise UserError(
            f"tensor {tensor.name} can't be stored as {encoding.name}: {problem}; use another --dtype or --quant"
        ) from None
    if losses is not None and encoding != FLOAT32:
        losses.add(tensor.name, tensor.format, values, stored)
    return stored


def _checked(tensor: LazyTensor, start: int, stop: int) -> EncodedArray:
    """Rows of a tensor, if all their numbers are finite."""
    chunk = tensor.read(start, stop)
    parts = [chunk.scale, chunk.minimum] if chunk.encoding.kind == "affine" else [chunk.data]
    if chunk.encoding.levels == "e4m3":
        parts.append(np.where(chunk.data.view(np.uint8) & 0x7F == 0x7F, np.float32(np.nan), np.float32(0)))
    for part in parts:
        if part is not None and not (finite := _is_finite(part)).all():
            row = start + int(np.argmin(finite.reshape(len(finite), -1).all(axis=1)))
            raise UserError(
                f"expected finite weights, but tensor {tensor.name} holds NaN or infinity in row {row}: "
                "get a sound copy of the checkpoint"
            )
    return chunk


def _is_finite(numbers: Array) -> npt.NDArray[np.bool_]:
    if numbers.dtype == np.uint16:  # bfloat16: not finite if all bits of the exponent are set
        bits: npt.NDArray[np.uint16] = numbers.view(np.uint16)
        finite: npt.NDArray[np.bool_] = (bits & np.uint16(0x7F80)) != np.uint16(0x7F80)
    else:
        finite = np.isfinite(numbers)
    return finite


def _join(parts: Sequence[EncodedArray]) -> EncodedArray:
    if len(parts) == 1:
        return parts[0]

    def joined(arrays: Sequence[Array | None]) -> Array | None:
        found = [array for array in arrays if array is not None]
        return np.concatenate(found) if found else None

    return EncodedArray(
        parts[0].encoding,
        np.concatenate([part.data for part in parts]),
        joined([part.scale for part in parts]),
        joined([part.minimum for part in parts]),
        joined([part.factors for part in parts]),
        joined([part.minimum_factors for part in parts]),
    )


# --- writing ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PackedWeights:
    """What was written, and what is to be made at load."""

    entries: Mapping[str, WeightEntry]
    files: tuple[WeightFile, ...]
    notes: tuple[str, ...] = ()
    """What re-encoding costs."""
    fills: Mapping[str, RandomFill] = field(default_factory=dict)


def pack_weights(
    weights: Mapping[str, Weight],
    source: TensorSource,
    directory: Path,
    progress: Callable[[str, int, int], None] | None = None,
    *,
    random: bool = False,
) -> PackedWeights:
    """Write `directory/weights.safetensors` with every weight in its layout, sorted by name.

    Each is a U8 tensor that starts at a multiple of 64 bytes in the file. `progress` gets (what, bytes done, of). With
    `random` only constants are written; the others get a place in a file that is made at load. Raises UserError for
    weights that can't be used.
    """
    stored = {
        name: weight for name, weight in weights.items() if not random or weight.param.recipe.constant is not None
    }
    packed = _write(stored, source, directory, progress)
    return _add_random({name: weight for name, weight in weights.items() if name not in stored}, packed)


def _write(
    weights: Mapping[str, Weight],
    source: TensorSource,
    directory: Path,
    progress: Callable[[str, int, int], None] | None,
) -> PackedWeights:
    # Once a block of this size was freed, glibc keeps smaller ones for the next chunk: to give each back to the system
    # and touch it anew takes longer than the work on it.
    np.empty(4 * CHUNK_BYTES, np.uint8)
    ordered = sorted(weights.items())
    sizes = {name: align(weight_bytes(weight)) for name, weight in ordered}
    header = _header(sizes)
    total = len(header) + sum(sizes.values())
    entries: dict[str, WeightEntry] = {}
    losses = Losses()
    with open(directory / FILE, "wb") as stream, _HashingWriter(stream) as out:
        out.write(header)
        for name, weight in ordered:
            start = out.written
            for chunk in read_chunks(weight.param, source, losses):
                out.write(pack(weight.layout, chunk).data)
                if progress is not None:
                    progress(name, out.written, total)
            packed = out.written - start
            if packed != weight_bytes(weight):
                raise InternalError(f"{name} packed to {packed} bytes, expected {weight_bytes(weight)}")
            out.write(bytes(sizes[name] - packed))
            entries[name] = _entry(weight, FILE, start, sizes[name])
    return PackedWeights(entries, (WeightFile(FILE, out.written, out.digest.hexdigest()),), tuple(losses.notes()))


def _add_random(weights: Mapping[str, Weight], stored: PackedWeights) -> PackedWeights:
    """The weights with a place in a file that is made at load."""
    if not weights:
        return stored
    entries, fills, offset = dict(stored.entries), {}, 0
    for name, weight in sorted(weights.items()):
        size, fill = align(weight_bytes(weight)), fill_name(weight)
        entries[name] = msgspec.structs.replace(_entry(weight, RANDOM_FILE, offset, size), fill=fill)
        fills[fill] = random_fill(weight)
        offset += size
    files = (*stored.files, WeightFile(RANDOM_FILE, offset, "", random=True))
    return PackedWeights(entries, files, stored.notes, fills)


def _entry(weight: Weight, file: str, offset: int, size: int) -> WeightEntry:
    recipe: Recipe = weight.param.recipe
    assert recipe.encoding is not None
    sources = tuple(dict.fromkeys(piece.tensor for piece in recipe.pieces))
    return WeightEntry(file, offset, size, weight_shape(weight), recipe.encoding, weight.layout, sources)


def _header(sizes: Mapping[str, int]) -> bytes:
    """The safetensors header, padded with spaces so that data begins at a multiple of 64 bytes."""
    table, offset = {}, 0
    for name, size in sizes.items():
        table[name] = {"dtype": "U8", "shape": [size], "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (align(8 + len(text)) - 8 - len(text))
    return len(text).to_bytes(8, "little") + text


class _HashingWriter:
    """Writes a stream and hashes what goes through, one piece at a time while the caller makes the next."""

    def __init__(self, stream: BinaryIO) -> None:
        self._stream = stream
        self._thread = ThreadPoolExecutor(1)
        self._busy: Future[None] | None = None
        self.digest = hashlib.sha256()
        """Of all that was written, when the writer is closed."""
        self.written = 0

    def __enter__(self) -> _HashingWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._thread.shutdown()
        self._wait()

    def write(self, data: bytes | memoryview) -> None:
        """Take what must not change any more."""
        self._wait()
        self._busy = self._thread.submit(self._put, data)
        self.written += len(data)

    def _put(self, data: bytes | memoryview) -> None:
        self._stream.write(data)
        self.digest.update(data)

    def _wait(self) -> None:
        if self._busy is not None:
            self._busy.result()
            self._busy = None
