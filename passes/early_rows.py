"""Take the rows that need logits as early as possible, so that what works row by row does so for those rows alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Op, Value
from ..compiler.ops import make_op
from ..compiler.rewrite import Match, Mismatch, Replacement, Rewriting, Rule


@dataclass(frozen=True)
class EarlyRows(Rewriting):
    """Expects nothing. Guarantees: `take_rows` reads no result of a linear layer, a norm or a pointwise op that nothing
    else reads. In a decoder it moves up to the last layer's attention, and prefill computes what is behind that for the
    last row of a prompt alone.
    """

    name: ClassVar[str] = "early_rows"

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule(
                "take_rows(inner:linear|norm|slice|concat|expr!(*_), rows)",
                "the inner op, of take_rows(operand, rows)",
                _earlier,
                "rows are taken only after the op before it",
            ),
        )


def _earlier(match: Match) -> Replacement:
    inner, rows = match.labeled("inner"), match["rows"]
    if inner.attrs.get("axis") == 0:
        raise Mismatch("that works across rows")
    tokens = inner.output.type.shape[0]
    taken: dict[Value, Op] = {}
    for value in dict.fromkeys(inner.inputs):
        if tokens not in value.type.shape:
            continue
        if len(value.type.shape) != 2:
            raise Mismatch(f"rows can't be taken of {value}")
        taken[value] = _take(match, value, rows)
    inputs = [taken[value].output if value in taken else value for value in inner.inputs]
    moved = make_op(inner.kind, inputs, [match.op.output.name], inner.attrs, inner.source)
    new = [op for op in taken.values() if match.work.producer(op.output) is None]
    return Replacement((*new, moved))


def _take(match: Match, value: Value, rows: Value) -> Op:
    """The op that takes rows of a value: the one that is there already, or a new one."""
    for user in match.work.users(value):
        if user.kind == "take_rows" and user.inputs == (value, rows):
            return user
    name = match.work.fresh(f"{value.name}.rows")
    return make_op("take_rows", (value, rows), [name], source=match.op.source)
