"""What storing weights in another number format costs: the relative error of everything that was re-encoded."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby

import numpy as np
import numpy.typing as npt

from ..runtime.encodings import EncodedArray


@dataclass(frozen=True, order=True)
class Loss:
    """The error of some rows of a tensor."""

    format: str
    """What the checkpoint has, `Q6_K` say."""
    encoding: str
    tensor: str
    error: float
    """Sum of squared differences."""
    power: float
    """Sum of squared values."""


@dataclass(frozen=True)
class Losses:
    """Losses found while weights are packed, in whatever order that happens."""

    found: list[Loss] = field(default_factory=list)

    def add(self, tensor: str, format_: str, values: npt.NDArray[np.float32], stored: EncodedArray) -> None:
        """Compare rows of a tensor with what they are stored as."""
        difference, flat = (stored.decode() - values).ravel(), values.ravel()
        error = float(np.dot(difference, difference))
        if error > 0:
            self.found.append(Loss(format_, stored.encoding.name, tensor, error, float(np.dot(flat, flat))))

    def notes(self) -> Iterator[str]:
        """A sentence for each pair of formats: relative root mean square error of all tensors, and the worst one."""
        for (format_, encoding), group in groupby(sorted(self.found), lambda loss: (loss.format, loss.encoding)):
            losses = list(group)
            tensors = {name: _relative(rows) for name, rows in groupby(losses, lambda loss: loss.tensor)}
            worst = max(tensors, key=tensors.__getitem__)
            yield (
                f"{format_} stored as {encoding}: relative RMS error {_relative(losses):.2%} over {len(tensors)} "
                f"tensors, worst {tensors[worst]:.2%} in {worst}"
            )


def _relative(losses: Iterable[Loss]) -> float:
    error, power = map(sum, zip(*((loss.error, loss.power) for loss in losses), strict=True))
    return math.sqrt(error / power) if power else math.inf
