"""Pointwise work behind a linear layer becomes the layer's epilogue."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Graph, Op, Value
from ..compiler.lower import MAX_EXTRAS
from ..compiler.op_spec import bool_attr, str_attr
from ..compiler.ops import make_op
from ..compiler.pass_ import Outcome, Pass
from ..compiler.rewrite import ANY, Replacement, Workspace, rewrite
from ..kernels_templates import expression as ex
from .expressions import Body, body_of


@dataclass(frozen=True)
class FuseLinearEpilogue(Pass):
    """Expects: pointwise ops fused, and additions that belong to a norm taken. Guarantees: a pointwise op that alone
    reads a linear layer's result is its epilogue, if the other inputs (at most `max_extras`) span all or the columns.
    """

    name: ClassVar[str] = "linear_epilogue"
    max_extras: int = MAX_EXTRAS

    def run(self, graph: Graph) -> Outcome:
        return rewrite(graph, {ANY: self._fuse})

    def _fuse(self, op: Op, work: Workspace) -> Replacement | None:
        body = body_of(op)
        for value in body.inputs if body is not None else ():
            linear = work.producer(value, "linear")
            if linear is not None and body is not None and work.only_user(value) is op:
                replacement = self._absorbed(op, body, linear)
                if replacement is not None:
                    return replacement
        return None

    def _absorbed(self, op: Op, body: Body, linear: Op) -> Replacement | None:
        product = linear.output
        if op.output.type != product.type:
            return None
        before = _epilogue(linear)
        if before.expression != ex.Input(0) and body.uses(product) > 1:
            return None
        merged = body.inline(product, before).ordered(product)
        extras = merged.inputs[1:]
        shapes = (product.type.shape, product.type.shape[-1:])
        if len(extras) > self.max_extras or any(extra.type.shape not in shapes for extra in extras):
            return None
        plain = linear.inputs[: 2 + bool_attr(linear.attrs, "has_bias")]
        attrs = {**linear.attrs, "epilogue": str(merged.expression)}
        return Replacement((make_op("linear", (*plain, *extras), [op.output.name], attrs, linear.source),))


def _epilogue(linear: Op) -> Body:
    """A linear layer's epilogue, with its plain result as input 0."""
    extras: tuple[Value, ...] = linear.inputs[2 + bool_attr(linear.attrs, "has_bias") :]
    text = str_attr(linear.attrs, "epilogue")
    return Body(ex.parse(text) if text else ex.Input(0), (linear.output, *extras))
