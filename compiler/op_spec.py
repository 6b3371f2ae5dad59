"""What a row of the op table says: attributes, shape rule, numpy meaning, expression and ONNX body."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import numpy.typing as npt

from ..kernels_templates.expression import Expression
from .ir import Attr, Op
from .shapes import Dim, DType, Shape, Sym, TensorType

Array = npt.NDArray[Any]
DTYPES: tuple[DType, ...] = ("float32", "float16", "bfloat16", "int64", "int32", "bool")
"""Every dtype that a tensor can have."""
Attrs = Mapping[str, Attr]
Types = Sequence[TensorType]
CacheState = Mapping[int, tuple[Array, Array]]
"""A cache's content: sequence id to keys[context, Hk, D] and values[context, Hk, Dv]."""


@dataclass(frozen=True)
class AttrSpec:
    """An attribute: its type, its default (None: it must be given) and, for a choice, its legal values."""

    type: Literal["int", "float", "bool", "str", "ints"]
    default: Attr | None = None
    choices: tuple[str, ...] = ()

    def accepts(self, value: Attr) -> bool:
        """Whether the value has this attribute's exact type and is a legal choice."""
        if self.type == "ints":
            return isinstance(value, tuple) and all(type(item) is int for item in value)
        legal = {"int": int, "float": float, "bool": bool, "str": str}[self.type]
        return type(value) is legal and (not self.choices or value in self.choices)


def declare(**specs: AttrSpec) -> Mapping[str, AttrSpec]:
    """Attributes by name."""
    return MappingProxyType(specs)


@dataclass(frozen=True)
class Packing:
    """How a step's T tokens are packed from S sequences."""

    seq_start: tuple[int, ...]
    """S + 1 token indices."""
    context: tuple[int, ...]
    """Tokens of each sequence including this step's."""
    ids: tuple[int, ...]
    """Which sequence each is, so that its cache is found again in the next step."""

    @staticmethod
    def from_positions(positions: Array, ids: Sequence[int] | None = None) -> Packing:
        """Sequences begin wherever a position does not follow the one before it."""
        jumps = [0, *(i for i in range(1, len(positions)) if positions[i] != positions[i - 1] + 1), len(positions)]
        context = tuple(int(positions[stop - 1]) + 1 for stop in jumps[1:])
        return Packing(tuple(jumps), context, tuple(ids) if ids is not None else tuple(range(len(context))))

    def lengths(self) -> Array:
        """The context of each token's sequence."""
        return np.repeat(np.array(self.context, np.int32), np.diff(self.seq_start))

    def sequences(self) -> list[tuple[int, slice, int]]:
        """Per sequence: its id, its tokens in the step, and the position of the first of them."""
        bounds = zip(self.ids, self.seq_start, self.seq_start[1:], self.context, strict=False)
        return [(name, slice(start, stop), context - (stop - start)) for name, start, stop, context in bounds]


class OnnxEmitter(Protocol):
    """What an op's ONNX body writes to."""

    def node(self, op_type: str, *inputs: str, output: str = "", **attrs: Attr) -> str:
        """Append a node with one output and return the output's name, a fresh one unless given."""

    def constant(self, array: Array | np.generic) -> str:
        """The name of a constant."""

    def past(self, layer: int, key: TensorType, value: TensorType) -> tuple[str, str]:
        """Names of a layer's explicit past keys[P, Hk, D] and values[P, Hk, Dv]."""

    def present(self, layer: int, key: str, value: str) -> None:
        """Declare a layer's keys and values after the step as outputs."""

    def distance(self) -> str:
        """The name of float32[T, P + T]: how many positions each key, past ones first, is behind each token."""

    def visible(self, causal: bool, window: int) -> str:
        """The name of bool[T, P + T]: which keys, past ones first, each token may attend to."""


class OpSpec(ABC):
    """A row of the op table. Instances hold no state."""

    kind: str
    attrs: ClassVar[Mapping[str, AttrSpec]] = declare()

    @abstractmethod
    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        """Types of the outputs. Raises ValueError saying what was expected and what was found."""

    @abstractmethod
    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Any, ...]:
        """The numpy meaning. Floats are float32; a value of dtype "cache" is a `CacheState`."""

    def expression(self, attrs: Attrs, inputs: int) -> Expression | None:
        """The op as a pointwise expression over `in0..`, or None if it is not pointwise."""
        return None

    def rows(self, types: Types, attrs: Attrs) -> tuple[Expression, ...] | None:
        """The outputs as expressions over `in0..` whose reductions are over the last axis, or None."""
        expression = self.expression(attrs, len(types))
        return None if expression is None else (expression,)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        """Write the op as ONNX nodes whose last output is named as the op's. Ops made by passes have no ONNX body."""
        raise ValueError(f"{self.kind} has no ONNX body: write the captured graph")


# --- typed access to attributes ---------------------------------------------------------------------------------------


def int_attr(attrs: Attrs, name: str) -> int:
    value = attrs[name]
    assert type(value) is int
    return value


def float_attr(attrs: Attrs, name: str) -> float:
    value = attrs[name]
    assert type(value) is float
    return value


def bool_attr(attrs: Attrs, name: str) -> bool:
    value = attrs[name]
    assert type(value) is bool
    return value


def str_attr(attrs: Attrs, name: str) -> str:
    value = attrs[name]
    assert type(value) is str
    return value


def ints_attr(attrs: Attrs, name: str) -> tuple[int, ...]:
    value = attrs[name]
    assert isinstance(value, tuple)
    return tuple(int(item) for item in value)


# --- checks and shapes ------------------------------------------------------------------------------------------------


def expect(good: bool, wanted: str, types: Types) -> None:
    """Raise ValueError unless `good`: what the op wants, and what its inputs are."""
    if not good:
        raise ValueError(f"expected {wanted}, found ({', '.join(map(str, types))})")


def broadcast(shapes: Sequence[Shape]) -> Shape:
    """The common shape under numpy's rule. Raises ValueError if there is none."""
    rank = max(map(len, shapes))
    return tuple(
        _broadcast_dim([shape[axis - rank + len(shape)] for shape in shapes if axis >= rank - len(shape)])
        for axis in range(rank)
    )


def _broadcast_dim(dims: Sequence[Dim]) -> Dim:
    wide = {dim for dim in dims if dim != 1}
    if len(wide) > 1:
        raise ValueError(f"expected equal dimensions or 1, found {', '.join(map(str, dims))}")
    return wide.pop() if wide else 1


def divide(dim: Dim, by: int) -> Dim:
    """`dim / by`, which must come out even."""
    count = dim.factor if isinstance(dim, Sym) else dim
    if by <= 0 or count % by:
        raise ValueError(f"expected a multiple of {by}, found {dim}")
    return Sym(dim.name, dim.bound, count // by) if isinstance(dim, Sym) else count // by


def to_numpy(dtype: DType) -> np.dtype[Any]:
    """The dtype in which values of an IR dtype are evaluated: every float is float32."""
    names = {"int32": np.int32, "int64": np.int64, "bool": np.bool_}
    return np.dtype(names.get(dtype, np.float32))


def ir_dtype(array: Array) -> DType:
    """The IR dtype of an array."""
    return next((dtype for dtype in DTYPES if np.dtype(to_numpy(dtype)) == array.dtype), "float32")
