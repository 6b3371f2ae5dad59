"""Patterns: what they match, in every way, and how they bind; and which texts are none."""

from __future__ import annotations

import pytest

from toolkit.compiler.ir import Graph, Op, Value
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.pattern import find, parse
from toolkit.compiler.shapes import Sym

T = Sym("T", 8)


class Ops:
    """The ops of a graph by what they make."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph

    def producer(self, value: Value, *kinds: str) -> Op | None:
        return self.graph.producers().get(value.name)

    def only_user(self, value: Value, *kinds: str) -> Op | None:
        users = self.graph.uses().get(value.name, [])
        return users[0] if len(users) == 1 and value not in self.graph.outputs else None


def graph() -> Graph:
    """out = (a + silu(b)) * a, of linear layers a and b of x."""
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 4))
    a, b = (build.op("linear", x, build.param(f"w{name}", (4, 4)), name=name) for name in "ab")
    total = build.op("add", a, build.op("activation", b, kind="silu", name="silu"), name="sum")
    return build.build(build.op("mul", total, a, name="out"))


def found(pattern: str, of: str = "out") -> list[dict[str, object]]:
    """What a pattern binds, by name, at the op that makes a value."""
    whole = graph()
    return [
        {name: _name(thing) for name, thing in bound.items()}
        for bound in find(parse(pattern), whole.producers()[of], Ops(whole))
    ]


def _name(thing: Op | Value | tuple[Value, ...]) -> object:
    if isinstance(thing, tuple):
        return [value.name for value in thing]
    return thing.output.name if isinstance(thing, Op) else thing.name


@pytest.mark.parametrize(
    ("pattern", "bound"),
    [
        ("mul(x, y)", [{"x": "sum", "y": "a"}]),
        ("mul(add(x, y), z)", [{"x": "a", "y": "silu", "z": "a"}]),
        ("mul(z, add(x, y))", [{"x": "a", "y": "silu", "z": "a"}]),
        ("mul(add(x, y), x)", [{"x": "a", "y": "silu"}]),
        ("mul(add(x, y), y)", []),
        ("mul(add(s:activation(b), a), a)", [{"s": "silu", "b": "b", "a": "a"}]),
        ("mul(total:add!(*parts), _)", [{"total": "sum", "parts": ["a", "silu"]}]),
        ("mul(_, product:linear(x, *_))", [{"product": "a", "x": "x", "_": ["wa"]}]),
        ("mul(_, linear!(*_))", []),
        ("mul(.., linear|add(*operands), ..)", [{"operands": ["a", "silu"]}, {"operands": ["x", "wa"]}]),
        ("expr(.., expr(..), ..)", [{}]),
        ("expr(.., inner:any(..), ..)", [{"inner": "sum"}, {"inner": "a"}]),
        ("mul(x)", []),
        ("mul(x, y, z)", []),
        ("mul(x, y, *rest)", [{"x": "sum", "y": "a", "rest": []}]),
        ("add(x, y)", []),
    ],
)
def test_matches(pattern: str, bound: list[dict[str, object]]) -> None:
    assert found(pattern) == bound


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("x", "expected a pattern, found 'x'"),
        ("mul(x, y) z", "expected a pattern"),
        ("mull(x)", "expected a kind of op, found 'mull'"),
        ("sum:x", "expected a kind of op, found 'x'"),
        ("mul(x y)", "expected a kind of op, found 'x'"),
        ("mul add(x)", r"expected \(, found add"),
        ("mul(x", "expected ,, found the end"),
        ("", "expected more, found the end"),
    ],
)
def test_malformed_patterns_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse(text)
