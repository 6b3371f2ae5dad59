"""Bring scales and norms around attention into the order that fusion knows. Numbers change by rounding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..compiler.ir import Op, Value
from ..compiler.op_spec import Array, float_attr
from ..compiler.ops import make_op
from ..compiler.rewrite import Match, Replacement, Rewriting, Rule, Workspace


@dataclass(frozen=True)
class Reassociate(Rewriting):
    """Expects: attention without caches. Guarantees: no factor on queries or keys, as attention's own scale has it; no
    norm without weights of rotated heads, as it is before the rotation, which keeps lengths.
    """

    name: ClassVar[str] = "reassociate"

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule("attention(q, k, *rest)", "attention(q / c, k, *rest), scaled by c", _factor),
            Rule("norm(turned:rope!(x, cos, sin))", "rope(norm(x), cos, sin)", _norm_before_rope),
        )


def _factor(match: Match) -> Replacement | None:
    """Attention whose queries or keys were multiplied with a number, before reshapes and rotations or after them."""
    for place in (0, 1):
        chain = _chain(match.op.inputs[place], match.work)
        if not chain:
            continue
        scaled, *behind = chain[::-1]
        factor = float_attr(scaled.attrs, "scalar")
        value, new = scaled.inputs[0], list[Op]()
        for op in behind:
            name = match.work.fresh(f"{op.output.name}.plain")
            new.append(make_op(op.kind, (value, *op.inputs[1:]), [name], op.attrs, op.source))
            value = new[-1].output
        inputs = [value if index == place else other for index, other in enumerate(match.op.inputs)]
        scale = float_attr(match.op.attrs, "scale") * (factor if scaled.kind == "mul" else 1 / factor)
        attrs = {**match.op.attrs, "scale": scale}
        attention = make_op("attention", inputs, [match.op.output.name], attrs, match.op.source)
        return Replacement((*new, attention))
    return None


def _chain(value: Value, work: Workspace) -> Sequence[Op]:
    """The ops from a value back to a product with a number, through reshapes and rotations that nothing else reads."""
    chain: list[Op] = []
    while (op := work.producer(value)) is not None and work.only_user(value) is not None:
        chain.append(op)
        if op.kind in ("mul", "div"):
            number = len(op.inputs) == 1 and not op.attrs["reverse"] and op.attrs["scalar"] != 0.0
            return chain if number else ()
        if op.kind not in ("reshape", "rope"):
            return ()
        value = op.inputs[0]
    return ()


def _norm_before_rope(match: Match) -> Replacement | None:
    norm, rope = match.op, match.labeled("turned")
    if norm.attrs["kind"] == "layer" or not _keeps_lengths(match["cos"], match["sin"], match.work):
        return None
    normed = make_op("norm", [match["x"]], [match.work.fresh(f"{match['x'].name}.normed")], norm.attrs, norm.source)
    inputs = (normed.output, match["cos"], match["sin"])
    return Replacement((normed, make_op("rope", inputs, [norm.output.name], rope.attrs, rope.source)))


def _keeps_lengths(cos: Value, sin: Value, work: Workspace) -> bool:
    """Whether cos² + sin² = 1: both are of the same angles, computed or looked up in constant tables."""
    first, second = work.producer(cos), work.producer(sin)
    if first is None or second is None or first.kind != second.kind or first.inputs[1:] != second.inputs[1:]:
        return False
    if first.kind == "activation":
        return first.inputs == second.inputs and (first.attrs["kind"], second.attrs["kind"]) == ("cos", "sin")
    tables = [_table(op, work) for op in (first, second) if op.kind == "embedding"]
    return len(tables) == 2 and bool(np.allclose(tables[0] + tables[1], 1.0, atol=1e-5))


def _table(rows: Op, work: Workspace) -> Array:
    """Squares of the numbers of a constant table, NaN if it is none."""
    param = work.param(rows.inputs[0])
    if param is None or param.recipe.constant is None:
        return np.full(1, np.nan)
    return np.square(param.recipe.constant.array.astype(np.float64) * float_attr(rows.attrs, "scale"))
