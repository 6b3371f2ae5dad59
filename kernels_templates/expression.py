"""Expressions: the text that fused ops carry and that templates render, e.g. `(add (mul in0 0.5) in1)`.

    expression := `in` digits | number | `(` operator expression+ `)`

Operators and their meaning are the table `OPERATORS`; code generators render the same names. Those of `REDUCTIONS` make
one column of the last axis; an expression without any is pointwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

Numbers = npt.NDArray[Any]


def _erf(x: Numbers) -> Numbers:
    result: Numbers = np.vectorize(math.erf, otypes=[np.float64])(x).astype(x.dtype)
    return result


def _sigmoid(x: Numbers) -> Numbers:
    result: Numbers = 1.0 / (1.0 + np.exp(-np.clip(x, -88.0, 88.0)))
    return result


UNARY: dict[str, Callable[[Numbers], Numbers]] = {
    "neg": np.negative,
    "abs": np.abs,
    "exp": np.exp,
    "log": np.log,
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1.0 / np.sqrt(x),
    "tanh": np.tanh,
    "sigmoid": _sigmoid,
    "relu": lambda x: np.maximum(x, 0.0),
    "relu2": lambda x: np.square(np.maximum(x, 0.0)),
    "silu": lambda x: x * _sigmoid(x),
    "gelu": lambda x: 0.5 * x * (1.0 + _erf(x / math.sqrt(2.0))),
    "gelu_tanh": lambda x: 0.5 * x * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (x + 0.044715 * x**3))),
    "quick_gelu": lambda x: x * _sigmoid(1.702 * x),
    "softplus": lambda x: np.logaddexp(x, 0.0),
    "sin": np.sin,
    "cos": np.cos,
}
"""Operators of one argument; these are also the kinds of the `activation` op."""

BINARY: dict[str, Callable[[Numbers, Numbers], Numbers]] = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "div": np.divide,
    "pow": np.power,
    "maximum": np.maximum,
    "minimum": np.minimum,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}

REDUCTIONS: dict[str, Callable[..., Numbers]] = {"sum": np.sum, "mean": np.mean, "max": np.max}
"""Operators of one argument over its last axis, which stays with one column."""

OPERATORS: dict[str, int] = {
    **dict.fromkeys((*UNARY, *REDUCTIONS), 1),
    **dict.fromkeys(BINARY, 2),
    **dict.fromkeys(("where", "clamp"), 3),
}
"""Name to number of arguments. `(where c a b)`, `(clamp x low high)`."""


@dataclass(frozen=True)
class Input:
    """Input number `index`."""

    index: int

    def __str__(self) -> str:
        return f"in{self.index}"


@dataclass(frozen=True)
class Number:
    """A literal."""

    value: float

    def __str__(self) -> str:
        return repr(float(self.value))


@dataclass(frozen=True)
class Call:
    """An operator applied to arguments."""

    operator: str
    args: tuple[Expression, ...]

    def __str__(self) -> str:
        return f"({self.operator} {' '.join(map(str, self.args))})"


Expression = Input | Number | Call


def parse(text: str) -> Expression:
    """The expression that `text` spells. Raises ValueError saying where it is malformed."""
    expression, *rest = parse_all(text)
    if rest:
        raise ValueError(f"unexpected {str(rest[0])!r} after the expression in {text!r}")
    return expression


def parse_all(text: str) -> tuple[Expression, ...]:
    """The expressions, one or more, that `text` spells. Raises ValueError saying where it is malformed."""
    rest, found = re.findall(r"[()]|[^\s()]+", text), list[Expression]()
    while rest or not found:
        expression, rest = _parse(rest, text)
        found.append(expression)
    return tuple(found)


def _parse(tokens: list[str], text: str) -> tuple[Expression, list[str]]:
    if not tokens:
        raise ValueError(f"expression {text!r} ends too early")
    head, rest = tokens[0], tokens[1:]
    if head != "(":
        return _atom(head, text), rest
    if not rest or rest[0] not in OPERATORS:
        raise ValueError(f"expected an operator, found {rest[:1]} in {text!r}")
    operator, rest = rest[0], rest[1:]
    args: list[Expression] = []
    while rest and rest[0] != ")":
        arg, rest = _parse(rest, text)
        args.append(arg)
    if not rest or len(args) != OPERATORS[operator]:
        raise ValueError(f"{operator} takes {OPERATORS[operator]} arguments, found {len(args)} in {text!r}")
    return Call(operator, tuple(args)), rest[1:]


def _atom(token: str, text: str) -> Expression:
    if re.fullmatch(r"in\d+", token):
        return Input(int(token[2:]))
    try:
        return Number(float(token))
    except ValueError:
        raise ValueError(f"expected inN, a number or '(', found {token!r} in {text!r}") from None


def inputs(expression: Expression) -> set[int]:
    """Indices of the inputs that occur."""
    if isinstance(expression, Call):
        return set().union(*(inputs(arg) for arg in expression.args))
    return {expression.index} if isinstance(expression, Input) else set()


def substitute(expression: Expression, values: Sequence[Expression]) -> Expression:
    """The expression with `in<i>` replaced by `values[i]`."""
    if isinstance(expression, Call):
        return Call(expression.operator, tuple(substitute(arg, values) for arg in expression.args))
    return values[expression.index] if isinstance(expression, Input) else expression


def replace(expression: Expression, table: Mapping[Expression, Expression]) -> Expression:
    """The expression with every part that the table has, the largest first, replaced by what it says."""
    if expression in table:
        return table[expression]
    if isinstance(expression, Call):
        return Call(expression.operator, tuple(replace(arg, table) for arg in expression.args))
    return expression


def reductions(*expressions: Expression) -> tuple[Call, ...]:
    """The distinct reductions that occur, inner ones first."""
    found: dict[Call, None] = {}
    for expression in expressions:
        if isinstance(expression, Call):
            found |= dict.fromkeys(reductions(*expression.args))
            if expression.operator in REDUCTIONS:
                found[expression] = None
    return tuple(found)


def evaluate(expression: Expression, values: Sequence[Numbers]) -> Numbers:
    """The numpy meaning; inputs broadcast."""
    if isinstance(expression, Input):
        return values[expression.index]
    if isinstance(expression, Number):
        return np.asarray(expression.value, dtype=np.float32)
    args = [evaluate(arg, values) for arg in expression.args]
    if expression.operator == "where":
        return np.where(args[0].astype(bool), args[1], args[2])
    if expression.operator == "clamp":
        return np.clip(args[0], args[1], args[2])
    if expression.operator in UNARY:
        return UNARY[expression.operator](args[0])
    if expression.operator in REDUCTIONS:
        return REDUCTIONS[expression.operator](args[0], axis=-1, keepdims=True)
    return BINARY[expression.operator](args[0], args[1])


@dataclass(frozen=True)
class Passes:
    """How expressions with reductions are computed: pass by pass over a row. In the texts the first reduction's result
    is `in<n>` after `n` inputs, the second's is `in<n+1>`, and so on.
    """

    reductions: tuple[tuple[str, str], ...]
    """Operator and argument of each."""
    results: tuple[str, ...]


def to_passes(text: str, inputs: int) -> Passes:
    """The passes of expressions of some inputs."""
    expressions = parse_all(text)
    table: dict[Expression, Expression] = {}
    found = []
    for reduction in reductions(*expressions):
        found.append((reduction.operator, str(replace(reduction.args[0], table))))
        table[reduction] = Input(inputs + len(table))
    return Passes(tuple(found), tuple(str(replace(expression, table)) for expression in expressions))


def inputs_of(text: str) -> list[int]:
    """Indices of the inputs that occur in the text of one or more expressions, in order."""
    return sorted(set().union(*map(inputs, parse_all(text))))


def to_cpp(text: str, names: Sequence[str]) -> str:
    """The C++ vector expression of an expression text, over `simd.h` functions; `in<i>` becomes `names[i]`."""
    return _cpp(parse(text), names)


def _cpp(expression: Expression, names: Sequence[str]) -> str:
    if isinstance(expression, Input):
        return names[expression.index]
    if isinstance(expression, Number):
        return f"vset({_cpp_number(expression.value)})"
    return f"v_{expression.operator}({', '.join(_cpp(arg, names) for arg in expression.args)})"


def _cpp_number(value: float) -> str:
    if math.isnan(value):
        return "NAN"
    if math.isinf(value):
        return "INFINITY" if value > 0 else "-INFINITY"
    return f"{value!r}f"
