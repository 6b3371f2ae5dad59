"""Constants fold, equal things are computed once, unused things go."""

from __future__ import annotations

import numpy as np

from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.compiler.verify import verify
from toolkit.passes.common_subexpressions import CommonSubexpressions
from toolkit.passes.drop_unused import DropUnused
from toolkit.passes.fold_constants import FoldConstants

T = Sym("T", 8)
ROW = np.array([1.0, -2.0, 3.0], np.float32)


def test_ops_of_constants_fold() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 3))
    row = build.op("activation", build.op("add", build.constant("row", ROW), scalar=1.0), kind="relu")
    outcome = FoldConstants().run(build.build(build.op("mul", x, row)))
    verify(outcome.graph)
    (param,) = outcome.graph.params
    assert param.recipe.constant is not None
    np.testing.assert_array_equal(param.recipe.constant.array, [2.0, 0.0, 4.0])
    assert [op.kind for op in outcome.graph.ops] == ["mul"]
    assert outcome.matches == 2


def test_a_constant_output_folds_to_its_parameter() -> None:
    build = GraphBuilder()
    outcome = FoldConstants().run(build.build(build.op("activation", build.constant("row", ROW), kind="neg")))
    verify(outcome.graph)
    assert outcome.graph.ops == ()
    assert outcome.graph.outputs == (outcome.graph.params[0].value,)


def test_large_results_and_weights_do_not_fold() -> None:
    build = GraphBuilder()
    a = build.op("add", build.constant("column", ROW[:, None]), build.constant("row", ROW))
    b = build.op("add", build.param("w", (3,)), scalar=1.0)
    graph = build.build(a, b)
    assert FoldConstants(max_elements=8)(graph) == graph
    assert len(FoldConstants(max_elements=9)(graph).ops) == 1


def test_equal_ops_and_parameters_merge() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 3))
    rows = [build.constant(name, ROW.copy()) for name in ("a", "b")]
    products = [build.op("mul", x, row) for row in rows]
    sums = [build.op("add", product, scalar=1.0) for product in products]
    other = build.op("add", products[1], scalar=2.0)
    outcome = CommonSubexpressions().run(build.build(build.op("sub", *sums), other))
    verify(outcome.graph)
    assert [op.kind for op in outcome.graph.ops] == ["mul", "add", "add", "sub"]
    assert len(outcome.graph.params) == 1
    assert outcome.matches == 3


def test_equal_outputs_stay_two_outputs() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 3))
    first, second = (build.op("activation", x, kind="exp") for _ in range(2))
    result = CommonSubexpressions()(build.build(first, second))
    assert result.outputs == (first, first)
    assert len(result.ops) == 1


def test_unused_things_go_and_inputs_stay() -> None:
    build = GraphBuilder()
    x, _ = build.input("x", "float32", (T, 3)), build.input("spare", "int32", (T,))
    build.op("mul", x, build.param("w", (3,)))
    build.cache(0, 1, 4, 4)
    outcome = DropUnused().run(build.build(build.op("activation", x, kind="exp")))
    assert [value.name for value in outcome.graph.inputs] == ["x", "spare"]
    assert (len(outcome.graph.ops), outcome.graph.params, outcome.graph.caches, outcome.matches) == (1, (), (), 3)
