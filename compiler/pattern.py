"""Patterns of ops, as text: which ops stand behind each other, and what their operands are called.

    pattern  := [label `:`] kinds [`!`] `(` [operand {`,` operand}] `)`
    kinds    := kind {`|` kind}, `expr` for any op that is a pointwise expression, `rows` for any that is one of rows
                (with reductions over the last axis), or `any`
    operand  := pattern | name | `_` | `*` name | `..`

`norm(sum:add(x, residual), *weights)` is a norm of a sum. A name is bound to a value, and where it occurs twice both
must be the same one; `_` is not bound. `*weights` is bound to the remaining operands, and `..` skips any number of
them. `!` wants a result that nothing but the matched op reads. The operands of a commutative op match in either order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol

from .ir import Op, Value
from .ops import OPS

COMMUTATIVE = ("add", "mul", "maximum", "minimum")
SKIP, ANONYMOUS = "..", "_"
CLASSES = ("expr", "rows", "any")
"""What stands for many kinds of ops."""


class Surroundings(Protocol):
    """What matching must know about a graph."""

    def producer(self, value: Value, *kinds: str) -> Op | None:
        """The op that makes a value."""

    def only_user(self, value: Value, *kinds: str) -> Op | None:
        """The op that alone reads a value."""


@dataclass(frozen=True)
class Pattern:
    """One op of a pattern, and what its operands must be."""

    label: str
    kinds: tuple[str, ...]
    alone: bool
    operands: tuple[Pattern | str, ...]

    def fits(self, op: Op) -> bool:
        """Whether an op is of one of the kinds."""
        if "any" in self.kinds or op.kind in self.kinds:
            return True
        if "rows" in self.kinds:
            return OPS[op.kind].rows([value.type for value in op.inputs], op.attrs) is not None
        return "expr" in self.kinds and OPS[op.kind].expression(op.attrs, len(op.inputs)) is not None


Bound = Mapping[str, Op | Value | tuple[Value, ...]]
"""Ops by label, values by name and `*` names."""


def find(pattern: Pattern, op: Op, graph: Surroundings) -> Iterator[Bound]:
    """Every way in which a pattern matches an op and what stands before it."""
    if pattern.fits(op):
        yield from _match(pattern, op, graph, {})


def _match(pattern: Pattern, op: Op, graph: Surroundings, bound: Bound) -> Iterator[Bound]:
    if pattern.label:
        bound = {**bound, pattern.label: op}
    orders = [op.inputs]
    turned = any(isinstance(operand, Pattern) for operand in pattern.operands) and SKIP not in pattern.operands
    if op.kind in COMMUTATIVE and turned and len(op.inputs) == 2:
        orders.append(op.inputs[::-1])
    for values in orders:
        yield from _operands(pattern.operands, values, graph, bound)


def _operands(
    wanted: Sequence[Pattern | str], values: Sequence[Value], graph: Surroundings, bound: Bound
) -> Iterator[Bound]:
    if not wanted:
        if not values:
            yield bound
        return
    first, rest = wanted[0], wanted[1:]
    if first == SKIP:
        for skipped in range(len(values) + 1):
            yield from _operands(rest, values[skipped:], graph, bound)
    elif isinstance(first, str) and first.startswith("*"):
        yield {**bound, first[1:]: tuple(values)}
    elif values:
        for more in _operand(first, values[0], graph, bound):
            yield from _operands(rest, values[1:], graph, more)


def _operand(wanted: Pattern | str, value: Value, graph: Surroundings, bound: Bound) -> Iterator[Bound]:
    if isinstance(wanted, Pattern):
        op = graph.producer(value)
        if op is not None and wanted.fits(op) and (not wanted.alone or graph.only_user(value) is not None):
            yield from _match(wanted, op, graph, bound)
    elif wanted == ANONYMOUS:
        yield bound
    elif bound.get(wanted, value) == value:
        yield {**bound, wanted: value}


# --- text -------------------------------------------------------------------------------------------------------------


@cache
def parse(text: str) -> Pattern:
    """The pattern that a text spells. Raises ValueError for anything else."""
    tokens = re.findall(r"\w+|\.\.|\S", text)
    pattern = _pattern(tokens, text)
    if tokens or not isinstance(pattern, Pattern):
        raise ValueError(f"expected a pattern, found {text!r}")
    return pattern


def _pattern(tokens: list[str], text: str) -> Pattern | str:
    """An operand, taken off the tokens."""
    name = _take(tokens, text)
    if name == "*":
        return "*" + _take(tokens, text)
    if name == SKIP or not tokens or tokens[0] in (",", ")"):
        return name
    label = name if tokens[0] == ":" else ""
    if label:
        _take(tokens, text, ":")
    kinds = [_take(tokens, text) if label else name]
    while tokens and tokens[0] == "|":
        _take(tokens, text, "|")
        kinds.append(_take(tokens, text))
    if unknown := [kind for kind in kinds if kind not in OPS and kind not in CLASSES]:
        raise ValueError(f"expected a kind of op, found {unknown[0]!r} in {text!r}")
    alone = tokens[:1] == ["!"]
    if alone:
        _take(tokens, text, "!")
    _take(tokens, text, "(")
    operands: list[Pattern | str] = []
    while tokens[:1] != [")"]:
        if operands:
            _take(tokens, text, ",")
        operands.append(_pattern(tokens, text))
    _take(tokens, text, ")")
    return Pattern(label, tuple(kinds), alone, tuple(operands))


def _take(tokens: list[str], text: str, wanted: str = "") -> str:
    """The next token, which must be the wanted one."""
    if not tokens or (wanted and tokens[0] != wanted):
        raise ValueError(f"expected {wanted or 'more'}, found {tokens[0] if tokens else 'the end'} in {text!r}")
    return tokens.pop(0)
