"""The table that translates torch ops into IR ops: one small function an op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch
from torch import SymInt, Tensor, fx

from ..compiler.ir import Attr, Value
from .emitter import BINARY
from .probe import ACTIVATIONS, MaskKind, RopeKind, classify_mask
from .translate import (
    Empty,
    Handler,
    Mask,
    Operand,
    Positional,
    Rotary,
    Traced,
    Translator,
    Untranslatable,
    Weight,
    op_name,
)

H = TypeVar("H", bound=Handler)
HANDLERS: dict[str, Handler] = {}
"""Op name, without overload, to what translates it: a function of the translator, the node and the op's arguments."""


def translates(*names: str) -> Callable[[H], H]:
    """Enter a function for the ops of these names."""

    def register(handler: H) -> H:
        HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


# ops made by the hooks


@translates("toolkit.norm")
def _norm(
    t: Translator, node: fx.Node, x: Operand, weight: Operand | None, bias: Operand | None, **attrs: Attr
) -> Traced:
    x = t.traced(x)
    weights = [t.traced(w).value for w in (weight, bias) if w is not None]
    attrs |= {"has_weight": weight is not None, "has_bias": bias is not None}
    return Traced(t.emitter.rowwise("norm", x.value, *weights, **attrs), x.batch)


@translates("toolkit.activation")
def _activation(t: Translator, node: fx.Node, x: Operand, kind: str) -> Traced:
    x = t.traced(x)
    return Traced(t.emitter.rowwise("activation", x.value, kind=kind), x.batch)


@translates("toolkit.rope_table")
def _rope_table(t: Translator, node: fx.Node, positions: Operand, table: int, width: int) -> tuple[Operand, Operand]:
    if not isinstance(positions, Positional) or not positions.is_positions:
        raise Untranslatable("a rotary module is given something other than the positions")
    tables = t.rope.tables[table]
    if tables.frequencies is not None:
        return Rotary(table, "cos"), Rotary(table, "sin")
    return Positional.table(tables.cos[None]), Positional.table(tables.sin[None])


@translates("toolkit.rope")
def _rope(t: Translator, node: fx.Node, x: Operand, cos: Operand, sin: Operand, *, site: int) -> Traced:
    x = t.traced(x)
    place = t.rope.sites[site]
    kind = place.classify(_table_rows(t, cos))
    if kind is None:
        raise Untranslatable(f"{place.name} rotates in an unknown way")
    tables = [_rotary_table(t, kind, "cos", cos, 1.0), _rotary_table(t, kind, "sin", sin, kind.sign)]
    return Traced(t.emitter.emit("rope", x.value, *tables, style=kind.style), x.batch)


def _table_rows(t: Translator, table: Operand) -> Tensor:
    """cos or sin [P, W] of some positions."""
    if isinstance(table, Rotary):
        return t.rope.tables[table.table].cos
    if isinstance(table, Positional):
        return table.rows
    raise Untranslatable("it rotates by more than the positions")


def _rotary_table(t: Translator, kind: RopeKind, name: str, table: Operand, sign: float) -> Value:
    """The distinct columns [T, Dr/2] of cos or sin at the step's positions."""
    if not isinstance(table, Rotary):
        rows = kind.columns(_table_rows(t, table)).mul(sign)
        return t.gathered(t.emitter.constant(f"rope.{name}", rows.numpy()))
    found = t.rope.tables[table.table].frequencies
    assert found is not None
    rows = kind.columns(found.rows).contiguous()
    attrs: dict[str, Attr] = {"function": table.function, "first": found.first, "scale": sign * found.scale}
    return t.emitter.share(
        "rope_table", t.positions, t.lengths, t.emitter.constant("rope.frequencies", rows.numpy()), **attrs
    )


@translates("toolkit.attention")
def _attention(t: Translator, node: fx.Node, *operands: Operand | None, **attrs: Attr) -> Traced:
    inputs = [t.traced(x).value for x in operands if x is not None]
    return Traced(t.emitter.emit("attention", *inputs, **attrs, has_sinks=len(inputs) == 4), 0)


