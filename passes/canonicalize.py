"""Remove layout changes and arithmetic that do nothing, so that later passes see one form of each thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Op, Value
from ..compiler.op_spec import float_attr, int_attr, ints_attr
from ..compiler.ops import make_op
from ..compiler.rewrite import Match, Replacement, Rewriting, Rule
from ..compiler.shapes import Sym


@dataclass(frozen=True)
class Canonicalize(Rewriting):
    """Expects nothing. Guarantees: no dead op; no reshape, transpose, slice, concat or cast that changes nothing; none
    applied to another of its kind where one would do; a scale on an embedding is its attribute.
    """

    name: ClassVar[str] = "canonicalize"

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule("reshape|slice|cast(x)", "x, if its type is the same", _same_type),
            Rule("reshape(reshape(x))", "reshape(x)", _reshape),
            Rule("transpose(x)", "x, if no axis moves", _same_order),
            Rule("transpose(x)", "reshape(x), if only axes of size 1 move", _moved_ones),
            Rule("transpose(inner:transpose(x))", "transpose(x)", _transpose),
            Rule("slice(inner:slice(x))", "slice(x), along one axis", _slice),
            Rule("slice(inner:concat(*parts))", "slice(part), if it lies within one", _slice_of_concat),
            Rule("concat(x)", "x", _forward),
            Rule("concat(first:slice(x), *rest)", "slice(x), if all are adjacent slices of it", _concat),
            Rule("add(product:linear!(*_), bias)", "linear with that bias, if it has none", _bias),
            Rule("add|sub(x)", "x, if it is x + 0 or x - 0", _neutral_sum),
            Rule("mul|div(x)", "x, if it is x * 1 or x / 1", _neutral_product),
            Rule("mul(rows:embedding!(table, ids))", "embedding(table, ids), scaled", _scaled),
        )


def _forward(match: Match) -> Replacement:
    return Replacement(forward={match.op.output.name: match["x"]})


def _same_type(match: Match) -> Replacement | None:
    return _forward(match) if match.op.output.type == match["x"].type else None


def _reshape(match: Match) -> Replacement:
    shape = tuple(-1 if isinstance(dim, Sym) else dim for dim in match.op.output.type.shape)
    return _instead(match.op, match["x"], shape=shape)


def _same_order(match: Match) -> Replacement | None:
    perm = ints_attr(match.op.attrs, "perm")
    return _forward(match) if perm == tuple(range(len(perm))) else None


def _moved_ones(match: Match) -> Replacement | None:
    shape = match["x"].type.shape
    kept = [axis for axis in ints_attr(match.op.attrs, "perm") if shape[axis] != 1]
    if kept != sorted(kept):
        return None
    sizes = tuple(-1 if isinstance(size, Sym) else size for size in match.op.output.type.shape)
    return Replacement((make_op("reshape", [match["x"]], [match.op.output.name], {"shape": sizes}, match.op.source),))


def _transpose(match: Match) -> Replacement:
    first = ints_attr(match.labeled("inner").attrs, "perm")
    return _instead(match.op, match["x"], perm=tuple(first[axis] for axis in ints_attr(match.op.attrs, "perm")))


def _slice(match: Match) -> Replacement | None:
    inner, op = match.labeled("inner"), match.op
    if inner.attrs["axis"] != op.attrs["axis"]:
        return None
    offset = int_attr(inner.attrs, "start")
    bounds = {name: int_attr(op.attrs, name) + offset for name in ("start", "stop")}
    return _instead(op, match["x"], **bounds)


def _slice_of_concat(match: Match) -> Replacement | None:
    axis, start, stop = (int_attr(match.op.attrs, name) for name in ("axis", "start", "stop"))
    if match.labeled("inner").attrs["axis"] != axis:
        return None
    for part in match.rest("parts"):
        size = part.type.shape[axis]
        assert isinstance(size, int)
        if start >= 0 and stop <= size:
            return _instead(match.op, part, start=start, stop=stop)
        start, stop = start - size, stop - size
    return None


def _concat(match: Match) -> Replacement | None:
    slices = [match.labeled("first"), *(match.work.producer(part, "slice") for part in match.rest("rest"))]
    end = int_attr(match.labeled("first").attrs, "start")
    for part in slices:
        if part is None or part.inputs[0] != match["x"] or part.attrs["axis"] != match.op.attrs["axis"]:
            return None
        if part.attrs["start"] != end:
            return None
        end = int_attr(part.attrs, "stop")
    first = match.labeled("first")
    attrs = {**first.attrs, "stop": end}
    return Replacement((make_op("slice", first.inputs, [match.op.output.name], attrs, match.op.source),))


def _bias(match: Match) -> Replacement | None:
    linear, bias = match.labeled("product"), match["bias"]
    if linear.attrs["has_bias"] or linear.attrs["epilogue"] or match.work.param(bias) is None:
        return None
    if bias.type.shape != linear.output.type.shape[-1:]:
        return None
    attrs = {**linear.attrs, "has_bias": True}
    return Replacement((make_op("linear", (*linear.inputs, bias), [match.op.output.name], attrs, linear.source),))


def _neutral_sum(match: Match) -> Replacement | None:
    neutral = match.op.attrs["scalar"] == 0.0 and (match.op.kind == "add" or not match.op.attrs["reverse"])
    return _forward(match) if neutral else None


def _neutral_product(match: Match) -> Replacement | None:
    neutral = match.op.attrs["scalar"] == 1.0 and (match.op.kind == "mul" or not match.op.attrs["reverse"])
    return _forward(match) if neutral else None


def _scaled(match: Match) -> Replacement:
    rows = match.labeled("rows")
    attrs = {"scale": float_attr(rows.attrs, "scale") * float_attr(match.op.attrs, "scalar")}
    return Replacement((make_op("embedding", rows.inputs, [match.op.output.name], attrs, rows.source),))


def _instead(op: Op, x: Value, **attrs: int | tuple[int, ...]) -> Replacement:
    """The op with another input and some other attributes."""
    return Replacement((make_op(op.kind, [x], [op.output.name], {**op.attrs, **attrs}, op.source),))
