"""Chains and trees of pointwise ops become one op each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Value
from ..compiler.lower import MAX_POINTWISE, broadcast_forms
from ..compiler.lowering import Unsupported
from ..compiler.ops import make_op
from ..compiler.rewrite import Match, Mismatch, Replacement, Rewriting, Rule
from .expressions import Body, body_of


@dataclass(frozen=True)
class FusePointwise(Rewriting):
    """Expects nothing. Guarantees: a pointwise op that only one other of the same shape reads is part of that one, if
    the result has at most `max_inputs` inputs, each of which spans rows, columns or both, and a text no longer than
    `max_text`. No work is done twice: compilers of kernels compute equal parts of an expression once.
    """

    name: ClassVar[str] = "fuse_pointwise"
    max_inputs: int = MAX_POINTWISE
    max_text: int = 2000

    def rules(self) -> tuple[Rule, ...]:
        failure = "it is not fused with the op before it"
        return (Rule("expr(.., inner:expr!(*_), ..)", "pointwise", self._fuse, failure),)

    def _fuse(self, match: Match) -> Replacement | None:
        op, inner = match.op, match.labeled("inner")
        outer_body, inner_body = body_of(op), body_of(inner)
        value = inner.output
        if outer_body is None or inner_body is None or op.output.type.dtype != "float32":
            return None
        if value.type.shape != op.output.type.shape:
            return None
        merged = outer_body.inline(value, inner_body)
        if len(merged.inputs) > self.max_inputs:
            raise Mismatch(f"together they have {len(merged.inputs)} inputs, more than {self.max_inputs}")
        text = str(merged.expression)
        if len(text) > self.max_text:
            raise Mismatch(f"together they are {len(text)} characters long, more than {self.max_text}")
        _check_broadcast(op.output, merged)
        attrs = {"expr": text}
        return Replacement((make_op("pointwise", merged.inputs, [op.output.name], attrs, op.source),))


def _check_broadcast(output: Value, body: Body) -> None:
    try:
        broadcast_forms(output.type.shape, [value.type.shape for value in body.inputs])
    except Unsupported as reason:
        raise Mismatch(str(reason)) from reason