@translates("aten.scaled_dot_product_attention")
def _sdpa(t: Translator, node: fx.Node, *given: Any, scale: float | None = None, **_: object) -> Traced:
    """Attention of q[1, Hq, T, D], k[1, Hk, T, D], v[1, Hk, T, Dv], in which Hk is 1 or Hq."""
    query, key, value, mask, _, causal = _filled(given, *[None] * 4, 0.0, False)
    heads = [t.traced(x) for x in (query, key, value)]
    if any((x.rank, x.batch) != (4, 0) for x in heads):
        raise Untranslatable("expected q[1, Hq, T, D], k[1, Hk, T, D] and v[1, Hk, T, Dv]")
    q, k, v = (t.emitter.transpose(x.value, (1, 0, 2)) for x in heads)
    kind = MaskKind(None) if mask is None else classify_mask(t.example(mask)) if isinstance(mask, Mask) else None
    if kind is None:
        raise Untranslatable("its mask is neither causal nor ALiBi")
    slopes = [] if kind.slopes is None else [t.emitter.constant("alibi.slopes", kind.slopes.numpy())]
    layer = t.emitter.layer
    if layer is None:
        raise Untranslatable("it is in none of the layers")
    attrs: dict[str, Attr] = {"causal": causal or mask is not None, "has_slopes": kind.slopes is not None}
    scale = node.args[0].meta["val"].shape[-1] ** -0.5 if scale is None else scale  # type: ignore[union-attr]
    out = t.emitter.emit("attention", q, *t.emitter.ungrouped(k, v), *slopes, layer=layer, scale=scale, **attrs)
    return Traced(t.emitter.transpose(out, (1, 0, 2)), 0)


@translates("toolkit.causal_mask")
def _causal_mask(t: Translator, node: fx.Node, x: Operand) -> Mask:
    return Mask(node)


@translates("toolkit.take_rows")
def _take_rows(t: Translator, node: fx.Node, x: Operand, rows: Operand) -> Traced:
    return Traced(t.emitter.take_rows(t.traced(x).value, t.traced(rows).value), 0)


@translates("toolkit.layer_begin")
def _layer_begin(t: Translator, node: fx.Node, x: Operand, like: int, index: int) -> Traced:
    x = t.traced(x)
    return Traced(t.emitter.begin_layer(index, x.value), x.batch)


@translates("toolkit.layer_end")
def _layer_end(t: Translator, node: fx.Node, x: Operand, like: int, index: int) -> Traced:
    x = t.traced(x)
    return Traced(t.emitter.end_layer(index, like, x.value), x.batch)


@translates("toolkit.layer_repeat")
def _layer_repeat(t: Translator, node: fx.Node, x: Operand, like: int, index: int) -> Traced:
    x = t.traced(x)
    t.problems.repeat(*(f"{t.emitter.layers}.{number}" for number in (like, index)))
    return Traced(t.emitter.repeat_layer(index, like, x.value), x.batch)


@translates("toolkit.experts")
def _experts(t: Translator, node: fx.Node, x: Operand) -> Operand:
    found: Operand = t.assume(node)  # the hooks have reported it
    return found


# matrices and tables


@translates("aten.embedding")
def _embedding(t: Translator, node: fx.Node, table: Operand, ids: Operand, *_: object) -> Traced:
    if isinstance(table, Weight) and isinstance(ids, Positional):
        # positions plus a number: a table that begins later
        weight = t.emitter.weight(table.name, table.shape, start=ids.offset)
        return Traced(t.emitter.emit("embedding", weight, t.positions), 0)
    index = t.traced(ids)
    return Traced(t.emitter.emit("embedding", t.traced(table).value, index.value), index.batch)


@translates("aten.linear")
def _linear(t: Translator, node: fx.Node, x: Operand, weight: Operand, bias: Operand | None = None) -> Traced:
    x = t.traced(x)
    inputs = [t.traced(w).value for w in (weight, bias) if w is not None]
    return Traced(t.emitter.emit("linear", x.value, *inputs, has_bias=bias is not None), x.batch)


@translates("aten.addmm")
def _addmm(t: Translator, node: fx.Node, bias: Operand, x: Operand, weight: Operand) -> Traced:
    if not isinstance(weight, Weight):
        raise Untranslatable("its matrix is no parameter")
    x, matrix = t.traced(x), t.matrix(weight, transpose=True)
    return Traced(t.emitter.emit("linear", x.value, matrix, t.traced(bias).value, has_bias=True), x.batch)


