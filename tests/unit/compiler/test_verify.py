"""Every kind of illegal graph is refused with all of its problems."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from toolkit.compiler.ir import Graph, Op, Param, Value
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym, TensorType
from toolkit.compiler.verify import find_problems, verify
from toolkit.compiler.weights import Constant, Recipe
from toolkit.runtime.errors import InternalError

T = Sym("T", 8)
T_4 = TensorType("float32", (T, 4))


def legal() -> Graph:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 4))
    y = build.op("linear", x, build.param("w", (4, 4)), name="y")
    heads = build.op("reshape", y, shape=(-1, 1, 4), name="heads")
    cache = build.op("kv_write", heads, heads, build.cache(0, 1, 4, 4), name="written")
    out = build.op("paged_attention", heads, cache, layer=0, scale=1.0, kv_heads=1, value_dim=4, name="out")
    return build.build(out)


def _without_op(graph: Graph) -> Graph:
    return replace(graph, ops=graph.ops[1:])


def _swapped(graph: Graph) -> Graph:
    return replace(graph, ops=(graph.ops[1], graph.ops[0], *graph.ops[2:]))


def _op(index: int, change: Callable[[Op], Op]) -> Callable[[Graph], Graph]:
    def changed(graph: Graph) -> Graph:
        ops = list(graph.ops)
        ops[index] = change(ops[index])
        return replace(graph, ops=tuple(ops))

    return changed


def _wrong_type(graph: Graph) -> Graph:
    wrong = Value("y", TensorType("float32", (T, 5)))
    return _op(0, lambda op: replace(op, outputs=(wrong,)))(graph)


def _second_write(graph: Graph) -> Graph:
    again = replace(graph.ops[2], outputs=(Value("again", graph.ops[2].output.type),))
    return replace(graph, ops=(*graph.ops, again))


def _bad_constant(graph: Graph) -> Graph:
    value = Value("c", TensorType("float32", (3,)))
    return replace(graph, params=(*graph.params, Param(value, Recipe(constant=Constant(np.zeros(4, np.float32))))))


def _second_bound(graph: Graph) -> Graph:
    return replace(graph, inputs=(*graph.inputs, Value("r", TensorType("int32", (Sym("T", 9),)))))


def _attends(**changed: int) -> Callable[[Graph], Graph]:
    return _op(3, lambda op: replace(op, attrs={**op.attrs, **changed}))


def test_a_legal_graph_passes() -> None:
    verify(legal())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without_op, "reshape %heads reads %y: float32[T, 4], but before it there is nothing of that name"),
        (_swapped, "reshape %heads reads %y: float32[T, 4], but before it there is nothing of that name"),
        (_wrong_type, "linear %y has results float32[T, 5], expected float32[T, 4]"),
        (_wrong_type, "reads %y: float32[T, 4], but before it there is %y: float32[T, 5]"),
        (_second_write, "cache version %cache0 is written to 2 times"),
        (_bad_constant, "constant %c is float32[4], expected float32[3]"),
        (_op(0, lambda op: replace(op, attrs={})), "linear %y: expected attributes"),
        (_op(0, lambda op: replace(op, kind="frob")), "frob %y: expected an op of the op table, found 'frob'"),
        (lambda g: replace(g, ops=(*g.ops, g.ops[0])), "%y is defined twice"),
        (_attends(window=3), "paged_attention %out has window 3, but its cache 0"),
        (_attends(layer=1), "paged_attention %out has layer 1, but its cache 0"),
        (_attends(value_dim=3), "paged_attention %out has value_dim 3, but its cache 4"),
        (lambda g: replace(g, outputs=(Value("z", T_4),)), "output %z: float32[T, 4] is not defined"),
        (lambda g: replace(g, params=(Param(g.params[0].value, Recipe()),)), "%w needs either pieces or a constant"),
        (
            lambda g: replace(g, inputs=(*g.inputs, Value("r", TensorType("int32", (Sym("T", 9),))))),
            "has bounds [8, 9]",
        ),
    ],
)
def test_problems_are_found(change: Callable[[Graph], Graph], message: str) -> None:
    graph = change(legal())
    assert any(message in problem for problem in find_problems(graph)), find_problems(graph)
    with pytest.raises(InternalError, match="the graph is illegal"):
        verify(graph)
