"""Random weights for a model that has a config but no checkpoint: reproducible, and as fast as memory nearly."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from statistics import NormalDist

import numpy as np

from ..compiler.quantize import encode
from ..runtime.encodings import Array, EncodedArray, Encoding
from ..runtime.errors import UserError

DEVIATION = 0.02
_BLOCK = 1 << 22
"""Values drawn from one stream: a block starts at the same row whatever rows are asked for."""


@dataclass(frozen=True)
class RandomTensor:
    """A `LazyTensor` of normal(`mean`, 0.02), the same for a name and seed however its rows are read."""

    name: str
    shape: tuple[int, ...]
    encoding: Encoding
    seed: int
    mean: float = 0.0

    @property
    def format(self) -> str:
        return "random"

    def read(self, start: int = 0, stop: int | None = None) -> EncodedArray:
        """Rows `start:stop` of the first axis."""
        first, last, _ = slice(start, stop).indices(self.shape[0])
        size = max(1, _BLOCK // max(1, math.prod(self.shape[1:])))
        blocks = [self._block(number, size) for number in range(first // size, -(-last // size))]
        if not blocks:
            return EncodedArray(self.encoding, self._block(0, size)[:0])
        values = blocks[0] if len(blocks) == 1 else np.concatenate(blocks)
        skip = first // size * size
        return EncodedArray(self.encoding, values[first - skip : last - skip])

    def _block(self, number: int, size: int) -> Array:
        """Rows `number * size` on, at most `size`: 16 random bits pick one of 65536 quantiles of the distribution."""
        digest = hashlib.sha256(f"{self.seed}/{self.name}/{number}".encode()).digest()
        generator = np.random.Philox(key=int.from_bytes(digest[:16], "little"))
        shape = (min(size, self.shape[0] - number * size), *self.shape[1:])
        count = math.prod(shape)
        bits = generator.random_raw(-(-count // 4)).astype("<u8", copy=False).view("<u2")[:count]
        values: Array = _quantiles(self.encoding, self.mean)[bits].reshape(shape)
        return values


@cache
def _quantiles(encoding: Encoding, mean: float) -> Array:
    distribution = NormalDist(mean, DEVIATION)
    values = np.array([distribution.inv_cdf((index + 0.5) / 65536) for index in range(65536)], np.float32)
    return encode(values, encoding).data


class RandomSource:
    """A `TensorSource` of random weights: vectors named `weight` (norms) are near 1, all others near 0."""

    def __init__(self, shapes: Mapping[str, tuple[int, ...]], seed: int, encoding: Encoding) -> None:
        self._tensors = {
            name: RandomTensor(name, shape, encoding, seed, float(name.endswith("weight") and len(shape) == 1))
            for name, shape in shapes.items()
        }

    def __getitem__(self, name: str) -> RandomTensor:
        if name not in self._tensors:
            raise UserError(f"The model that the config describes has no tensor {name}.")
        return self._tensors[name]

    def __contains__(self, name: object) -> bool:
        return name in self._tensors

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)