@translates("aten.mm", "aten.matmul", "aten.bmm")
def _matmul(t: Translator, node: fx.Node, a: Operand, b: Operand) -> Traced:
    x = t.traced(a)
    if isinstance(b, Weight) and len(b.shape) == 2:
        return Traced(t.emitter.emit("linear", x.value, t.matrix(b, transpose=True), has_bias=False), x.batch)
    y = t.traced(b)
    if x.batch != y.batch or (x.batch or 0) >= x.rank - 2 or x.rank != y.rank:
        raise Untranslatable("it multiplies along the batch")
    return Traced(t.emitter.emit("bmm", x.value, y.value), x.batch)


@translates("aten.rms_norm")
def _rms_norm(t: Translator, node: fx.Node, x: Operand, shape: Sequence[int], *rest: Any) -> Traced:
    _one_axis(shape)
    weight, eps = _filled(rest, None, None)
    epsilon = torch.finfo(torch.float32).eps if eps is None else float(eps)
    return _norm(t, node, x, weight, None, kind="rms", eps=epsilon)


@translates("aten.layer_norm")
def _layer_norm(t: Translator, node: fx.Node, x: Operand, shape: Sequence[int], *rest: Any) -> Traced:
    _one_axis(shape)
    weight, bias, eps = _filled(rest, None, None, 1e-5)[:3]
    return _norm(t, node, x, weight, bias, kind="layer", eps=float(eps))


def _filled(given: Sequence[Any], *defaults: Any) -> tuple[Any, ...]:
    """Arguments, with defaults for those that were left out."""
    return (*given, *defaults[len(given) :])


def _one_axis(axes: Sequence[int]) -> None:
    if len(axes) != 1:
        raise Untranslatable(f"it works over {len(axes)} axes")


# pointwise


def _pointwise_kind(name: str) -> Handler:
    def handler(t: Translator, node: fx.Node, x: Operand) -> Traced:
        return _activation(t, node, x, name)

    return handler


HANDLERS |= {
    f"aten.{kind}": _pointwise_kind(kind) for kind in ("neg", "abs", "exp", "log", "sqrt", "rsqrt", "sin", "cos")
}
HANDLERS |= {f"aten.{kind}": _pointwise_kind(kind) for kind in ACTIVATIONS}


@translates("aten.reciprocal")
def _reciprocal(t: Translator, node: fx.Node, x: Operand) -> Traced:
    return _combine(t, node, "div", 1.0, x)


@translates("aten.square")
def _square(t: Translator, node: fx.Node, x: Operand) -> Traced:
    return _combine(t, node, "pow", x, 2.0)


@translates("aten.expm1")
def _expm1(t: Translator, node: fx.Node, x: Operand) -> Traced:
    return _combine(t, node, "sub", _activation(t, node, x, "exp"), 1.0)


@translates("aten.gelu")
def _gelu(t: Translator, node: fx.Node, x: Operand, *, approximate: str = "none") -> Traced:
    return _activation(t, node, x, "gelu_tanh" if approximate == "tanh" else "gelu")


def _binary(kind: str, *, swap: bool = False) -> Handler:
    def handler(t: Translator, node: fx.Node, a: Any, b: Any, *, alpha: float = 1) -> Traced:
        if alpha != 1:
            if not isinstance(b, (int, float)):
                raise Untranslatable(f"it has alpha {alpha}")
            b = b * alpha
        return _combine(t, node, kind, *((b, a) if swap else (a, b)))

    return handler


HANDLERS |= {f"aten.{kind}": _binary(kind) for kind in BINARY} | {"aten.rsub": _binary("sub", swap=True)}
HANDLERS |= {"aten.max": _binary("maximum"), "aten.min": _binary("minimum")}


def _combine(t: Translator, node: fx.Node, kind: str, a: Any, b: Any) -> Traced:
    """A binary op of operands and numbers."""
    left, right = _scalar(a), _scalar(b)
    if right is not None:
        x = t.traced(a)
        if (kind in ("mul", "div", "pow") and right == 1) or (kind in ("add", "sub") and right == 0):
            return x
        if kind == "pow" and right == 2:
            return Traced(t.emitter.broadcast("mul", x.value, x.value), x.batch)
        return Traced(t.emitter.rowwise(kind, x.value, scalar=right), x.batch)
    if left is not None:
        x = t.traced(b)
        reverse = kind in ("sub", "div", "pow")
        return Traced(t.emitter.rowwise(kind, x.value, scalar=left, reverse=reverse), x.batch)
    (first, second), batch = _aligned(t, node, a, b)
    return Traced(t.emitter.broadcast(kind, first, second), batch)


