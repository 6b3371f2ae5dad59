"""Collects IR ops while a model is translated: merges layout changes, stamps out repeated layers, drops dead ops."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from ..compiler.ir import Attr, Graph, Op, Param, Source, Value
from ..compiler.op_spec import ir_dtype
from ..compiler.ops import make_op
from ..compiler.shapes import DType, Shape, Sym, TensorType
from ..compiler.weights import Constant, Piece, Recipe

BINARY = ("add", "sub", "mul", "div", "pow", "maximum", "minimum")


UNKNOWN = "unknown"
"""Kind of what is no op."""


class LayersDiffer(Exception):
    """Two layers that should be alike became different ops: they have to be captured one by one."""


@dataclass(frozen=True)
class Span:
    """The ops of one layer, and the one value that goes in and comes out."""

    index: int
    ops: tuple[Op, ...]
    input: Value
    output: Value


class Emitter:
    """A graph under construction. `layers` is the module path of the list of layers, "" if there is none.

    Values that depend on no layer (rotary tables at the positions) are shared: they come first in the graph.
    """

    def __init__(self, layers: str = "") -> None:
        self.source = Source()
        self.layers = layers
        self._inputs: list[Value] = []
        self._params: dict[object, Param] = {}
        self._shared: dict[object, Op] = {}
        self._ops: list[Op] = []
        self._producers: dict[str, Op] = {}
        self._taken: set[str] = set()
        self._counts: dict[str, int] = {}
        self._open: dict[int, tuple[int, Value]] = {}
        self._spans: dict[int, Span] = {}

    # values

    def input(self, name: str, dtype: DType, shape: Shape) -> Value:
        """A step input."""
        self._taken.add(name)
        self._inputs.append(Value(name, TensorType(dtype, shape)))
        return self._inputs[-1]

    def weight(self, tensor: str, shape: tuple[int, ...], *, transpose: bool = False, start: int = 0) -> Value:
        """A checkpoint tensor as a parameter; one of `shape` [in, out] can be transposed, or begin at a later row."""
        piece = Piece(tensor, transpose, start)
        rows, *rest = reversed(shape) if transpose else shape
        return self._param(piece, tensor, Recipe((piece,)), TensorType("float32", (rows - start, *rest)))

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> Value:
        """An array that is part of the graph; equal ones are one parameter."""
        constant = Constant(array)
        return self._param(constant, name, Recipe(constant=constant), TensorType(ir_dtype(array), array.shape))

    def _param(self, key: object, name: str, recipe: Recipe, kind: TensorType) -> Value:
        if key not in self._params:
            self._params[key] = Param(Value(self._fresh(name), kind), recipe)
        return self._params[key].value

    def _fresh(self, hint: str) -> str:
        name = hint
        while name in self._taken:
            self._counts[hint] = self._counts.get(hint, 0) + 1
            name = f"{hint}_{self._counts[hint]}"
        self._taken.add(name)
        return name

    # ops

    def emit(self, kind: str, /, *inputs: Value, **attrs: Attr) -> Value:
        """Append an op with one result. Raises ValueError where it would be illegal."""
        return self._append(make_op(kind, inputs, (self._fresh(kind),), attrs, self.source))

    def unknown(self, inputs: Sequence[Value], kind: TensorType) -> Value:
        """The result of something that has no op: it stands in, so that what reads it can be translated."""
        return self._append(Op(UNKNOWN, tuple(inputs), (Value(self._fresh(UNKNOWN), kind),), {}, self.source))

    def share(self, kind: str, /, *inputs: Value, **attrs: Attr) -> Value:
        """An op on inputs and parameters only, emitted once for the whole graph."""
        key = (kind, *(value.name for value in inputs), *sorted(attrs.items()))
        if key not in self._shared:
            op = make_op(kind, inputs, (self._fresh(kind),), attrs, self.source)
            self._shared[key] = self._producers[op.output.name] = op
        return self._shared[key].output

    def producer(self, value: Value, kind: str) -> Op | None:
        """The op that makes a value, if it is of that kind."""
        op = self._producers.get(value.name)
        return op if op is not None and op.kind == kind else None

    def _append(self, op: Op) -> Value:
        self._ops.append(op)
        self._producers[op.output.name] = op
        return op.output

    def rowwise(self, kind: str, x: Value, /, *others: Value, **attrs: Attr) -> Value:
        """An op that treats every row of the last axis alike: it moves above a transpose of the other axes.

        `others` are weights of that axis.
        """
        inner, perm = self.untransposed(x)
        if perm[-1:] != (len(perm) - 1,) or any(len(other.type.shape) > 1 for other in others):
            return self.emit(kind, x, *others, **attrs)
        return self.transpose(self.emit(kind, inner, *others, **attrs), perm)

    def broadcast(self, kind: str, a: Value, b: Value) -> Value:
        """A pointwise op of two values; it moves above a transpose of either, where the other is turned back."""
        (_, left), (_, right) = self.untransposed(a), self.untransposed(b)
        perm = left if left != tuple(range(len(left))) else right
        if len(left) != len(right) or perm == tuple(range(len(perm))):
            return self.emit(kind, a, b)
        back = tuple(perm.index(axis) for axis in range(len(perm)))
        return self.transpose(self.emit(kind, self.transpose(a, back), self.transpose(b, back)), perm)

    def untransposed(self, x: Value) -> tuple[Value, tuple[int, ...]]:
        """What `x` is a transpose of, and the permutation."""
        op = self.producer(x, "transpose")
        if op is None:
            return x, tuple(range(len(x.type.shape)))
        perm = op.attrs["perm"]
        assert isinstance(perm, tuple)
        return op.inputs[0], tuple(int(axis) for axis in perm)

    def transpose(self, x: Value, perm: Sequence[int]) -> Value:
        """Permute axes; a permutation of a permutation is one, or none."""
        inner, first = self.untransposed(x)
        both = tuple(first[axis] for axis in perm)
        return inner if both == tuple(range(len(both))) else self.emit("transpose", inner, perm=both)

    def reshape(self, x: Value, shape: Shape) -> Value:
        """Another shape; a reshape of a reshape is one, or none."""
        op = self.producer(x, "reshape")
        inner = op.inputs[0] if op is not None else x
        if inner.type.shape == shape:
            return inner
        return self.emit("reshape", inner, shape=tuple(-1 if isinstance(dim, Sym) else dim for dim in shape))

    def slice(self, x: Value, axis: int, start: int, stop: int) -> Value:
        """Part of an axis; it moves above a transpose."""
        if (start, stop) == (0, x.type.shape[axis]):
            return x
        inner, perm = self.untransposed(x)
        return self.transpose(self.emit("slice", inner, axis=perm[axis], start=start, stop=stop), perm)

    def concat(self, parts: Sequence[Value], axis: int) -> Value:
        """Join along an axis; it moves above equal transposes. A rotated part and the rest are one partial rotation."""
        inner = [self.untransposed(part) for part in parts]
        if len({perm for _, perm in inner}) == 1 and inner[0][1] != tuple(range(len(inner[0][1]))):
            perm = inner[0][1]
            return self.transpose(self.concat([value for value, _ in inner], perm[axis]), perm)
        return self._partial_rope(parts, axis) or self.emit("concat", *parts, axis=axis)

    def _partial_rope(self, parts: Sequence[Value], axis: int) -> Value | None:
        """rope(x[.., :r]) joined with x[.., r:] is rope(x)."""
        rope = self.producer(parts[0], "rope")
        if rope is None or len(parts) != 2 or axis != 2:
            return None
        first, rest = self.producer(rope.inputs[0], "slice"), self.producer(parts[1], "slice")
        if first is None or rest is None or first.inputs != rest.inputs:
            return None
        whole = first.inputs[0]
        found = [(op.attrs["axis"], op.attrs["start"], op.attrs["stop"]) for op in (first, rest)]
        width, cut = whole.type.shape[2], rope.inputs[0].type.shape[2]
        if found != [(2, 0, cut), (2, cut, width)]:
            return None
        return self.emit("rope", whole, *rope.inputs[1:], **rope.attrs)

    def repeat(self, x: Value, axis: int, times: int) -> Value:
        """Equal parts along an axis."""
        return x if times == 1 else self.concat([x] * times, axis)

    def ungrouped(self, key: Value, value: Value) -> tuple[Value, Value]:
        """Keys and values [T, Hq, D] of attention, each head once if they were repeated for groups of queries."""
        found = self._unrepeated(key), self._unrepeated(value)
        return (key, value) if found[0].type.shape[1] != found[1].type.shape[1] else found

    def _unrepeated(self, x: Value) -> Value:
        """Heads [T, Hk, D] which x[T, Hk * n, D] has n times each; a rotation moves behind that."""
        rope = self.producer(x, "rope")
        if rope is not None:
            inner = self._unrepeated(rope.inputs[0])
            return x if inner == rope.inputs[0] else self.emit("rope", inner, *rope.inputs[1:], **rope.attrs)
        reshape = self.producer(x, "reshape")
        joined = self.producer(reshape.inputs[0], "concat") if reshape is not None else None
        if joined is None or joined.attrs["axis"] != 2 or len(set(joined.inputs)) > 1:
            return x
        tokens, heads, *rest = joined.inputs[0].type.shape
        if rest != [1, *x.type.shape[2:]]:
            return x
        return self.reshape(joined.inputs[0], (tokens, heads, *x.type.shape[2:]))

    def take_rows(self, x: Value, rows: Value) -> Value:
        """The rows that need logits, taken before a norm or whatever else treats each row alone."""
        op = self._producers.get(x.name)
        if op is not None and op.kind in ("norm", "activation", *BINARY) and self._is_rowwise(op):
            inputs = self.take_rows(op.inputs[0], rows), *op.inputs[1:]
            return self._append(make_op(op.kind, inputs, (self._fresh(op.kind),), op.attrs, op.source))
        return self.emit("take_rows", x, rows)

    def _is_rowwise(self, op: Op) -> bool:
        weights = {param.value.name for param in self._params.values()}
        others = op.inputs[1:]
        return len(op.output.type.shape) == 2 and all(v.name in weights and len(v.type.shape) == 1 for v in others)

    # layers

    @property
    def layer(self) -> int | None:
        """The layer that the op now translated belongs to."""
        inside = self.source.module.removeprefix(f"{self.layers}.").partition(".")[0]
        return int(inside) if self.layers and inside.isdecimal() else None

    def begin_layer(self, index: int, x: Value) -> Value:
        """The ops from here to `end_layer` are this layer's."""
        self._open[index] = (len(self._ops), x)
        return x

    def end_layer(self, index: int, like: int, x: Value) -> Value:
        """Close a layer. Raises LayersDiffer unless it is as the layer `like`."""
        start, begin = self._open.pop(index)
        self._spans[index] = Span(index, tuple(self._ops[start:]), begin, x)
        if like != index and self._form(self._spans[index]) != self._form(self._spans[like]):
            raise LayersDiffer(f"layers {like} and {index}")
        return x

    def _form(self, span: Span) -> object:
        """A layer's ops without what tells two layers apart."""
        numbers = {span.input.name: "input"}
        numbers |= {value.name: f"{n}" for n, op in enumerate(span.ops) for value in op.outputs}
        weights = {param.value.name: self._rename(param, span.index, -1) for param in self._params.values()}
        ops = [
            (
                op.kind,
                tuple(
                    numbers.get(value.name) or (weights.get(value.name) or value.name, value.type)
                    for value in op.inputs
                ),
                dict(op.attrs) | {name: 0 for name in ("layer",) if name in op.attrs},
            )
            for op in span.ops
        ]
        return ops, numbers.get(span.output.name, span.output)

    def _rename(self, param: Param, index: int, to: int) -> Piece | None:
        """The same weight of another layer, if it is a layer's."""
        old, new = f"{self.layers}.{index}.", f"{self.layers}.{to}."
        if not param.recipe.pieces or not param.recipe.pieces[0].tensor.startswith(old):
            return None
        (piece,) = param.recipe.pieces
        return replace(piece, tensor=new + piece.tensor[len(old) :])

    def repeat_layer(self, index: int, like: int, x: Value) -> Value:
        """The ops of the layer `like` again, with this layer's weights and input."""
        span = self._spans[like]
        known = {span.input.name: x}
        for param in list(self._params.values()):
            piece = self._rename(param, like, index)
            if piece is not None:
                known[param.value.name] = self._param(piece, piece.tensor, Recipe((piece,)), param.value.type)
        old, new = f"{self.layers}.{like}", f"{self.layers}.{index}"
        for op in span.ops:
            module = op.source.module
            if module == old or module.startswith(old + "."):
                module = new + module[len(old) :]
            attrs = dict(op.attrs) | {name: index for name in ("layer",) if name in op.attrs}
            inputs = [known.get(value.name, value) for value in op.inputs]
            outputs = tuple(Value(self._fresh(op.kind), value.type) for value in op.outputs)
            copied = Op(op.kind, tuple(inputs), outputs, attrs, Source(module, op.source.line))
            known[op.output.name] = self._append(copied)
        return known.get(span.output.name, span.output)

    # the graph

    def finish(self, result: Value, name: str) -> Graph:
        """The graph of what the result needs; its output is the result under this name."""
        output = Value(self._fresh(name), result.type)
        needed = {result.name}
        ops: list[Op] = []
        for op in reversed([*self._shared.values(), *self._ops]):
            if op.output.name in needed:
                needed.update(value.name for value in op.inputs)
                ops.append(replace(op, outputs=(output,)) if op.output == result else op)
        params = [param for param in self._params.values() if param.value.name in needed]
        return Graph(tuple(self._inputs), tuple(params), tuple(reversed(ops)), (output,))
