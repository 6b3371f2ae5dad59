"""A residual addition and the norm behind it become one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ops import make_op
from ..compiler.rewrite import Match, Mismatch, Replacement, Rewriting, Rule


@dataclass(frozen=True)
class FuseAddNorm(Rewriting):
    """Expects nothing. Guarantees: no norm over rows reads an addition of two values of its own shape."""

    name: ClassVar[str] = "add_norm"

    def rules(self) -> tuple[Rule, ...]:
        failure = "the addition before the norm stays on its own"
        return (Rule("norm(add(x, residual), *weights)", "add_norm(x, residual, *weights)", _fuse, failure),)


def _fuse(match: Match) -> Replacement:
    x, residual, norm = match["x"], match["residual"], match.op
    total = norm.inputs[0]
    if len(total.type.shape) != 2 or x.type != residual.type:
        raise Mismatch(f"it adds {x.type} and {residual.type}")
    inputs = (x, residual, *match.rest("weights"))
    return Replacement((make_op("add_norm", inputs, [total.name, norm.output.name], norm.attrs, norm.source),))