def _scalar(operand: Any) -> float | None:
    """The number that a plain value or a constant of one element is."""
    if isinstance(operand, Tensor) and operand.numel() == 1:
        operand = operand.item()
    return float(operand) if isinstance(operand, (int, float)) else None


def _aligned(t: Translator, node: fx.Node, *operands: Operand) -> tuple[list[Value], int | None]:
    """Operands for broadcasting: all lack the batch, which is the same axis counted from the end."""
    traced = [t.traced(x) for x in operands]
    ends = {x.batch - x.rank for x in traced if x.batch is not None}
    if len(ends) > 1:
        raise Untranslatable("it broadcasts along the batch")
    if not ends:
        return [x.value for x in traced], None
    (end,) = ends
    values = []
    for x in traced:
        shape = x.value.type.shape
        if x.batch is None and x.rank >= -end:
            values.append(t.emitter.reshape(x.value, (*shape[: x.rank + end], *shape[x.rank + end + 1 :])))
        else:
            values.append(x.value)
    return values, node.meta["val"].ndim + end


COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne")


def _compare(op: str) -> Handler:
    def handler(t: Translator, node: fx.Node, a: Operand, b: Any) -> Traced:
        x, number = t.traced(a), _scalar(b)
        if number is not None:
            return Traced(t.emitter.emit("compare", x.value, op=op, scalar=number), x.batch)
        values, batch = _aligned(t, node, a, b)
        return Traced(t.emitter.emit("compare", *values, op=op), batch)

    return handler


HANDLERS |= {f"aten.{op}": _compare(op) for op in COMPARISONS}


@translates("aten.where")
def _where(t: Translator, node: fx.Node, condition: Operand, a: Operand, b: Operand) -> Traced:
    values, batch = _aligned(t, node, condition, a, b)
    return Traced(t.emitter.emit("where", *values), batch)


@translates("aten.clamp", "aten.clamp_min", "aten.clamp_max", "aten.hardtanh")
def _clamp(t: Translator, node: fx.Node, x: Operand, first: float | None = None, second: float | None = None) -> Traced:
    x = t.traced(x)
    low, high = (None, first) if op_name(node) == "aten.clamp_max" else (first, second)
    given = {name: float(limit) for name, limit in (("low", low), ("high", high)) if limit is not None}
    return Traced(t.emitter.rowwise("clamp", x.value, **given), x.batch)


@translates("aten.softmax", "aten._softmax")
def _softmax(t: Translator, node: fx.Node, x: Operand, dim: int, *_: object, **__: object) -> Traced:
    x = t.traced(x)
    return Traced(t.emitter.emit("softmax", x.value, axis=x.axis(dim)), x.batch)


def _reduce(op: str) -> Handler:
    def handler(
        t: Translator, node: fx.Node, x: Operand, dims: Sequence[int], keepdim: bool = False, **_: Any
    ) -> Traced:
        x = t.traced(x)
        _one_axis(dims)
        axis = dims[0] % x.rank
        batch = x.batch - (x.batch > axis and not keepdim) if x.batch is not None else None
        return Traced(t.emitter.emit("reduce", x.value, op=op, axis=x.axis(axis), keepdims=keepdim), batch)

    return handler


HANDLERS |= {"aten.mean": _reduce("mean"), "aten.sum": _reduce("sum"), "aten.amax": _reduce("max")}


# layout


@translates("aten.clone", "aten.contiguous", "aten.alias", "aten.detach", "aten.dropout", "aten.lift_fresh_copy")
def _same(t: Translator, node: fx.Node, x: Operand, *_: object, **__: object) -> Operand:
    return x


@translates("aten._to_copy", "aten.to")
def _cast(t: Translator, node: fx.Node, x: Operand, *_: object, **__: object) -> Operand:
    before, after = node.all_input_nodes[0].meta["val"].dtype, node.meta["val"].dtype
    if before.is_floating_point == after.is_floating_point and (before == torch.bool) == (after == torch.bool):
        return x  # the IR has one float and one integer type
    traced = t.traced(x)
    dtype = "float32" if after.is_floating_point else "bool" if after == torch.bool else "int32"
    return Traced(t.emitter.emit("cast", traced.value, dtype=dtype), traced.batch)


