"""Element types, symbolic dimensions and tensor types."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["float32", "float16", "bfloat16", "int64", "int32", "bool", "cache"]
"""Element type of a value. "cache" marks a cache state, which has no shape (see `ir.Graph.caches`)."""


@dataclass(frozen=True)
class Sym:
    """A dimension known only at run time: `factor` times a named count, which is between 1 and `bound`."""

    name: str
    """`T` tokens in the step, `S` sequences in it, `R` rows that need logits."""
    bound: int
    factor: int = 1

    def __str__(self) -> str:
        return self.name if self.factor == 1 else f"{self.factor}*{self.name}"

    @property
    def largest(self) -> int:
        return self.bound * self.factor


Dim = int | Sym
Shape = tuple[Dim, ...]


def largest(dim: Dim) -> int:
    """The largest value a dimension can take."""
    return dim.largest if isinstance(dim, Sym) else dim


def product(shape: Shape) -> Dim:
    """The number of elements: at most one symbol may occur."""
    count, symbol = 1, None
    for dim in shape:
        if isinstance(dim, Sym):
            if symbol is not None:
                raise ValueError(f"shape {shape} has more than one symbolic dimension")
            symbol, count = dim, count * dim.factor
        else:
            count *= dim
    return count if symbol is None else Sym(symbol.name, symbol.bound, count)


@dataclass(frozen=True)
class TensorType:
    """Element type and shape of a value, row-major."""

    dtype: DType
    shape: Shape

    def __str__(self) -> str:
        return f"{self.dtype}[{', '.join(map(str, self.shape))}]"


CACHE = TensorType("cache", ())


@dataclass(frozen=True)
class Bounds:
    """Limits of one step: the bounds of the symbols T, S and R, and the longest sequence."""

    max_tokens: int
    max_sequences: int
    max_rows: int
    max_context: int
    """Most tokens of a sequence, prompt and output together."""

    def largest(self, dim: Dim) -> int:
        """The largest value a dimension takes in such a step."""
        if isinstance(dim, int):
            return dim
        return dim.factor * {"T": self.max_tokens, "S": self.max_sequences, "R": self.max_rows}[dim.name]
