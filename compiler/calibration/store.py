"""Tensors that calibration changed, spooled to disk in the place of the checkpoint's own."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from ...runtime.encodings import FLOAT32, Array, EncodedArray, Encoding
from ..ir import Param
from ..weights import LazyTensor, TensorSource

PARTS = EncodedArray.__struct_fields__[1:]
"""Fields of an `EncodedArray` that are arrays."""


@dataclass(frozen=True)
class SpooledTensor:
    """A `LazyTensor` in files of its own, one for each part of an `EncodedArray`."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    format: str
    """That of the tensor whose place it takes."""
    parts: Mapping[str, SpooledPart]

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows `start:stop` of the first axis."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        return EncodedArray(self.encoding, **{name: part.read(first, last) for name, part in self.parts.items()})


@dataclass(frozen=True)
class SpooledPart:
    """An array in a file."""

    path: Path
    dtype: np.dtype[Any]
    row: tuple[int, ...]
    """Shape of a row."""

    def read(self, first: int, last: int) -> Array:
        size = math.prod(self.row)
        flat: Array = np.fromfile(
            self.path, self.dtype, (last - first) * size, offset=first * size * self.dtype.itemsize
        )
        return flat.reshape(last - first, *self.row)


def _write(path: Path, chunks: Iterable[EncodedArray]) -> dict[str, SpooledPart]:
    """Store the parts of chunks of rows in files whose names begin so."""
    parts: dict[str, SpooledPart] = {}
    with ExitStack() as files:
        streams: dict[str, BinaryIO] = {}
        for chunk in chunks:
            for name in PARTS:
                array: Array | None = getattr(chunk, name)
                if array is None:
                    continue
                if name not in parts:
                    parts[name] = SpooledPart(path.with_suffix(f".{name}"), array.dtype, array.shape[1:])
                    streams[name] = files.enter_context(open(parts[name].path, "wb"))
                np.ascontiguousarray(array).tofile(streams[name])
    return parts


@dataclass(frozen=True)
class TurnedSpooledTensor:
    """A `TurnedTensor`: a matrix [in, out] whose `turned` is spooled."""

    turned: SpooledTensor

    @property
    def name(self) -> str:
        return self.turned.name

    @property
    def format(self) -> str:
        return self.turned.format

    @property
    def shape(self) -> tuple[int, ...]:
        return self.turned.shape[::-1]

    @property
    def encoding(self) -> Encoding:
        return FLOAT32

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows `start:stop`; the whole matrix is decoded each time."""
        return EncodedArray(FLOAT32, np.ascontiguousarray(self.turned.read().decode().T[start:stop]))


class CalibratedSource:
    """A `TensorSource`: the checkpoint, but for the tensors that calibration put in their place."""

    def __init__(self, checkpoint: TensorSource, folder: Path) -> None:
        """`folder` exists, and stays until the last tensor has been read."""
        self._checkpoint = checkpoint
        self._folder = folder
        self._spooled: dict[str, SpooledTensor | TurnedSpooledTensor] = {}
        self._written = count()

    def __getitem__(self, name: str) -> LazyTensor:
        return self._spooled.get(name) or self._checkpoint[name]

    def __contains__(self, name: object) -> bool:
        return name in self._checkpoint

    def __iter__(self) -> Iterator[str]:
        return iter(self._checkpoint)

    def put(self, param: Param, encoding: Encoding, chunks: Iterable[EncodedArray]) -> None:
        """Give a parameter, which is one whole tensor, other rows."""
        (piece,) = param.recipe.pieces
        shape = tuple(size for size in param.value.type.shape if isinstance(size, int))
        parts = _write(self._folder / str(next(self._written)), chunks)
        tensor = SpooledTensor(piece.tensor, shape, encoding, self._checkpoint[piece.tensor].format, parts)
        self._spooled[piece.tensor] = TurnedSpooledTensor(tensor) if piece.transpose else tensor
