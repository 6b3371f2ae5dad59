"""What the two fusions of pointwise work share: ops as expressions over their inputs."""

from __future__ import annotations

from dataclasses import dataclass

from ..compiler.ir import Op, Value
from ..compiler.ops import OPS
from ..kernels_templates import expression as ex


@dataclass(frozen=True)
class Body:
    """An expression and the values of its inputs, each listed once."""

    expression: ex.Expression
    inputs: tuple[Value, ...]

    def uses(self, value: Value) -> int:
        """How often a value occurs in the expression."""
        return _count(self.expression, self.inputs.index(value)) if value in self.inputs else 0

    def inline(self, value: Value, body: Body) -> Body:
        """The expression with an input replaced by the expression that makes it."""
        others = tuple(dict.fromkeys((*body.inputs, *(other for other in self.inputs if other != value))))
        inner = ex.substitute(body.expression, [ex.Input(others.index(other)) for other in body.inputs])
        values = [inner if other == value else ex.Input(others.index(other)) for other in self.inputs]
        return Body(ex.substitute(self.expression, values), others)

    def ordered(self, *first: Value) -> Body:
        """The same with `first` as the first inputs."""
        inputs = tuple(dict.fromkeys((*first, *self.inputs)))
        return Body(ex.substitute(self.expression, [ex.Input(inputs.index(value)) for value in self.inputs]), inputs)


def body_of(op: Op) -> Body | None:
    """A pointwise op over floats as an expression, None for any other op."""
    expression = OPS[op.kind].expression(op.attrs, len(op.inputs))
    if expression is None or any(value.type.dtype not in ("float32", "bool") for value in (*op.inputs, *op.outputs)):
        return None
    inputs = tuple(dict.fromkeys(op.inputs))
    return Body(ex.substitute(expression, [ex.Input(inputs.index(value)) for value in op.inputs]), inputs)


def _count(expression: ex.Expression, index: int) -> int:
    if isinstance(expression, ex.Call):
        return sum(_count(arg, index) for arg in expression.args)
    return int(expression == ex.Input(index))
