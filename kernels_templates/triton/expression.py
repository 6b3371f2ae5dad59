"""Expressions over the functions of `base.py.j2`."""

from __future__ import annotations

from collections.abc import Sequence

from ..expression import REDUCTIONS, Call, Expression, Input, Number, inputs, parse, parse_all

MOST_FACTORS = 4
"""Of a power that becomes a product."""


def supported(text: str) -> bool:
    """Whether Triton can compute every expression of a text: powers only of whole numbers from 1 to `MOST_FACTORS`."""
    return not text or all(map(_supported, parse_all(text)))


def _supported(expression: Expression) -> bool:
    if not isinstance(expression, Call):
        return True
    if not inputs(expression):  # numbers alone are no tensor
        return False
    if expression.operator == "pow" and not _is_product(expression.args[1]):
        return False
    return all(map(_supported, expression.args))


def _is_product(exponent: Expression) -> bool:
    return isinstance(exponent, Number) and exponent.value in range(1, MOST_FACTORS + 1)


def to_triton(text: str, names: Sequence[str]) -> str:
    """The Triton expression of a text that is `supported`; `in<i>` becomes `names[i]`."""
    return _triton(parse(text), names)


def _triton(expression: Expression, names: Sequence[str]) -> str:
    if isinstance(expression, Input):
        return names[expression.index]
    if isinstance(expression, Number):
        return repr(expression.value) if abs(expression.value) < float("inf") else f'float("{expression.value}")'
    if expression.operator == "pow":
        base, exponent = expression.args
        assert isinstance(exponent, Number)
        return f"({' * '.join([_triton(base, names)] * int(exponent.value))})"
    assert expression.operator not in REDUCTIONS
    return f"v_{expression.operator}({', '.join(_triton(arg, names) for arg in expression.args)})"