@translates("aten.view", "aten.reshape", "aten._unsafe_view", "aten.flatten", "aten.unflatten")
def _view(t: Translator, node: fx.Node, x: Operand, *_: object) -> Traced:
    x, shape = t.traced(x), node.meta["val"].shape
    batch = 0 if len(shape) > 1 and isinstance(shape[0], int) and shape[0] == 1 else None
    return Traced(t.emitter.reshape(x.value, t.shape(node.meta["val"], batch)), batch)


@translates("aten.unsqueeze")
def _unsqueeze(t: Translator, node: fx.Node, x: Operand, dim: int) -> Traced:
    x = t.traced(x)
    dim %= x.rank + 1
    if dim == 0 and x.batch is None:
        return Traced(x.value, 0)
    batch = x.batch + (dim <= x.batch) if x.batch is not None else None
    return Traced(t.emitter.reshape(x.value, t.shape(node.meta["val"], batch)), batch)


@translates("aten.squeeze")
def _squeeze(t: Translator, node: fx.Node, x: Operand, dim: int | Sequence[int]) -> Traced:
    x = t.traced(x)
    if not isinstance(dim, int):
        if len(dim) != 1:
            raise Untranslatable(f"it takes out {len(dim)} axes")
        (dim,) = dim
    dim %= x.rank
    batch = None if x.batch is None or dim == x.batch else x.batch - (dim < x.batch)
    return Traced(t.emitter.reshape(x.value, t.shape(node.meta["val"], batch)), batch)


@translates("aten.permute")
def _permute(t: Translator, node: fx.Node, x: Operand, dims: Sequence[int]) -> Operand:
    if isinstance(x, Weight) and [dim % 2 for dim in dims] == [1, 0]:
        return replace(x, transposed=not x.transposed)
    x = t.traced(x)
    order = [dim % x.rank for dim in dims]
    perm = [x.axis(dim) for dim in order if dim != x.batch]
    batch = order.index(x.batch) if x.batch is not None else None
    return Traced(t.emitter.transpose(x.value, perm), batch)


@translates("aten.transpose", "aten.swapaxes")
def _transpose(t: Translator, node: fx.Node, x: Operand, first: int, second: int) -> Operand:
    order = list(range(node.meta["val"].ndim))
    order[first], order[second] = order[second], order[first]
    return _permute(t, node, x, order)


@translates("aten.t", "aten.numpy_T")
def _t(t: Translator, node: fx.Node, x: Operand) -> Operand:
    return _permute(t, node, x, (1, 0))


@translates("aten.slice")
def _slice(t: Translator, node: fx.Node, x: Operand, dim: int = 0, *span: Any) -> Operand:
    before, after = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    if before[dim] == after[dim]:
        return x
    start, stop, step = _filled(span, None, None, 1)
    x, size = t.traced(x), before[dim]
    if step != 1 or not isinstance(size, int) or isinstance(stop, SymInt):
        raise Untranslatable("it slices with a step or along the tokens")
    first, last, _ = slice(start, stop).indices(size)
    return Traced(t.emitter.slice(x.value, x.axis(dim), first, last), x.batch)


@translates("aten.select")
def _select(t: Translator, node: fx.Node, x: Operand, dim: int, index: int) -> Traced:
    x = t.traced(x)
    dim %= x.rank
    if dim == x.batch:
        return Traced(x.value)
    size = node.all_input_nodes[0].meta["val"].shape[dim]
    if not isinstance(size, int):
        raise Untranslatable("it selects among the tokens")
    part = t.emitter.slice(x.value, x.axis(dim), index % size, index % size + 1)
    batch = x.batch - (x.batch > dim) if x.batch is not None else None
    return Traced(t.emitter.reshape(part, t.shape(node.meta["val"], batch)), batch)


