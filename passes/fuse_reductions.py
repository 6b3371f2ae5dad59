"""Norms, reductions over rows, and the pointwise work before and behind them become one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Op
from ..compiler.lower import row_forms
from ..compiler.lowering import Unsupported
from ..compiler.ops import make_op
from ..compiler.rewrite import Match, Mismatch, Replacement, Rewriting, Rule
from ..kernels_templates import expression as ex
from .expressions import bodies_of, gather

MAX_PASSES = 4


@dataclass(frozen=True)
class FuseReductions(Rewriting):
    """Expects: pointwise ops fused, with each other and into linear layers. Guarantees: no two ops of which one alone
    reads the other's result, at least one reduces the last axis (a norm, a softmax, a sum, a mean, a maximum), and both
    together have one kernel: at most `max_passes` reductions over one number of columns, of inputs that span rows,
    columns or both.

    Work before a reduction is done again in each pass over the row, which is shorter than another launch.
    """

    name: ClassVar[str] = "fuse_reductions"
    max_passes: int = MAX_PASSES

    def rules(self) -> tuple[Rule, ...]:
        failure = "it is not fused with the op before it"
        return (
            Rule("rows(.., inner:rows!(*_), ..)", "reduction, with the outputs of the outer op", self._fuse, failure),
        )

    def _fuse(self, match: Match) -> Replacement | None:
        op, inner = match.op, match.labeled("inner")
        outer, before = bodies_of(op), bodies_of(inner)
        if len(before) != 1 or not outer or inner.output.type.shape[:-1] != op.outputs[-1].type.shape[:-1]:
            return None
        bodies = gather([body.inline(inner.output, before[0]) for body in outer])
        passes = ex.reductions(*(body.expression for body in bodies))
        if not passes:
            return None
        if len(passes) > self.max_passes:
            raise Mismatch(f"together they have {len(passes)} reductions, more than {self.max_passes}")
        inputs = bodies[0].inputs
        try:
            row_forms([body.expression for body in bodies], [value.type.shape for value in inputs])
        except (Unsupported, ValueError) as reason:
            raise Mismatch(str(reason)) from reason
        attrs = {"exprs": " ".join(str(body.expression) for body in bodies)}
        fused = make_op("reduction", inputs, [value.name for value in op.outputs], attrs, op.source)
        return Replacement((fused,)) if _types(fused) == _types(op) else None


def _types(op: Op) -> list[str]:
    return [str(value.type) for value in op.outputs]
