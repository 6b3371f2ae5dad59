"""Where the scale of an activation's channels can move: into rows of the weights that make it, exactly.

Dividing the channels of a linear layer's input by s and multiplying the columns of its weight by s changes nothing that
it computes, and folding the division into what makes the input costs nothing when the model runs.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from math import prod

import numpy as np
import numpy.typing as npt

from ..ir import Graph, Op, Param, Value
from ..op_spec import bool_attr, float_attr, int_attr
from ..shapes import Dim

Index = npt.NDArray[np.intp]


@dataclass(frozen=True)
class Target:
    """A parameter whose rows are divided: row = (row + offset) / divisor - offset."""

    param: Param
    offset: float = 0.0


@dataclass(frozen=True)
class Fold:
    """What makes the channels of a value."""

    targets: tuple[Target, ...]
    rows: Index
    """[C]: the row of every target that makes channel c. Channels of one row must have one divisor."""


class Folds:
    """Finds folds in a captured graph, whose attention reads its values as they are."""

    def __init__(self, graph: Graph) -> None:
        self._producers = graph.producers()
        self._users = graph.uses()
        self._outputs = {value.name for value in graph.outputs}
        self._params = {param.value.name: param for param in graph.params}
        self._tensors = Counter(piece.tensor for param in graph.params for piece in param.recipe.pieces)

    def of(self, value: Value) -> Fold | None:
        """How the channels of a value, all of whose readers take part, can be divided; None if they can't."""
        if value.name in self._outputs:
            return None
        return self._fold(value, np.arange(_channels(value)))

    def replaceable(self, param: Param) -> bool:
        """Whether a parameter is one whole tensor of the checkpoint that no other has a part in."""
        pieces = param.recipe.pieces
        whole = len(pieces) == 1 and pieces[0].start == 0 and pieces[0].stop is None
        return whole and self._tensors[pieces[0].tensor] == 1

    def _fold(self, value: Value, channels: Index) -> Fold | None:
        """The fold of some channels of a value, given in the order of the value's elements behind its first axis."""
        op = self._producers.get(value.name)
        if op is None:
            return None
        if op.kind == "linear":
            return None if op.attrs["epilogue"] else self._rows(op, 0.0, channels)
        if op.kind == "norm":
            size = _channels(op.inputs[1]) if bool_attr(op.attrs, "has_weight") else 0
            return self._rows(op, float_attr(op.attrs, "offset"), channels % size) if size else None
        if op.kind == "attention":
            return self._through(op, 2, _shared_heads(op, channels))
        if op.kind == "slice" and int_attr(op.attrs, "axis") > 0:
            return self._through(op, 0, _sliced(op, channels))
        if op.kind == "mul" and len(op.inputs) == 2:
            same = [index for index in (0, 1) if op.inputs[index].type.shape == value.type.shape]
            found = (self._through(op, index, channels) for index in same)
            return next((fold for fold in found if fold is not None), None)
        if op.kind in ("mul", "cast") or (op.kind == "activation" and op.attrs["kind"] == "relu"):
            return self._through(op, 0, channels)
        if op.kind == "reshape" and op.inputs[0].type.shape[0] == value.type.shape[0]:
            return self._through(op, 0, channels)
        return None

    def _through(self, op: Op, index: int, channels: Index) -> Fold | None:
        """The fold of an op's input, of which nobody else reads these channels."""
        value = op.inputs[index]
        if value.name in self._outputs or op.inputs.count(value) > 1:
            return None
        mine = set(channels.tolist())
        for user in self._users[value.name]:
            if user != op and (user.kind != "slice" or mine & set(_sliced(user, None).tolist())):
                return None
        return self._fold(value, channels)

    def _rows(self, op: Op, offset: float, rows: Index) -> Fold | None:
        """The fold into the weight and the bias of a linear layer or norm."""
        flags = (True, bool_attr(op.attrs, "has_bias"))
        params = [self._params.get(value.name) for value, given in zip(op.inputs[1:], flags, strict=False) if given]
        targets = []
        for param, moved in zip(params, (offset, 0.0), strict=False):
            if param is None or not self.replaceable(param) or self._users[param.value.name] != [op]:
                return None
            targets.append(Target(param, moved))
        return Fold(tuple(targets), rows)


def _channels(value: Value) -> int:
    """Elements behind the first axis; of a parameter, all."""
    shape = value.type.shape
    return prod(map(_static, shape if len(shape) == 1 else shape[1:]))


def _shared_heads(op: Op, channels: Index) -> Index:
    """Channels of an attention's values [Hk, Dv] behind those of its result [Hq, Dv]."""
    (_, heads, width), kv_heads = op.output.type.shape, op.inputs[1].type.shape[1]
    head, column = np.divmod(channels, _static(width))
    shared: Index = head // (_static(heads) // _static(kv_heads)) * _static(width) + column
    return shared


def _sliced(op: Op, channels: Index | None) -> Index:
    """Channels of a slice's input behind those of its result; None means all."""
    shape = tuple(map(_static, op.inputs[0].type.shape[1:]))
    where = [slice(None)] * len(shape)
    where[int_attr(op.attrs, "axis") - 1] = slice(int_attr(op.attrs, "start"), int_attr(op.attrs, "stop"))
    taken: Index = np.arange(prod(shape)).reshape(shape)[tuple(where)].ravel()
    return taken if channels is None else taken[channels]


def _static(dim: Dim) -> int:
    assert isinstance(dim, int)
    return dim