@translates("aten.split", "aten.split_with_sizes", "aten.chunk", "aten.unsafe_split")
def _split(t: Translator, node: fx.Node, x: Operand, _: object, dim: int = 0) -> tuple[Operand, ...]:
    x = t.traced(x)
    parts: list[Operand] = []
    start = 0
    for part in node.meta["val"]:
        size = part.shape[dim]
        if not isinstance(size, int):
            raise Untranslatable("it splits the tokens")
        if size == 0:
            parts.append(Empty())
            continue
        parts.append(Traced(t.emitter.slice(x.value, x.axis(dim), start, start + size), x.batch))
        start += size
    return tuple(parts)


@translates("aten.cat")
def _cat(t: Translator, node: fx.Node, parts: Sequence[Operand], dim: int = 0) -> Traced:
    traced = [t.traced(part) for part in parts if not isinstance(part, Empty)]
    if len({(part.batch, part.rank) for part in traced}) > 1:
        raise Untranslatable("it joins tensors with different batch axes")
    if len(traced) == 1:
        return traced[0]
    return Traced(t.emitter.concat([part.value for part in traced], traced[0].axis(dim)), traced[0].batch)


@translates("aten.stack")
def _stack(t: Translator, node: fx.Node, parts: Sequence[Operand], dim: int = 0) -> Traced:
    traced = [t.traced(part) for part in parts]
    if len({(part.batch, part.rank) for part in traced}) > 1:
        raise Untranslatable("it stacks tensors with different batch axes")
    dim %= traced[0].rank + 1
    batch = traced[0].batch
    after = batch + (dim <= batch) if batch is not None else None
    shape = list(t.shape(node.meta["val"], after))
    axis = dim - (after is not None and dim > after)
    shape[axis] = 1
    rows = [t.emitter.reshape(part.value, tuple(shape)) for part in traced]
    return Traced(t.emitter.concat(rows, axis), after)


@translates("aten.expand", "aten.expand_as", "aten.broadcast_to")
def _expand(t: Translator, node: fx.Node, x: Operand, *_: object, **__: object) -> Operand:
    before, after = node.all_input_nodes[0].meta["val"].shape, node.meta["val"].shape
    if len(before) != len(after):
        raise Untranslatable(f"it expands {tuple(before)} to {tuple(after)}")
    times = [1 if old == new else new for old, new in zip(before, after, strict=True)]
    return x if times == [1] * len(times) else _repeated(t, t.traced(x), times)


@translates("aten.repeat")
def _repeat(t: Translator, node: fx.Node, x: Operand, times: Sequence[int]) -> Traced:
    x = t.traced(x)
    if len(times) != x.rank:
        raise Untranslatable(f"it adds axes by repeating {len(times)} of {x.rank}")
    return _repeated(t, x, times)


@translates("aten.repeat_interleave")
def _repeat_interleave(t: Translator, node: fx.Node, x: Operand, times: int, dim: int, **_: object) -> Traced:
    x = t.traced(x)
    if not isinstance(times, int):
        raise Untranslatable("it repeats each part its own number of times")
    axis, shape = x.axis(dim), x.value.type.shape
    each = t.emitter.reshape(x.value, (*shape[: axis + 1], 1, *shape[axis + 1 :]))
    together = t.emitter.repeat(each, axis + 1, times)
    return Traced(t.emitter.reshape(together, t.shape(node.meta["val"], x.batch)), x.batch)


def _repeated(t: Translator, x: Traced, times: Sequence[int]) -> Traced:
    """A tensor, so many times along each axis."""
    if any(not isinstance(count, int) for count in times):
        raise Untranslatable("it repeats by the number of tokens")
    value = x.value
    for dim, count in enumerate(times):
        if count != 1:
            value = t.emitter.repeat(value, x.axis(dim), count)
    return Traced(value, x.batch)


@translates("aten.index")
def _index(t: Translator, node: fx.Node, x: Operand, indices: Sequence[Operand | None]) -> Traced:
    (dim, index), *more = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if more or not isinstance(index, Tensor) or index.ndim != 1:
        raise Untranslatable("it gathers by more than one row of constants")
    x = t.traced(x)
    axis, size = x.axis(dim), node.all_input_nodes[0].meta["val"].shape[dim]
    if not isinstance(size, int):
        raise Untranslatable("it gathers among the tokens")
    parts = [t.emitter.slice(x.value, axis, start, start + 1) for start in (index % size).tolist()]
    return Traced(t.emitter.concat(parts, axis) if len(parts) > 1 else parts[0], x.batch)
