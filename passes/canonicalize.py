"""Remove layout changes and arithmetic that do nothing, so that later passes see one form of each thing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Graph, Op, Value
from ..compiler.op_spec import int_attr, ints_attr
from ..compiler.ops import make_op
from ..compiler.pass_ import Outcome, Pass
from ..compiler.rewrite import Replacement, Rule, Workspace, rewrite
from ..compiler.shapes import Sym


@dataclass(frozen=True)
class Canonicalize(Pass):
    """Expects nothing. Guarantees: no dead op; no reshape, transpose, slice, concat or cast that changes nothing; none
    applied to another of its kind where one would do; a scale on an embedding is its attribute.
    """

    name: ClassVar[str] = "canonicalize"

    def run(self, graph: Graph) -> Outcome:
        return rewrite(graph, RULES)


def _forward(op: Op, value: Value) -> Replacement:
    return Replacement(forward={op.output.name: value})


def _same(op: Op, work: Workspace) -> Replacement | None:
    """An op whose result is its input."""
    return _forward(op, op.inputs[0]) if op.output.type == op.inputs[0].type else None


def _reshape(op: Op, work: Workspace) -> Replacement | None:
    if (same := _same(op, work)) is not None:
        return same
    inner = work.producer(op.inputs[0], "reshape")
    if inner is None:
        return None
    shape = tuple(-1 if isinstance(dim, Sym) else dim for dim in op.output.type.shape)
    return Replacement((make_op("reshape", inner.inputs, [op.output.name], {"shape": shape}, op.source),))


def _transpose(op: Op, work: Workspace) -> Replacement | None:
    perm = ints_attr(op.attrs, "perm")
    if perm == tuple(range(len(perm))):
        return _forward(op, op.inputs[0])
    inner = work.producer(op.inputs[0], "transpose")
    if inner is None:
        return None
    first = ints_attr(inner.attrs, "perm")
    merged = {"perm": tuple(first[axis] for axis in perm)}
    return Replacement((make_op("transpose", inner.inputs, [op.output.name], merged, op.source),))


def _slice(op: Op, work: Workspace) -> Replacement | None:
    if (same := _same(op, work)) is not None:
        return same
    inner = work.producer(op.inputs[0], "slice", "concat")
    if inner is None or inner.attrs["axis"] != op.attrs["axis"]:
        return None
    if inner.kind == "concat":
        return _slice_of_concat(op, inner)
    offset = int_attr(inner.attrs, "start")
    bounds = {name: int_attr(op.attrs, name) + offset for name in ("start", "stop")}
    return Replacement((make_op("slice", inner.inputs, [op.output.name], dict(op.attrs) | bounds, op.source),))


def _slice_of_concat(op: Op, inner: Op) -> Replacement | None:
    """A slice that lies within one part of a concatenation."""
    axis, start, stop = (int_attr(op.attrs, name) for name in ("axis", "start", "stop"))
    for part in inner.inputs:
        size = part.type.shape[axis]
        assert isinstance(size, int)
        if start >= 0 and stop <= size:
            bounds = {"start": start, "stop": stop}
            return Replacement((make_op("slice", [part], [op.output.name], dict(op.attrs) | bounds, op.source),))
        start, stop = start - size, stop - size
    return None


def _concat(op: Op, work: Workspace) -> Replacement | None:
    """A concatenation of one part, or of adjacent slices of one value."""
    if len(op.inputs) == 1:
        return _forward(op, op.inputs[0])
    slices = [work.producer(part, "slice") for part in op.inputs]
    first = slices[0]
    if first is None:
        return None
    end = int_attr(first.attrs, "start")
    for part in slices:
        if part is None or part.inputs != first.inputs or part.attrs["axis"] != op.attrs["axis"]:
            return None
        if part.attrs["start"] != end:
            return None
        end = int_attr(part.attrs, "stop")
    attrs = dict(first.attrs) | {"stop": end}
    return Replacement((make_op("slice", first.inputs, [op.output.name], attrs, op.source),))


def _neutral(number: float, *, reversible: bool) -> Rule:
    """A rule for arithmetic with the scalar that changes nothing."""

    def rule(op: Op, work: Workspace) -> Replacement | None:
        if len(op.inputs) == 1 and op.attrs["scalar"] == number and (reversible or not op.attrs["reverse"]):
            return _forward(op, op.inputs[0])
        return None

    return rule


def _mul(op: Op, work: Workspace) -> Replacement | None:
    """A product with 1, or a scale on an embedding that nothing else reads."""
    if (same := _neutral(1.0, reversible=True)(op, work)) is not None:
        return same
    inner = work.producer(op.inputs[0], "embedding")
    if len(op.inputs) != 1 or inner is None or work.only_user(inner.output) is not op:
        return None
    scale, scalar = inner.attrs["scale"], op.attrs["scalar"]
    assert isinstance(scale, float)
    assert isinstance(scalar, float)
    attrs = {"scale": scale * scalar}
    return Replacement((make_op("embedding", inner.inputs, [op.output.name], attrs, inner.source),))


RULES: dict[str, Rule] = {
    "reshape": _reshape,
    "transpose": _transpose,
    "slice": _slice,
    "concat": _concat,
    "cast": _same,
    "add": _neutral(0.0, reversible=True),
    "sub": _neutral(0.0, reversible=False),
    "mul": _mul,
    "div": _neutral(1.0, reversible=False),
}
