"""Chains and trees of pointwise ops become one op each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Graph, Op, Value
from ..compiler.lower import MAX_POINTWISE, broadcast_forms
from ..compiler.lowering import Unsupported
from ..compiler.ops import make_op
from ..compiler.pass_ import Outcome, Pass
from ..compiler.rewrite import ANY, Replacement, Workspace, rewrite
from .expressions import Body, body_of


@dataclass(frozen=True)
class FusePointwise(Pass):
    """Expects nothing. Guarantees: a pointwise op that only one other reads, once, is part of that one, if the result
    has at most `max_inputs` inputs, each of which spans rows, columns or both. No work is done twice.
    """

    name: ClassVar[str] = "fuse_pointwise"
    max_inputs: int = MAX_POINTWISE

    def run(self, graph: Graph) -> Outcome:
        return rewrite(graph, {ANY: self._fuse})

    def _fuse(self, op: Op, work: Workspace) -> Replacement | None:
        body = body_of(op)
        if body is None or op.output.type.dtype != "float32":
            return None
        for value in body.inputs:
            merged = self._inlined(op, body, value, work)
            if merged is not None:
                attrs = {"expr": str(merged.expression)}
                return Replacement((make_op("pointwise", merged.inputs, [op.output.name], attrs, op.source),))
        return None

    def _inlined(self, op: Op, body: Body, value: Value, work: Workspace) -> Body | None:
        """The op's expression with that of an input in it, if that is allowed."""
        producer = work.producer(value)
        inner = body_of(producer) if producer is not None else None
        if inner is None or work.only_user(value) is not op:
            return None
        if value.type.shape != op.output.type.shape or body.uses(value) != 1:
            return None
        merged = body.inline(value, inner)
        return merged if len(merged.inputs) <= self.max_inputs and _broadcasts(op.output, merged) else None


def _broadcasts(output: Value, body: Body) -> bool:
    try:
        broadcast_forms(output.type.shape, [value.type.shape for value in body.inputs])
    except Unsupported:
        return False
    return True
