"""A checkpoint in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from toolkit.runtime.encodings import EncodedArray, Encoding
from toolkit.runtime.errors import UserError


@dataclass(frozen=True)
class Stored:
    """A tensor of it."""

    name: str
    array: EncodedArray

    @property
    def shape(self) -> tuple[int, ...]:
        return self.array.shape

    @property
    def encoding(self) -> Encoding:
        return self.array.encoding

    @property
    def format(self) -> str:
        return self.array.encoding.name.upper()

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        return self.array.rows(start, len(self.array.data) if stop is None else stop)


@dataclass(frozen=True)
class Memory:
    """A `TensorSource` of tensors in memory."""

    arrays: dict[str, EncodedArray]

    @staticmethod
    def of(**arrays: EncodedArray) -> Memory:
        return Memory(arrays)

    def __getitem__(self, name: str) -> Stored:
        if name not in self.arrays:
            raise UserError(f"the checkpoint lacks {name}")
        return Stored(name, self.arrays[name])

    def __contains__(self, name: object) -> bool:
        return name in self.arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self.arrays)
