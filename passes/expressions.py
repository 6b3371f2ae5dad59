"""What fusions of expressions share: ops as expressions over their inputs."""

from __future__ import annotations

from collections.abc import Sequence
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
        """The expression with an input, if it has that, replaced by the expression that makes it."""
        if value not in self.inputs:
            return self
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
    return _body(op, expression) if expression is not None and _is_float(op, "bool") else None


def bodies_of(op: Op) -> tuple[Body, ...]:
    """The outputs of an op over floats as expressions with reductions, none for any other op."""
    expressions = OPS[op.kind].rows([value.type for value in op.inputs], op.attrs)
    return tuple(_body(op, each) for each in expressions) if expressions is not None and _is_float(op) else ()


def gather(bodies: Sequence[Body]) -> list[Body]:
    """The same, all with the inputs of all."""
    inputs = tuple(dict.fromkeys(value for body in bodies for value in body.inputs))
    return [body.ordered(*inputs) for body in bodies]


def _is_float(op: Op, *others: str) -> bool:
    return all(value.type.dtype in ("float32", *others) for value in (*op.inputs, *op.outputs))


def _body(op: Op, expression: ex.Expression) -> Body:
    used = [op.inputs[index] for index in sorted(ex.inputs(expression))]
    inputs = tuple(dict.fromkeys(used))
    places = {index: ex.Input(inputs.index(value)) for index, value in enumerate(op.inputs) if value in inputs}
    return Body(ex.substitute(expression, [places.get(index, ex.Input(0)) for index in range(len(op.inputs))]), inputs)


def _count(expression: ex.Expression, index: int) -> int:
    if isinstance(expression, ex.Call):
        return sum(_count(arg, index) for arg in expression.args)
    return int(expression == ex.Input(index))
