"""The GGUF container: metadata and a directory of tensors, read with every length checked against the file's size.

    file := "GGUF" version:u32 tensors:u64 pairs:u64 pair* tensor* padding data
    pair := key:string type:u32 value        tensor := name:string rank:u32 size:u64* type:u32 offset:u64

All integers are little endian. Versions 2 and 3 are read.
"""

from __future__ import annotations

import math
import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ..runtime.errors import UserError, shown
from .gguf_blocks import BLOCKS, BlockType

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
MAX_NAME = 512
"""Longest name of a tensor."""
_MAX_RANK = 4
_MAX_TENSORS = 1 << 20


@dataclass(frozen=True)
class GGUFTensor:
    """A directory entry. `shape` is in numpy order: rows first."""

    name: str
    shape: tuple[int, ...]
    type: BlockType
    offset: int
    """From the start of the file."""

    @property
    def row_bytes(self) -> int:
        return self.shape[-1] // self.type.size * self.type.bytes

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape[:-1]) * self.row_bytes


@dataclass(frozen=True)
class GGUFFile:
    """An open file. Arrays of numbers in `metadata` are numpy arrays, arrays of strings are lists."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GGUFTensor]

    def rows(self, tensor: GGUFTensor, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """The stored bytes of rows of a tensor, [rows, bytes a row]; a vector is one row.

        They are read and not mapped, so that memory holds no more than what is asked for.
        """
        first, last, _ = slice(start, stop).indices(math.prod(tensor.shape[:-1]))
        count, offset = max(0, last - first) * tensor.row_bytes, tensor.offset + first * tensor.row_bytes
        return np.fromfile(self.path, np.uint8, count, offset=offset).reshape(-1, tensor.row_bytes)


def read_gguf(path: Path) -> GGUFFile:
    """Open a file and read its header. Raises UserError where it is damaged or of an unknown kind."""
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            return _Parser(path, data).parse()
    except ValueError:  # an empty file cannot be mapped
        raise UserError(f"{path.name} is empty; download it again.") from None
    except OSError as error:
        raise UserError(f"{path.name} cannot be read: {error.strerror}.") from None


class _Parser:
    """A cursor over the mapped file that refuses to pass its end."""

    def __init__(self, path: Path, data: mmap.mmap) -> None:
        self.path, self.data, self.at = path, data, 0

    def parse(self) -> GGUFFile:
        if self.take(4) != b"GGUF":
            raise UserError(f"{self.path.name} is not a GGUF file: it starts with {self.data[:4]!r}, not b'GGUF'.")
        version = self.scalar("I")
        if version not in (2, 3):
            raise UserError(f"{self.path.name} is GGUF version {version}; versions 2 and 3 can be read.")
        tensor_count, pair_count = self.count(_MAX_TENSORS), self.count(_MAX_TENSORS)
        metadata = dict(self.pair() for _ in range(pair_count))
        entries = [self.tensor() for _ in range(tensor_count)]
        return GGUFFile(self.path, metadata, self.place(entries, metadata.get("general.alignment", 32)))

    def take(self, size: int) -> bytes:
        end = self.at + size
        if end > len(self.data):
            raise self.truncated()
        self.at, piece = end, self.data[self.at : end]
        return piece

    def truncated(self) -> UserError:
        return UserError(
            f"{self.path.name} is truncated or damaged: its header at byte {self.at} points past the end of the file "
            f"({len(self.data)} bytes); download it again."
        )

    def scalar(self, code: str) -> Any:
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def count(self, limit: int) -> int:
        """A 64-bit count of things that take at least a byte each."""
        count: int = self.scalar("Q")
        if count > min(limit, len(self.data) - self.at):
            raise self.truncated()
        return count

    def string(self) -> str:
        return self.take(self.count(len(self.data))).decode("utf-8", "replace")

    def pair(self) -> tuple[str, Any]:
        return self.string(), self.value(self.scalar("I"))

    def value(self, kind: int) -> Any:
        if kind in _SCALARS:
            return self.scalar(_SCALARS[kind])
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            return self.array()
        raise UserError(f"{self.path.name} has a metadata value of unknown type {kind}; the file is damaged.")

    def array(self) -> Any:
        kind, count = self.scalar("I"), self.count(len(self.data))
        if kind == _STRING:
            return [self.string() for _ in range(count)]
        if kind not in _SCALARS:
            raise UserError(f"{self.path.name} has a metadata array of unknown type {kind}; the file is damaged.")
        dtype = np.dtype(_SCALARS[kind]).newbyteorder("<")
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        name, rank = self.string(), self.scalar("I")
        if not name.isprintable() or len(name) > MAX_NAME:
            raise UserError(f"{self.path.name} is damaged: a tensor has the name {shown(name)}; download it again.")
        if not 1 <= rank <= _MAX_RANK:
            raise UserError(f"{self.path.name}: tensor {name} has {rank} dimensions; the file is damaged.")
        sizes = tuple(self.scalar("Q") for _ in range(rank))
        return name, sizes[::-1], self.scalar("I"), self.scalar("Q")

    def place(self, entries: list[tuple[str, tuple[int, ...], int, int]], alignment: int) -> dict[str, GGUFTensor]:
        """Check every entry against the file and make its offset absolute."""
        if not isinstance(alignment, int) or alignment < 1 or alignment & (alignment - 1):
            raise UserError(f"{self.path.name}: general.alignment is {shown(alignment)}, not a power of two.")
        start = -(-self.at // alignment) * alignment
        placed: dict[str, GGUFTensor] = {}
        for name, shape, kind, offset in entries:
            if kind not in BLOCKS:
                known = ", ".join(block.name for block in BLOCKS.values())
                raise UserError(f"{self.path.name}: tensor {name} has GGUF type {kind}; supported are {known}.")
            tensor = GGUFTensor(name, shape, BLOCKS[kind], start + offset)
            if name in placed:
                raise UserError(f"{self.path.name} lists tensor {name} twice; the file is damaged.")
            if min(shape) < 1 or shape[-1] % tensor.type.size:
                raise UserError(f"{self.path.name}: {tensor.type.name} tensor {name} has the bad shape {list(shape)}.")
            if tensor.offset + tensor.nbytes > len(self.data):
                raise UserError(
                    f"{self.path.name} is truncated: tensor {name} ends at byte {tensor.offset + tensor.nbytes}, "
                    f"the file has {len(self.data)}; download it again."
                )
            placed[name] = tensor
        return placed
