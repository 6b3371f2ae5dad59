"""Rows of the op table: pointwise work, reductions and changes of shape."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels_templates import expression as ex
from .ir import Op
from .op_spec import (
    DTYPES,
    Array,
    Attrs,
    AttrSpec,
    OnnxEmitter,
    OpSpec,
    Packing,
    Types,
    bool_attr,
    broadcast,
    declare,
    divide,
    expect,
    float_attr,
    int_attr,
    ints_attr,
    ir_dtype,
    str_attr,
    to_numpy,
)
from .shapes import Dim, TensorType, product

COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


class PointwiseSpec(OpSpec):
    """An op whose meaning is its expression."""

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        expect(self.expression(attrs, len(types)) is not None, f"the inputs of {self.kind}", types)
        return (TensorType(types[0].dtype, broadcast([t.shape for t in types])),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        body = self.expression(attrs, len(inputs))
        assert body is not None
        (out,) = self.infer([TensorType(ir_dtype(x), x.shape) for x in inputs], attrs)
        result = np.broadcast_to(ex.evaluate(body, list(inputs)), np.broadcast_shapes(*(x.shape for x in inputs)))
        return (result.astype(to_numpy(out.dtype)),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        body = self.expression(op.attrs, len(inputs))
        assert body is not None
        emit.node("Identity", _onnx_expression(emit, body, inputs), output=op.output.name)


class Activation(PointwiseSpec):
    """(x) -> x"""

    kind = "activation"
    attrs = declare(kind=AttrSpec("str", None, tuple(ex.UNARY)))

    def expression(self, attrs: Attrs, inputs: int) -> ex.Expression | None:
        return ex.Call(str_attr(attrs, "kind"), (ex.Input(0),)) if inputs == 1 else None


class Binary(PointwiseSpec):
    """(a, b?) -> broadcast"""

    attrs = declare(scalar=AttrSpec("float", 0.0), reverse=AttrSpec("bool", False))

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def expression(self, attrs: Attrs, inputs: int) -> ex.Expression | None:
        return _binary(self.kind, attrs, inputs, bool_attr(attrs, "reverse"))


def _binary(operator: str, attrs: Attrs, inputs: int, reverse: bool) -> ex.Expression | None:
    if inputs not in (1, 2):
        return None
    other = ex.Input(1) if inputs == 2 else ex.Number(float_attr(attrs, "scalar"))
    return ex.Call(operator, (other, ex.Input(0)) if reverse else (ex.Input(0), other))


class Compare(PointwiseSpec):
    """(a, b?) -> bool"""

    kind = "compare"
    attrs = declare(op=AttrSpec("str", None, COMPARISONS), scalar=AttrSpec("float", 0.0))

    def expression(self, attrs: Attrs, inputs: int) -> ex.Expression | None:
        return _binary(str_attr(attrs, "op"), attrs, inputs, reverse=False)

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (out,) = super().infer(types, attrs)
        return (TensorType("bool", out.shape),)


class Where(PointwiseSpec):
    """(c, a, b) -> broadcast"""

    kind = "where"

    def expression(self, attrs: Attrs, inputs: int) -> ex.Expression | None:
        return ex.Call("where", (ex.Input(0), ex.Input(1), ex.Input(2))) if inputs == 3 else None

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (out,) = super().infer(types, attrs)
        expect(types[0].dtype == "bool" and types[1].dtype == types[2].dtype, "a bool and two of one dtype", types)
        return (TensorType(types[1].dtype, out.shape),)


class Clamp(PointwiseSpec):
    """(x) -> x"""

    kind = "clamp"
    attrs = declare(low=AttrSpec("float", -math.inf), high=AttrSpec("float", math.inf))

    def expression(self, attrs: Attrs, inputs: int) -> ex.Expression | None:
        bounds = (ex.Number(float_attr(attrs, "low")), ex.Number(float_attr(attrs, "high")))
        return ex.Call("clamp", (ex.Input(0), *bounds)) if inputs == 1 else None


class Reduce(OpSpec):
    """(x) -> .."""

    kind = "reduce"
    attrs = declare(
        op=AttrSpec("str", None, ("sum", "mean", "max")),
        axis=AttrSpec("int", -1),
        keepdims=AttrSpec("bool", False),
    )

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        axis = int_attr(attrs, "axis")
        expect(len(types) == 1 and axis < len(types[0].shape), f"one input with axis {axis}", types)
        shape = types[0].shape
        kept: tuple[Dim, ...] = (1,) if bool_attr(attrs, "keepdims") else ()
        return (TensorType(types[0].dtype, (*shape[:axis], *kept, *shape[axis + 1 :])),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        function = getattr(inputs[0].astype(np.float64), str_attr(attrs, "op"))
        out = function(axis=int_attr(attrs, "axis"), keepdims=bool_attr(attrs, "keepdims"))
        return (np.asarray(out).astype(inputs[0].dtype),)

    def rows(self, types: Types, attrs: Attrs) -> tuple[ex.Expression, ...] | None:
        last = int_attr(attrs, "axis") == len(types[0].shape) - 1
        return (ex.Call(str_attr(attrs, "op"), (ex.Input(0),)),) if last and bool_attr(attrs, "keepdims") else None

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        kind = {"sum": "ReduceSum", "mean": "ReduceMean", "max": "ReduceMax"}[str_attr(op.attrs, "op")]
        axes = emit.constant(np.array([int_attr(op.attrs, "axis")], np.int64))
        keepdims = int(bool_attr(op.attrs, "keepdims"))
        emit.node(kind, inputs[0], axes, output=op.output.name, keepdims=keepdims)


class Reshape(OpSpec):
    """(x) -> shape"""

    kind = "reshape"
    attrs = declare(shape=AttrSpec("ints"))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        shape = ints_attr(attrs, "shape")
        expect(len(types) == 1 and shape.count(-1) <= 1, "one input and at most one -1", types)
        total = product(types[0].shape)
        rest = math.prod(dim for dim in shape if dim != -1)
        if -1 not in shape:
            expect(total == rest, f"{rest} elements", types)
            return (TensorType(types[0].dtype, shape),)
        missing = divide(total, rest)
        return (TensorType(types[0].dtype, tuple(missing if dim == -1 else dim for dim in shape)),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        return (inputs[0].reshape(ints_attr(attrs, "shape")),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        shape = emit.constant(np.array(ints_attr(op.attrs, "shape"), np.int64))
        emit.node("Reshape", inputs[0], shape, output=op.output.name)


class Transpose(OpSpec):
    """(x) -> permuted"""

    kind = "transpose"
    attrs = declare(perm=AttrSpec("ints"))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        perm = ints_attr(attrs, "perm")
        expect(
            len(types) == 1 and sorted(perm) == list(range(len(types[0].shape))),
            f"one input to permute by {perm}",
            types,
        )
        return (TensorType(types[0].dtype, tuple(types[0].shape[axis] for axis in perm)),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        return (inputs[0].transpose(ints_attr(attrs, "perm")),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        emit.node("Transpose", *inputs, output=op.output.name, perm=ints_attr(op.attrs, "perm"))


class Slice(OpSpec):
    """(x) -> .."""

    kind = "slice"
    attrs = declare(axis=AttrSpec("int"), start=AttrSpec("int", 0), stop=AttrSpec("int"))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        axis, start, stop = (int_attr(attrs, name) for name in ("axis", "start", "stop"))
        expect(len(types) == 1 and axis < len(types[0].shape), f"one input with axis {axis}", types)
        size = types[0].shape[axis]
        good = isinstance(size, int) and 0 <= start < stop <= size
        expect(good, f"a fixed axis {axis} with columns {start}:{stop}", types)
        return (TensorType(types[0].dtype, (*types[0].shape[:axis], stop - start, *types[0].shape[axis + 1 :])),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        axis, start, stop = (int_attr(attrs, name) for name in ("axis", "start", "stop"))
        return (inputs[0][(slice(None),) * axis + (slice(start, stop),)],)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        bounds = [emit.constant(np.array([int_attr(op.attrs, name)], np.int64)) for name in ("start", "stop", "axis")]
        emit.node("Slice", inputs[0], *bounds, output=op.output.name)


class Concat(OpSpec):
    """(a, b, ..) -> .."""

    kind = "concat"
    attrs = declare(axis=AttrSpec("int"))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        axis = int_attr(attrs, "axis")
        expect(bool(types) and axis < len(types[0].shape), f"inputs with axis {axis}", types)
        others = {(*t.shape[:axis], *t.shape[axis + 1 :]) for t in types}
        sizes = [t.shape[axis] for t in types]
        expect(
            len(others) == 1 and all(isinstance(size, int) for size in sizes),
            "inputs that differ on a fixed axis",
            types,
        )
        total = sum(size for size in sizes if isinstance(size, int))
        return (TensorType(types[0].dtype, (*types[0].shape[:axis], total, *types[0].shape[axis + 1 :])),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        return (np.concatenate(inputs, int_attr(attrs, "axis")),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        emit.node("Concat", *inputs, output=op.output.name, axis=int_attr(op.attrs, "axis"))


class Cast(OpSpec):
    """(x) -> x"""

    kind = "cast"
    attrs = declare(dtype=AttrSpec("str", None, DTYPES))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        expect(len(types) == 1, "one input", types)
        dtype = next(name for name in DTYPES if name == attrs["dtype"])
        return (TensorType(dtype, types[0].shape),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        dtype = next(name for name in DTYPES if name == attrs["dtype"])
        return (inputs[0].astype(to_numpy(dtype)),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        codes = {"bool": 9, "int32": 6, "int64": 7}  # onnx.TensorProto.DataType
        emit.node("Cast", *inputs, output=op.output.name, to=codes.get(str_attr(op.attrs, "dtype"), 1))


# --- pointwise expressions in ONNX ------------------------------------------------------------------------------------

_ONNX_DIRECT = {
    "neg": "Neg", "abs": "Abs", "exp": "Exp", "log": "Log", "sqrt": "Sqrt", "tanh": "Tanh", "sigmoid": "Sigmoid",
    "relu": "Relu", "softplus": "Softplus", "sin": "Sin", "cos": "Cos", "add": "Add", "sub": "Sub", "mul": "Mul",
    "div": "Div", "pow": "Pow", "maximum": "Max", "minimum": "Min", "lt": "Less", "le": "LessOrEqual",
    "gt": "Greater", "ge": "GreaterOrEqual", "eq": "Equal", "where": "Where",
}  # fmt: skip
_ONNX_COMPOSED = {
    "rsqrt": "(div 1.0 (sqrt in0))",
    "relu2": "(mul (relu in0) (relu in0))",
    "silu": "(mul in0 (sigmoid in0))",
    "quick_gelu": "(mul in0 (sigmoid (mul in0 1.702)))",
    "gelu_tanh": f"(mul (mul 0.5 in0) (add 1.0 (tanh (mul {math.sqrt(2 / math.pi)!r} "
    "(add in0 (mul 0.044715 (mul in0 (mul in0 in0))))))))",
    "clamp": "(minimum (maximum in0 in1) in2)",
}


def _onnx_expression(emit: OnnxEmitter, body: ex.Expression, inputs: Sequence[str]) -> str:
    if isinstance(body, ex.Input):
        return inputs[body.index]
    if isinstance(body, ex.Number):
        return emit.constant(np.float32(body.value))
    args = [_onnx_expression(emit, arg, inputs) for arg in body.args]
    if body.operator in _ONNX_COMPOSED:
        return _onnx_expression(emit, ex.parse(_ONNX_COMPOSED[body.operator]), args)
    if body.operator == "ne":
        return emit.node("Not", emit.node("Equal", *args))
    if body.operator == "gelu":
        half = emit.node("Mul", args[0], emit.constant(np.float32(0.5)))
        erf = emit.node("Erf", emit.node("Mul", args[0], emit.constant(np.float32(math.sqrt(0.5)))))
        return emit.node("Mul", half, emit.node("Add", erf, emit.constant(np.float32(1.0))))
    return emit.node(_ONNX_DIRECT[body.operator], *args)


ROWS: tuple[OpSpec, ...] = (
    Activation(),
    *(Binary(kind) for kind in ("add", "sub", "mul", "div", "pow", "maximum", "minimum")),
    Compare(),
    Where(),
    Clamp(),
    Reduce(),
    Reshape(),
    Transpose(),
    Slice(),
    Concat(),
    Cast(),
)
