"""Lazy weights: where a parameter's numbers come from, and how they are merged and encoded, before any byte is read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import EncodedArray, Encoding


class LazyTensor(Protocol):
    """A checkpoint tensor that is read only when asked for."""

    @property
    def name(self) -> str: ...
    @property
    def shape(self) -> tuple[int, ...]: ...
    @property
    def encoding(self) -> Encoding:
        """How `read` yields it."""

    @property
    def format(self) -> str:
        """What the checkpoint calls the way it is stored: `BF16`, `Q4_K`, `F8_E4M3`."""

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows `start:stop` of the first axis, exactly as stored."""


@runtime_checkable
class TurnedTensor(LazyTensor, Protocol):
    """A matrix that the checkpoint stores transposed: a piece that transposes it reads `turned`, codes and all."""

    @property
    def turned(self) -> LazyTensor: ...


@runtime_checkable
class ReencodedTensor(LazyTensor, Protocol):
    """A tensor that is not kept as it is read."""

    @property
    def kept(self) -> Encoding:
        """What to store it in, if nothing else is asked for."""


def kept_encoding(tensor: LazyTensor) -> Encoding:
    """How a tensor is stored, if nothing else is asked for."""
    return tensor.kept if isinstance(tensor, ReencodedTensor) else tensor.encoding


class TensorSource(Protocol):
    """A checkpoint under the names that the model's parameters have in its Hugging Face implementation."""

    def __getitem__(self, name: str) -> LazyTensor:
        """Raises UserError, naming the tensor, if the checkpoint lacks it."""

    def __contains__(self, name: object) -> bool: ...
    def __iter__(self) -> Iterator[str]: ...


@dataclass(frozen=True)
class Piece:
    """One source of a parameter: a checkpoint tensor, transposed first if the model stores it [in, out]."""

    tensor: str
    transpose: bool = False
    start: int = 0
    """First row taken, after the transpose."""
    stop: int | None = None


@dataclass(frozen=True)
class Recipe:
    """How a parameter is made: pieces are joined along axis 0, then stored in `encoding`.

    A constant computed at compile time (a RoPE table, a folded expression) has `constant` instead of pieces.
    """

    pieces: tuple[Piece, ...] = ()
    encoding: Encoding | None = None
    """None keeps what the checkpoint has; pieces that differ are then decoded to float32."""
    constant: Constant | None = None


@dataclass(frozen=True, eq=False)
class Constant:
    """An array that is part of the graph; compared by its content hash."""

    array: npt.NDArray[np.generic]

    @property
    def digest(self) -> str:
        """SHA-256 over dtype, shape and bytes."""
        import hashlib

        head = f"{self.array.dtype}{self.array.shape}".encode()
        return hashlib.sha256(head + np.ascontiguousarray(self.array).tobytes()).hexdigest()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Constant) and self.digest == other.digest

    def __hash__(self) -> int:
        return hash(self.digest)
