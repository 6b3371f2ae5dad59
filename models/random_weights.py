"""Random weights for a model without a checkpoint: shapes alone, since the numbers are made when a plan is loaded."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..runtime.encodings import FLOAT32, EncodedArray, Encoding
from ..runtime.errors import InternalError, UserError


@dataclass(frozen=True)
class RandomTensor:
    """A `LazyTensor` that has no numbers: see `runtime.random_weights`."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding

    @property
    def format(self) -> str:
        return "random"

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Raises InternalError: what reads numbers must not be given random weights."""
        raise InternalError(f"rows {start}:{stop} of {self.name} were read, but random weights are made at load")


class RandomSource:
    """A `TensorSource` of random weights in one encoding.

    Rows of bfloat16 are packed in pairs of columns, so that an odd number of columns needs float32.
    """

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], encoding: Encoding) -> None:
        self._tensors = {
            name: RandomTensor(name, shape, FLOAT32 if shape[-1] % 2 else encoding) for name, shape in shapes.items()
        }

    def __getitem__(self, name: str) -> RandomTensor:
        if name not in self._tensors:
            raise UserError(f"The model that the config describes has no tensor {name}.")
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)
