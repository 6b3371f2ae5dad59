"""Rows of the op table: the building blocks of models, as captured."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels_templates import expression as ex
from .ir import Op
from .op_spec import (
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
    str_attr,
)
from .shapes import TensorType

NORM_KINDS = ("rms", "layer", "l2")
ROPE_STYLES = ("half", "pair")


class Embedding(OpSpec):
    """(table[V,H], ids[T]) -> [T,H]"""

    kind = "embedding"
    attrs = declare(scale=AttrSpec("float", 1.0))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        good = len(types) == 2 and len(types[0].shape) == 2 and types[1].dtype in ("int32", "int64")
        expect(good, "table[V, H] and integer ids", types)
        return (TensorType(types[0].dtype, (*types[1].shape, types[0].shape[1])),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        table, ids = inputs
        return (table[ids] * np.float32(float_attr(attrs, "scale")),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        scale = float_attr(op.attrs, "scale")
        if scale == 1.0:
            emit.node("Gather", *inputs, output=op.output.name)
        else:
            emit.node("Mul", emit.node("Gather", *inputs), emit.constant(np.float32(scale)), output=op.output.name)


class Linear(OpSpec):
    """(x[..,K], w[N,K], b[N]?, e1, e2 ..) -> [..,N]"""

    kind = "linear"
    attrs = declare(has_bias=AttrSpec("bool", False), gated=AttrSpec("bool", False), epilogue=AttrSpec("str", ""))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        bias = bool_attr(attrs, "has_bias")
        gated = bool_attr(attrs, "gated")
        good = len(types) >= 2 + bias and len(types[1].shape) == 2 and types[0].shape[-1:] == types[1].shape[1:]
        expect(good, "x[.., K] and w[N, K]", types)
        columns = types[1].shape[0]
        expect(not bias or types[2].shape == (columns,), "a bias [N]", types)
        width = divide(columns, 2) if gated else columns
        out = (*types[0].shape[:-1], width)
        extras = types[2 + bias :]
        expect(
            all(extra.shape in (out, (width,)) for extra in extras), f"extra inputs [.., {width}] or [{width}]", types
        )
        text = str_attr(attrs, "epilogue")
        used = ex.inputs(ex.parse(text)) if text else {0}
        expect(used <= set(range(len(extras) + 1 + gated)), f"extra inputs for the epilogue {text!r}", types)
        expect(bool(text) or not (extras or gated), "an epilogue for halves and extra inputs", types)
        return (TensorType(types[0].dtype, out),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        out = inputs[0] @ inputs[1].T
        bias = bool_attr(attrs, "has_bias")
        if bias:
            out = out + inputs[2]
        text = str_attr(attrs, "epilogue")
        if text:
            products = np.split(out, 2, axis=-1) if bool_attr(attrs, "gated") else [out]
            out = ex.evaluate(ex.parse(text), [*products, *inputs[2 + bias :]]).astype(np.float32)
        return (out,)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        if op.attrs["epilogue"]:
            raise ValueError("a linear op with an epilogue has no ONNX body: write the captured graph")
        weight = emit.node("Transpose", inputs[1], perm=(1, 0))
        if not bool_attr(op.attrs, "has_bias"):
            emit.node("MatMul", inputs[0], weight, output=op.output.name)
            return
        emit.node("Add", emit.node("MatMul", inputs[0], weight), inputs[2], output=op.output.name)


NORM_ATTRS = declare(
    kind=AttrSpec("str", "rms", NORM_KINDS),
    eps=AttrSpec("float"),
    offset=AttrSpec("float", 0.0),
    has_weight=AttrSpec("bool", True),
    has_bias=AttrSpec("bool", False),
)


def infer_norm(types: Types, attrs: Attrs, data: int) -> None:
    """Check a norm whose first `data` inputs are activations, followed by the weights that the flags declare."""
    weights = bool_attr(attrs, "has_weight") + bool_attr(attrs, "has_bias")
    expect(len(types) == data + weights, f"{data} inputs and {weights} weights", types)
    shape = types[0].shape
    good = all(weight.shape == shape[len(shape) - len(weight.shape) :] for weight in types[data:])
    expect(good, "weights that match the last dimensions", types)


def evaluate_norm(x: Array, weights: Sequence[Array], attrs: Attrs) -> Array:
    """A norm over the last axis, computed in float64."""
    wide: Array = x.astype(np.float64)
    eps = float_attr(attrs, "eps")
    kind = str_attr(attrs, "kind")
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdims=True)
    squares = np.square(wide)
    total = squares.sum(-1, keepdims=True) if kind == "l2" else squares.mean(-1, keepdims=True)
    out: Array = wide / np.sqrt(total + eps)
    rest = list(weights)
    if bool_attr(attrs, "has_weight"):
        out = out * (rest.pop(0).astype(np.float64) + float_attr(attrs, "offset"))
    if bool_attr(attrs, "has_bias"):
        out = out + rest.pop(0)
    return out.astype(np.float32)


def norm_expression(x: ex.Expression, weights: int, attrs: Attrs) -> ex.Expression:
    """A norm of an expression over the last axis; weight and bias are the inputs from `weights` on."""
    kind = str_attr(attrs, "kind")
    if kind == "layer":
        x = ex.Call("sub", (x, ex.Call("mean", (x,))))
    total = ex.Call("sum" if kind == "l2" else "mean", (ex.Call("mul", (x, x)),))
    scale = ex.Call("rsqrt", (ex.Call("add", (total, ex.Number(float_attr(attrs, "eps")))),))
    out, offset = ex.Call("mul", (x, scale)), float_attr(attrs, "offset")
    if bool_attr(attrs, "has_weight"):
        weight = ex.Input(weights)
        out = ex.Call("mul", (out, ex.Call("add", (weight, ex.Number(offset))) if offset else weight))
    if bool_attr(attrs, "has_bias"):
        out = ex.Call("add", (out, ex.Input(weights + bool_attr(attrs, "has_weight"))))
    return out


class Norm(OpSpec):
    """(x[..,D], w[D]?, b[D]?) -> [..,D]"""

    kind = "norm"
    attrs = NORM_ATTRS

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        infer_norm(types, attrs, data=1)
        return (types[0],)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        return (evaluate_norm(inputs[0], inputs[1:], attrs),)

    def rows(self, types: Types, attrs: Attrs) -> tuple[ex.Expression, ...] | None:
        return (norm_expression(ex.Input(0), 1, attrs),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        x, rest = inputs[0], list(inputs[1:])
        kind, last = str_attr(op.attrs, "kind"), emit.constant(np.array([-1], np.int64))
        if kind == "layer":
            x = emit.node("Sub", x, emit.node("ReduceMean", x, last, keepdims=1))
        total = emit.node("ReduceSum" if kind == "l2" else "ReduceMean", emit.node("Mul", x, x), last, keepdims=1)
        eps = emit.constant(np.float32(float_attr(op.attrs, "eps")))
        out = emit.node("Div", x, emit.node("Sqrt", emit.node("Add", total, eps)))
        if bool_attr(op.attrs, "has_weight"):
            offset = emit.constant(np.float32(float_attr(op.attrs, "offset")))
            out = emit.node("Mul", out, emit.node("Add", rest.pop(0), offset))
        if bool_attr(op.attrs, "has_bias"):
            out = emit.node("Add", out, rest.pop(0))
        emit.node("Identity", out, output=op.output.name)


def rotate(x: Array, cos: Array, sin: Array, style: str) -> Array:
    """Rotate the first columns of x[T,Hn,D] by cos, sin [T,Dr/2]: columns i and i + Dr/2, or 2i and 2i + 1 ("pair")."""
    half = cos.shape[-1]
    first, second = (
        (slice(0, half), slice(half, 2 * half)) if style == "half" else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
    )
    a, b = x[..., first], x[..., second]
    c, s = cos[:, None, :], sin[:, None, :]
    out = x.copy()
    out[..., first] = a * c - b * s
    out[..., second] = b * c + a * s
    return out


class RopeTable(OpSpec):
    """(positions[T], lengths[T], frequencies[K,Dr/2]) -> [T,Dr/2]

    Angles are float32 products, as models compute them.
    """

    kind = "rope_table"
    attrs = declare(function=AttrSpec("str", None, ("cos", "sin")), first=AttrSpec("int"), scale=AttrSpec("float", 1.0))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        good = len(types) == 3 and types[0] == types[1] and types[0].dtype == "int32" and len(types[0].shape) == 1
        good = good and types[2].dtype == "float32" and len(types[2].shape) == 2
        expect(good, "int32 positions[T] and lengths[T], and float32 frequencies[K, Dr/2]", types)
        return (TensorType("float32", (types[0].shape[0], types[2].shape[1])),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        positions, lengths, frequencies = inputs
        rows = np.clip(lengths - int_attr(attrs, "first"), 0, len(frequencies) - 1)
        angles = positions.astype(np.float32)[:, None] * frequencies[rows]
        turned = np.cos(angles) if attrs["function"] == "cos" else np.sin(angles)
        return ((turned * np.float32(float_attr(attrs, "scale"))).astype(np.float32),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        last = op.inputs[2].type.shape[0]
        assert isinstance(last, int)
        first, zero, top = (emit.constant(np.int32(x)) for x in (int_attr(op.attrs, "first"), 0, last - 1))
        rows = emit.node("Clip", emit.node("Sub", inputs[1], first), zero, top)
        positions = emit.node("Cast", inputs[0], to=1)  # to float
        column = emit.node("Unsqueeze", positions, emit.constant(np.array([1], np.int64)))
        angles = emit.node("Mul", column, emit.node("Gather", inputs[2], rows))
        turned = emit.node("Cos" if op.attrs["function"] == "cos" else "Sin", angles)
        scale = emit.constant(np.float32(float_attr(op.attrs, "scale")))
        emit.node("Mul", turned, scale, output=op.output.name)


class Rope(OpSpec):
    """(x[T,Hn,D], cos[T,Dr/2], sin[T,Dr/2]) -> [T,Hn,D]"""

    kind = "rope"
    attrs = declare(style=AttrSpec("str", "half", ROPE_STYLES))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        good = len(types) == 3 and len(types[0].shape) == 3 and len(types[1].shape) == 2 and types[1] == types[2]
        good = good and types[0].shape[0] == types[1].shape[0]
        expect(good, "x[T, Hn, D], cos[T, Dr/2] and sin[T, Dr/2]", types)
        half, width = types[1].shape[1], types[0].shape[2]
        expect(isinstance(half, int) and isinstance(width, int) and 2 * half <= width, "Dr at most D", types)
        return (types[0],)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        x, cos, sin = inputs
        return (rotate(x, cos, sin, str_attr(attrs, "style")),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        width, half = op.inputs[0].type.shape[2], op.inputs[1].type.shape[1]
        assert isinstance(width, int)
        assert isinstance(half, int)
        pair = op.attrs["style"] == "pair"
        x = inputs[0]
        cos, sin = (emit.node("Unsqueeze", name, emit.constant(np.array([1], np.int64))) for name in inputs[1:])
        columns = np.arange(2 * half).reshape((half, 2) if pair else (2, half))
        first, second = (columns[:, 0], columns[:, 1]) if pair else (columns[0], columns[1])
        a, b = (emit.node("Gather", x, emit.constant(index), axis=2) for index in (first, second))
        rotated = [
            emit.node("Sub", emit.node("Mul", a, cos), emit.node("Mul", b, sin)),
            emit.node("Add", emit.node("Mul", b, cos), emit.node("Mul", a, sin)),
        ]
        rest = [emit.node("Gather", x, emit.constant(np.arange(2 * half, width)), axis=2)] if 2 * half < width else []
        joined = emit.node("Concat", *rotated, *rest, axis=2)
        order = np.argsort(np.concatenate([first, second, np.arange(2 * half, width)]))
        emit.node("Gather", joined, emit.constant(order), output=op.output.name, axis=2)


ATTENTION_ATTRS = declare(
    layer=AttrSpec("int"),
    scale=AttrSpec("float"),
    window=AttrSpec("int", 0),
    softcap=AttrSpec("float", 0.0),
    causal=AttrSpec("bool", True),
    has_sinks=AttrSpec("bool", False),
    has_slopes=AttrSpec("bool", False),
)


def attention_weights(types: Types, attrs: Attrs, first: int) -> None:
    """Check the inputs [Hq] from number `first` on that the flags declare: sinks, then slopes."""
    heads = types[0].shape[1:2]
    count = bool_attr(attrs, "has_sinks") + bool_attr(attrs, "has_slopes")
    good = len(types) == first + count and all(each.shape == heads for each in types[first:])
    expect(good, f"{count} inputs [Hq] after {first}, as flagged", types)


def attend(q: Array, k: Array, v: Array, start: int, attrs: Attrs, *, weights: Sequence[Array]) -> Array:
    """One sequence's attention, in float64: q[n,Hq,D] at positions `start..`, k[m,Hk,D] and v[m,Hk,Dv] at 0 .. m-1.

    `weights` are sinks and slopes as flagged.
    """
    rest = list(weights)
    sinks = rest.pop(0) if bool_attr(attrs, "has_sinks") else None
    repeat = q.shape[1] // k.shape[1]
    keys, values = (np.repeat(x.astype(np.float64), repeat, axis=1).transpose(1, 0, 2) for x in (k, v))
    scores = q.astype(np.float64).transpose(1, 0, 2) @ keys.transpose(0, 2, 1) * float_attr(attrs, "scale")
    softcap = float_attr(attrs, "softcap")
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    distance = (start + np.arange(len(q)))[:, None] - np.arange(len(k))[None, :]
    if rest:
        scores = scores - rest[0][:, None, None] * distance
    scores = np.where(seen(distance, attrs), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    if sinks is not None:
        top = np.maximum(top, sinks[:, None, None])
    parts = np.exp(scores - top)
    total = parts.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + np.exp(sinks[:, None, None] - top)
    out: Array = (parts / total @ values).transpose(1, 0, 2).astype(np.float32)
    return out


def seen(distance: Array, attrs: Attrs) -> Array:
    """Whether a query sees a key, by how many positions the key is behind it."""
    window = int_attr(attrs, "window")
    mask = np.ones(distance.shape, bool) if not window else np.abs(distance) < window
    return mask & (distance >= 0) if bool_attr(attrs, "causal") else mask


class Attention(OpSpec):
    """(q[T,Hq,D], k[T,Hk,D], v[T,Hk,Dv], sinks[Hq]?, slopes[Hq]?) -> [T,Hq,Dv]"""

    kind = "attention"
    attrs = ATTENTION_ATTRS

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        good = len(types) >= 3 and all(len(t.shape) == 3 for t in types[:3])
        expect(good, "q[T, Hq, D], k[T, Hk, D], v[T, Hk, Dv]", types)
        (tokens, heads, width), (_, kv_heads, _), (_, _, value_width) = (t.shape for t in types[:3])
        expect(
            types[1].shape == (tokens, kv_heads, width) and types[2].shape[:2] == (tokens, kv_heads),
            "matching q, k, v",
            types,
        )
        good = isinstance(heads, int) and isinstance(kv_heads, int) and heads % kv_heads == 0
        expect(good, "Hq a multiple of Hk", types)
        attention_weights(types, attrs, 3)
        return (TensorType(types[0].dtype, (tokens, heads, value_width)),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        q, k, v, *weights = inputs
        spans = [span for _, span, _ in packing.sequences()]
        return (np.concatenate([attend(q[s], k[s], v[s], 0, attrs, weights=weights) for s in spans]),)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        layer, softcap = int_attr(op.attrs, "layer"), float_attr(op.attrs, "softcap")
        heads, kv_heads = op.inputs[0].type.shape[1], op.inputs[1].type.shape[1]
        assert isinstance(heads, int)
        assert isinstance(kv_heads, int)
        past = emit.past(layer, op.inputs[1].type, op.inputs[2].type)
        key, value = (emit.node("Concat", *pair, axis=0) for pair in zip(past, inputs[1:3], strict=True))
        emit.present(layer, key, value)
        if heads != kv_heads:
            index = emit.constant(np.repeat(np.arange(kv_heads), heads // kv_heads))
            key, value = (emit.node("Gather", name, index, axis=1) for name in (key, value))
        q = emit.node("Transpose", inputs[0], perm=(1, 0, 2))
        scores = emit.node("MatMul", q, emit.node("Transpose", key, perm=(1, 2, 0)))
        scores = emit.node("Mul", scores, emit.constant(np.float32(float_attr(op.attrs, "scale"))))
        if softcap:
            cap = emit.constant(np.float32(softcap))
            scores = emit.node("Mul", emit.node("Tanh", emit.node("Div", scores, cap)), cap)
        if op.attrs["has_slopes"]:
            slopes = emit.node("Unsqueeze", inputs[-1], emit.constant(np.array([1, 2], np.int64)))
            scores = emit.node("Sub", scores, emit.node("Mul", slopes, emit.distance()))
        mask = emit.visible(bool_attr(op.attrs, "causal"), int_attr(op.attrs, "window"))
        scores = emit.node("Where", mask, scores, emit.constant(np.float32(-np.inf)))
        weights = self._softmax(emit, scores, inputs[3] if op.attrs["has_sinks"] else "")
        out = emit.node("MatMul", weights, emit.node("Transpose", value, perm=(1, 0, 2)))
        emit.node("Transpose", out, output=op.output.name, perm=(1, 0, 2))

    def _softmax(self, emit: OnnxEmitter, scores: str, sinks: str) -> str:
        if not sinks:
            return emit.node("Softmax", scores, axis=-1)
        last = emit.constant(np.array([-1], np.int64))
        column = emit.node("Unsqueeze", sinks, emit.constant(np.array([1, 2], np.int64)))
        top = emit.node("Max", emit.node("ReduceMax", scores, last, keepdims=1), column)
        weights = emit.node("Exp", emit.node("Sub", scores, top))
        sink = emit.node("Exp", emit.node("Sub", column, top))
        return emit.node("Div", weights, emit.node("Add", emit.node("ReduceSum", weights, last, keepdims=1), sink))


class TakeRows(OpSpec):
    """(x[T,H], rows[R]) -> [R,H]"""

    kind = "take_rows"

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        good = len(types) == 2 and len(types[0].shape) == 2 and len(types[1].shape) == 1 and types[1].dtype == "int32"
        expect(good, "x[T, H] and int32 rows[R]", types)
        return (TensorType(types[0].dtype, (types[1].shape[0], types[0].shape[1])),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        return (inputs[0][inputs[1]],)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        emit.node("Gather", *inputs, output=op.output.name)


class Softmax(OpSpec):
    """(x) -> x"""

    kind = "softmax"
    attrs = declare(axis=AttrSpec("int", -1))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        expect(len(types) == 1 and int_attr(attrs, "axis") < len(types[0].shape), "one input with that axis", types)
        return (types[0],)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        axis, x = int_attr(attrs, "axis"), inputs[0].astype(np.float64)
        weights = np.exp(x - x.max(axis, keepdims=True))
        return ((weights / weights.sum(axis, keepdims=True)).astype(np.float32),)

    def rows(self, types: Types, attrs: Attrs) -> tuple[ex.Expression, ...] | None:
        last = int_attr(attrs, "axis") == len(types[0].shape) - 1
        return (ex.parse("(div (exp (sub in0 (max in0))) (sum (exp (sub in0 (max in0)))))"),) if last else None

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        emit.node("Softmax", *inputs, output=op.output.name, axis=int_attr(op.attrs, "axis"))


class Bmm(OpSpec):
    """(a[..,M,K], b[..,K,N]) -> [..,M,N]"""

    kind = "bmm"

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        good = len(types) == 2 and all(len(t.shape) >= 2 for t in types) and types[0].shape[-1] == types[1].shape[-2]
        expect(good, "a[.., M, K] and b[.., K, N]", types)
        batch = broadcast([t.shape[:-2] for t in types])
        return (TensorType(types[0].dtype, (*batch, types[0].shape[-2], types[1].shape[-1])),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        return (inputs[0] @ inputs[1],)

    def onnx(self, emit: OnnxEmitter, op: Op, inputs: Sequence[str]) -> None:
        emit.node("MatMul", *inputs, output=op.output.name)


ROWS: tuple[OpSpec, ...] = (
    Embedding(),
    Linear(),
    Norm(),
    RopeTable(),
    Rope(),
    Attention(),
    TakeRows(),
    Softmax(),
    Bmm(),
)
