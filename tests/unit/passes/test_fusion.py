"""Fusions at their edges: what they must take, and what they must leave alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from toolkit.compiler.check import find_difference
from toolkit.compiler.interpret import interpret
from toolkit.compiler.ir import Graph, Value
from toolkit.compiler.op_spec import Array, Packing
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.pass_ import Pass
from toolkit.compiler.shapes import Dim, Sym
from toolkit.compiler.verify import verify
from toolkit.passes.add_norm import FuseAddNorm
from toolkit.passes.canonicalize import Canonicalize
from toolkit.passes.early_rows import EarlyRows
from toolkit.passes.fuse_pointwise import FusePointwise
from toolkit.passes.fuse_reductions import FuseReductions
from toolkit.passes.insert_caches import InsertCaches
from toolkit.passes.linear_epilogue import FuseLinearEpilogue
from toolkit.passes.merge_linear import MergeLinear
from toolkit.passes.reassociate import Reassociate
from toolkit.passes.rope_kv_write import FuseRopeKvWrite
from toolkit.passes.split_linear import SplitLinear
from toolkit.runtime.encodings import FLOAT32, INT8, Encoding
from toolkit.runtime.errors import UserError

T, R = Sym("T", 8), Sym("R", 4)


def fused(graph: Graph, fusion: Pass) -> Graph:
    """The result of a pass, which must be legal, stable and equal on random inputs."""
    result = fusion(graph)
    verify(result)
    assert fusion(result) == result
    inputs = {value.name: random(value.type.shape, value.name) for value in graph.inputs}
    params = {param.value.name: random(param.value.type.shape, param.value.name) for param in graph.params}
    packing = Packing((0, 5), (5,), (0,))
    for old, new in zip(
        *(interpret(g, inputs, params, packing=packing).values() for g in (graph, result)), strict=True
    ):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-5)
    return result


def random(shape: tuple[Dim, ...], name: str) -> Array:
    sizes = [dim if isinstance(dim, int) else 5 * dim.factor for dim in shape]
    return np.random.default_rng(len(name) + sum(map(ord, name))).standard_normal(sizes).astype(np.float32)


def ops(graph: Graph) -> list[tuple[str, object]]:
    """Kinds with the expression or epilogue."""
    return [(op.kind, op.attrs.get("expr", op.attrs.get("epilogue", ""))) for op in graph.ops]


# --- pointwise --------------------------------------------------------------------------------------------------------


def test_a_tree_becomes_one_expression() -> None:
    b = GraphBuilder()
    x, y = b.input("x", "float32", (T, 4)), b.input("y", "float32", (T, 4))
    left = b.op("activation", b.op("mul", x, scalar=0.5), kind="silu")
    right = b.op("where", b.op("compare", y, op="gt", scalar=0.0), y, b.op("sub", x, scalar=1.0, reverse=True))
    result = fused(b.build(b.op("mul", left, right)), FusePointwise())
    (op,) = result.ops
    assert op.inputs == (x, y)
    assert op.attrs["expr"] == "(mul (silu (mul in0 0.5)) (where (gt in1 0.0) in1 (sub 1.0 in0)))"


def test_values_that_others_read_are_not_computed_twice() -> None:
    b = GraphBuilder()
    x = b.input("x", "float32", (T, 4))
    shared = b.op("activation", x, kind="exp")
    graph = b.build(b.op("add", shared, scalar=1.0), b.op("mul", shared, scalar=2.0))
    assert fused(graph, FusePointwise()) == graph


def test_a_value_that_branches_and_joins_again_is_one_expression() -> None:
    b = GraphBuilder()
    x = b.input("x", "float32", (T, 4))
    e = b.op("activation", x, kind="exp")
    result = fused(b.build(b.op("mul", e, b.op("activation", e, kind="tanh"))), FusePointwise())
    assert ops(result) == [("pointwise", "(mul (exp in0) (tanh (exp in0)))")]


def test_the_length_of_an_expression_is_bounded() -> None:
    b = GraphBuilder()
    x = b.input("x", "float32", (T, 4))
    for _ in range(12):
        x = b.op("mul", x, b.op("activation", x, kind="tanh"))
    outcome = FusePointwise().run(b.build(x))
    assert len(outcome.graph.ops) == 2
    assert all(len(str(op.attrs.get("expr", ""))) <= 2000 for op in outcome.graph.ops)
    assert "characters long, more than 2000" in outcome.notes[0]


def test_work_on_a_column_is_not_repeated_for_every_element() -> None:
    b = GraphBuilder()
    x = b.input("x", "float32", (T, 4))
    scale = b.op("activation", b.op("add", b.op("reduce", x, op="mean", keepdims=True), scalar=1.0), kind="exp")
    result = fused(b.build(b.op("mul", x, scale)), FusePointwise())
    assert ops(result) == [("reduce", ""), ("pointwise", "(exp (add in0 1.0))"), ("mul", "")]


def test_inputs_that_broadcast_both_ways_stay_apart() -> None:
    b = GraphBuilder()
    x, column, row = (b.input(n, "float32", s) for n, s in (("x", (T, 2, 4)), ("c", (T, 1, 4)), ("r", (2, 1))))
    result = fused(b.build(b.op("mul", b.op("add", x, column), row)), FusePointwise())
    assert [op.kind for op in result.ops] == ["add", "mul"]


def test_the_number_of_inputs_is_bounded() -> None:
    b = GraphBuilder()
    total = b.input("x0", "float32", (T, 4))
    for number in range(1, 11):
        total = b.op("add", total, b.input(f"x{number}", "float32", (T, 4)))
    result = fused(b.build(total), FusePointwise())
    assert sorted(len(op.inputs) for op in result.ops)[-1] <= 8
    assert len(result.ops) == 2


def test_integers_are_left_alone() -> None:
    b = GraphBuilder()
    x = b.input("x", "int32", (T,))
    graph = b.build(b.op("mul", b.op("add", x, x), x))
    assert FusePointwise()(graph) == graph


# --- reductions -------------------------------------------------------------------------------------------------------


def test_a_mean_and_what_it_is_taken_from_become_one_op() -> None:
    b = GraphBuilder()
    x, y = b.input("x", "float32", (T, 4)), b.input("y", "float32", (T, 4))
    both = b.op("mul", x, y)
    result = fused(b.build(b.op("div", both, b.op("reduce", both, op="sum", keepdims=True))), FuseReductions())
    (op,) = result.ops
    assert (op.kind, op.attrs["exprs"]) == ("reduction", "(div (mul in0 in1) (sum (mul in0 in1)))")


def test_a_norm_before_an_add_norm_gives_both_results() -> None:
    b = GraphBuilder()
    x, y = b.input("x", "float32", (T, 4)), b.input("y", "float32", (T, 4))
    total, normed = b.ops("add_norm", b.op("norm", x, eps=1.0, has_weight=False), y, eps=1.0, has_weight=False)
    result = fused(b.build(total, normed), FuseReductions())
    (op,) = result.ops
    first = "(add (mul in0 (rsqrt (add (mean (mul in0 in0)) 1.0))) in1)"
    assert op.attrs["exprs"] == f"{first} (mul {first} (rsqrt (add (mean (mul {first} {first})) 1.0)))"
    assert op.outputs == result.outputs


def test_a_norm_that_two_read_is_not_computed_twice() -> None:
    b = GraphBuilder()
    normed = b.op("norm", b.input("x", "float32", (T, 4)), eps=1.0, has_weight=False)
    graph = b.build(b.op("add", normed, scalar=1.0), b.op("mul", normed, scalar=2.0))
    assert fused(graph, FuseReductions()) == graph


def test_the_number_of_passes_over_a_row_is_bounded() -> None:
    b = GraphBuilder()
    x = b.input("x", "float32", (T, 4))
    for _ in range(5):
        x = b.op("norm", x, eps=1.0, has_weight=False)
    outcome = FuseReductions().run(b.build(x))
    assert find_difference(b.build(x), outcome.graph) == ""
    assert [op.kind for op in outcome.graph.ops] == ["reduction", "norm"]
    assert outcome.notes[0].endswith("together they have 5 reductions, more than 4")


def test_reductions_over_other_columns_stay_apart() -> None:
    b = GraphBuilder()
    x = b.input("x", "float32", (T, 2, 4))
    top = b.op("reduce", b.op("mul", x, scalar=2.0), op="max", axis=2, keepdims=True)
    outcome = FuseReductions().run(b.build(b.op("reduce", top, op="sum", axis=1, keepdims=True)))
    assert [op.kind for op in outcome.graph.ops] == ["reduction", "reduce"]
    heads = b.op("mul", b.op("softmax", x, axis=2), b.input("scale", "float32", (2, 1)))
    outcome = FuseReductions().run(b.build(heads))
    assert [op.kind for op in outcome.graph.ops] == ["softmax", "mul"]
    assert "broadcasting ['T', '2', '4'], ['2', '1'] within rows" in outcome.notes[0]


# --- interleaved queries, keys and values -----------------------------------------------------------------------------


def interleaved(shape: tuple[int, ...], axis: int, sizes: tuple[int, int, int], overlap: int = 0) -> Graph:
    """Attention of slices of a reshaped linear layer, along an axis, of some sizes each."""
    b = GraphBuilder()
    weight, bias = b.param("w", (96, 4)), b.param("b", (96,))
    product = b.op("linear", b.input("x", "float32", (T, 4)), weight, bias, has_bias=True)
    whole, parts, start = b.op("reshape", product, shape=(-1, *shape)), list[Value](), 0
    for size in sizes:
        part = b.op("slice", whole, axis=axis, start=start, stop=start + size)
        parts.append(b.op("reshape", part, shape=(-1, size if axis == 1 else 2, 16)))
        start += size - overlap
    heads = sizes[1] if axis == 1 else 2
    cache = b.op("kv_write", *parts[1:], b.cache(0, heads, 16, 16))
    return b.build(b.op("paged_attention", parts[0], cache, layer=0, scale=0.25, kv_heads=heads, value_dim=16))


@pytest.mark.parametrize(
    ("shape", "axis", "sizes", "pieces"),
    [
        ((2, 48), 2, (16, 16, 16), ["0:16 48:64", "16:32 64:80", "32:48 80:96"]),
        ((2, 3, 16), 2, (1, 1, 1), ["0:16 48:64", "16:32 64:80", "32:48 80:96"]),
        ((6, 16), 1, (4, 1, 1), ["0:64", "64:80", "80:96"]),
    ],
)
def test_interleaved_queries_keys_and_values_become_layers_over_rows(
    shape: tuple[int, ...], axis: int, sizes: tuple[int, int, int], pieces: list[str]
) -> None:
    graph = interleaved(shape, axis, sizes)
    result = SplitLinear()(graph)
    assert find_difference(graph, result) == ""
    for name in ("w", "b"):
        params = [param.recipe.pieces for param in result.params if param.recipe.pieces[0].tensor == name]
        assert [" ".join(f"{piece.start}:{piece.stop}" for piece in each) for each in params] == pieces
    merged = MergeLinear(lambda tensor: FLOAT32)(result)
    assert find_difference(graph, merged) == ""
    assert [op.kind for op in merged.ops].count("linear") == 1
    assert SplitLinear()(merged) == merged


def test_slices_that_overlap_stay() -> None:
    graph = interleaved((6, 16), 1, (4, 2, 2), overlap=1)
    outcome = SplitLinear().run(graph)
    assert (outcome.graph, outcome.matches) == (graph, 0)
    assert outcome.notes == ("paged_attention: queries, keys and values are not taken apart: they overlap",)


# --- linear epilogue --------------------------------------------------------------------------------------------------


def linear(b: GraphBuilder, x: Value, name: str = "w") -> Value:
    return b.op("linear", x, b.param(name, (4, 4)), name=name)


def test_activation_residual_and_row_become_the_epilogue() -> None:
    b = GraphBuilder()
    x, residual = b.input("x", "float32", (T, 4)), b.input("residual", "float32", (T, 4))
    y = b.op("mul", b.op("activation", linear(b, x), kind="gelu"), b.param("row", (4,)))
    result = fused(b.build(b.op("add", residual, y)), FuseLinearEpilogue())
    (op,) = result.ops
    assert op.attrs["epilogue"] == "(add in2 (mul (gelu in0) in1))"
    assert [value.name for value in op.inputs] == ["x", "w", "row", "residual"]


def test_a_result_that_others_read_keeps_its_linear() -> None:
    b = GraphBuilder()
    y = linear(b, b.input("x", "float32", (T, 4)))
    graph = b.build(b.op("activation", y, kind="relu"), b.op("add", y, scalar=1.0))
    assert fused(graph, FuseLinearEpilogue()) == graph


def test_only_one_of_two_linears_takes_their_product() -> None:
    b = GraphBuilder()
    x = b.input("x", "float32", (T, 4))
    gate = b.op("activation", linear(b, x, "gate"), kind="silu")
    result = fused(b.build(b.op("mul", gate, linear(b, x, "up"))), FuseLinearEpilogue())
    assert [kind for kind, _ in ops(result)] == ["linear", "linear"]
    assert {epilogue for _, epilogue in ops(result)} in ({"(silu in0)", "(mul in1 in0)"}, {"", "(mul (silu in0) in1)"})


def test_an_epilogue_is_not_repeated_by_what_reads_it_twice() -> None:
    b = GraphBuilder()
    e = b.op("activation", linear(b, b.input("x", "float32", (T, 4))), kind="exp")
    result = fused(b.build(b.op("mul", e, e)), FuseLinearEpilogue())
    assert ops(result) == [("linear", "(exp in0)"), ("mul", "")]


def gated(b: GraphBuilder, expr: str, width: int = 16, cut: int | None = None, bias: bool = False) -> Value:
    """An expression of two slices of a linear layer's columns, in0 and in1, and a residual, in2."""
    x = b.input("x", "float32", (T, 4))
    weights = [b.param("w", (2 * width, 4)), *([b.param("bias", (2 * width,))] if bias else [])]
    product = b.op("linear", x, *weights, has_bias=bias)
    cut = cut or width
    halves = [b.op("slice", product, axis=1, start=start, stop=start + width) for start in (0, cut)]
    return b.op("pointwise", *halves, b.input("residual", "float32", (T, width)), expr=expr)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "expr",
    ["(add in2 (mul (silu in0) in1))", "(mul (gelu in1) (add in0 in2))", "(mul in0 (mul in1 (tanh (mul in0 in2))))"],
)
def test_work_on_both_halves_is_the_epilogue_of_a_gated_layer(expr: str, bias: bool) -> None:
    b = GraphBuilder()
    (op,) = fused(b.build(gated(b, expr, bias=bias)), FuseLinearEpilogue()).ops
    assert (op.attrs["gated"], op.attrs["epilogue"], op.attrs["has_bias"]) == (True, expr, bias)


def test_what_follows_a_gated_layer_joins_its_epilogue() -> None:
    b = GraphBuilder()
    y = b.op("mul", gated(b, "(add in2 (mul (silu in0) in1))"), scalar=3.0)
    (op,) = fused(b.build(y), FuseLinearEpilogue()).ops
    assert op.attrs["epilogue"] == "(mul (add in2 (mul (silu in0) in1)) 3.0)"


def test_slices_that_are_no_halves_or_read_elsewhere_stay() -> None:
    expr = "(add in2 (mul (silu in0) in1))"
    b = GraphBuilder()
    graph = b.build(gated(b, expr, cut=8))
    assert fused(graph, FuseLinearEpilogue()) == graph
    for read in (0, 1):  # the product, its first half
        b = GraphBuilder()
        y = gated(b, expr)
        graph = b.build(y, b.op("activation", b.build(y).ops[read].output, kind="exp"))
        assert fused(graph, FuseLinearEpilogue()) == graph


def test_halves_of_odd_width_stay_and_are_reported() -> None:
    b = GraphBuilder()
    graph = b.build(gated(b, "(add in2 (mul (silu in0) in1))", width=24))
    assert fused(graph, FuseLinearEpilogue()) == graph
    (note,) = FuseLinearEpilogue().run(graph).notes
    assert note == "pointwise: it is no epilogue of the linear layer before it: 48 columns are no multiple of 32"


def test_columns_and_too_many_extras_do_not_fit_an_epilogue() -> None:
    b = GraphBuilder()
    x, column = b.input("x", "float32", (T, 4)), b.input("column", "float32", (T, 1))
    graph = b.build(b.op("mul", linear(b, x), column))
    assert fused(graph, FuseLinearEpilogue()) == graph
    b = GraphBuilder()
    total = linear(b, b.input("x", "float32", (T, 4)))
    for number in range(6):
        total = b.op("add", total, b.input(f"x{number}", "float32", (T, 4)))
    kinds = [kind for kind, _ in ops(fused(b.build(total), FuseLinearEpilogue()))]
    assert kinds == ["linear", "add", "add"]


# --- add + norm, act * mul --------------------------------------------------------------------------------------------


def test_two_norms_of_one_sum_add_once() -> None:
    b = GraphBuilder()
    x, y = b.input("x", "float32", (T, 4)), b.input("y", "float32", (T, 4))
    total = b.op("add", x, y)
    norms = [b.op("norm", total, b.param(f"w{i}", (4,)), eps=1e-5) for i in range(2)]
    result = fused(b.build(*norms, total), FuseAddNorm())
    assert [op.kind for op in result.ops] == ["add_norm", "norm"]
    assert result.outputs == (*norms, total)


@pytest.mark.parametrize("other", ["scalar", "row"])
def test_a_norm_of_another_sum_stays(other: str) -> None:
    b = GraphBuilder()
    x = b.input("x", "float32", (T, 4))
    total = b.op("add", x, scalar=2.0) if other == "scalar" else b.op("add", x, b.param("row", (4,)))
    graph = b.build(b.op("norm", total, eps=1e-5, has_weight=False))
    assert fused(graph, FuseAddNorm()) == graph


# --- reordering -------------------------------------------------------------------------------------------------------


def rows_of(b: GraphBuilder, x: Value) -> Value:
    return b.op("take_rows", x, b.input("rows", "int32", (R,)))


def taken(graph: Graph) -> list[str]:
    """Kinds of ops, those over rows that need logits in capitals."""
    result = EarlyRows()(graph)
    verify(result)
    assert EarlyRows()(result) == result
    assert find_difference(graph, result) == ""
    return [op.kind.upper() if R in op.output.type.shape else op.kind for op in result.ops]


def test_rows_are_taken_before_what_works_row_by_row() -> None:
    b = GraphBuilder()
    x = b.op("activation", b.input("x", "float32", (T, 4)), kind="tanh")
    h = b.op("norm", x, b.param("n", (4,)), eps=1e-5)
    parts = [b.op("slice", h, axis=1, start=start, stop=start + 2) for start in (2, 0)]
    mask = b.op("compare", b.op("mul", h, h), op="gt", scalar=0.5)
    y = b.op("where", mask, h, b.op("concat", *parts, axis=1))
    first, *rest = taken(b.build(rows_of(b, b.op("add", linear(b, y), x))))
    assert first == "TAKE_ROWS"
    assert sorted(rest) == sorted(
        ["ACTIVATION", "NORM", "SLICE", "SLICE", "MUL", "COMPARE", "CONCAT", "WHERE", "LINEAR", "ADD"]
    )


def test_rows_are_taken_after_what_mixes_rows_or_is_read_elsewhere() -> None:
    b = GraphBuilder()
    x = b.op("activation", b.input("x", "float32", (T, 4)), kind="tanh")
    total = b.op("reduce", b.op("activation", x, kind="exp"), op="sum", keepdims=True)
    found = taken(b.build(rows_of(b, b.op("mul", x, total))))
    assert found == ["activation", "activation", "reduce", "TAKE_ROWS", "TAKE_ROWS", "MUL"]
    b = GraphBuilder()
    y = b.op("activation", b.input("x", "float32", (T, 4)), kind="exp")
    assert taken(b.build(rows_of(b, y), y)) == ["activation", "TAKE_ROWS"]
    b = GraphBuilder()
    y = b.op("reshape", b.op("activation", b.input("x", "float32", (T, 2, 2)), kind="exp"), shape=(-1, 4))
    assert taken(b.build(rows_of(b, y))) == ["activation", "reshape", "TAKE_ROWS"]


def attention(
    b: GraphBuilder, *, scaled: str = "mul", after: bool = False, table: float = 1.0, apart: bool = False, **norm: Any
) -> Graph:
    """Attention with a factor on queries, or norms of rotated heads."""
    x, ids = b.input("x", "float32", (T, 16)), [b.input(name, "int32", (T,)) for name in ("positions", "others")]
    angles = np.arange(12)[:, None] * np.array([1.0, 0.1])
    cos, sin = (
        b.op("embedding", b.constant(name, (table * f(angles)).astype(np.float32)), at)
        for name, f, at in (("cos", np.cos, ids[0]), ("sin", np.sin, ids[apart]))
    )
    q, k, v = (
        b.op("reshape", b.op("linear", x, b.param(name, (8, 16))), shape=(-1, 2, 4), name=name) for name in "abc"
    )
    if not norm:
        q = b.op(scaled, q, scalar=0.3) if not after else q
    q, k = (b.op("rope", head, cos, sin) for head in (q, k))
    if norm:
        weights = [b.param("weight", (4,))] if norm.get("has_weight") else []
        q, k = (b.op("norm", head, *weights, eps=1e-5, **norm) for head in (q, k))
    elif after:
        q = b.op(scaled, q, scalar=0.3)
    y = b.op("attention", q, k, v, layer=0, scale=0.5, name="y")
    return b.build(b.op("reshape", y, shape=(-1, 8)))


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize(("scaled", "scale"), [("mul", 0.15), ("div", 0.5 / 0.3)])
def test_a_factor_on_queries_is_attentions_own(scaled: str, scale: float, after: bool) -> None:
    graph = attention(GraphBuilder(), scaled=scaled, after=after)
    result = Reassociate()(graph)
    verify(result)
    assert Reassociate()(result) == result
    assert find_difference(graph, result) == ""
    (op,) = (op for op in result.ops if op.kind == "attention")
    assert op.attrs["scale"] == pytest.approx(scale)
    assert not any(op.kind in ("mul", "div") for op in result.ops)


@pytest.mark.parametrize("kind", ["rms", "l2"])
def test_norms_without_weights_go_before_the_rotation(kind: str) -> None:
    graph = attention(GraphBuilder(), kind=kind, has_weight=False)
    result = Reassociate()(graph)
    verify(result)
    assert Reassociate()(result) == result
    assert find_difference(graph, result) == ""
    kinds = [op.kind for op in result.ops]
    assert kinds.index("norm") < kinds.index("rope")


@pytest.mark.parametrize(
    ("table", "norm"),
    [(1.1, {"has_weight": False}), (1.0, {"has_weight": True}), (1.0, {"kind": "layer", "has_weight": False})],
)
def test_norms_that_a_rotation_changes_stay(table: float, norm: dict[str, Any]) -> None:
    for graph in (attention(GraphBuilder(), table=table, **norm), attention(GraphBuilder(), apart=True, **norm)):
        assert Reassociate()(graph) == graph


# --- attention --------------------------------------------------------------------------------------------------------


def test_attention_that_is_not_causal_is_refused() -> None:
    b = GraphBuilder()
    q = b.input("q", "float32", (T, 2, 4))
    graph = b.build(b.op("attention", q, q, q, layer=0, scale=1.0, causal=False, name="both_ways"))
    with pytest.raises(UserError, match="not causal can't be run token by token: both_ways"):
        InsertCaches()(graph)


def test_caches_say_what_layers_need(decoder: Callable[..., Any]) -> None:
    graph = InsertCaches()(decoder().graph())
    assert [(c.layer, c.heads, c.key_dim, c.value_dim, c.window) for c in graph.caches] == [
        (0, 2, 16, 16, 0),
        (1, 2, 16, 16, 4),
    ]


def test_merged_weights_say_their_rows(decoder: Callable[..., Any]) -> None:
    graph = MergeLinear(lambda name: FLOAT32)(InsertCaches()(decoder(bias=True).graph()))
    merged = {param.value.name: param for param in graph.params}
    qkv = merged["layers.0.attn.q.weight.qkv"]
    assert [(piece.tensor, piece.start, piece.stop) for piece in qkv.recipe.pieces] == [
        ("layers.0.attn.q.weight", 0, 64),
        ("layers.0.attn.k.weight", 0, 32),
        ("layers.0.attn.v.weight", 0, 32),
    ]
    assert merged["layers.0.attn.q.bias.qkv"].value.type.shape == (128,)
    assert [piece.tensor for piece in merged["layers.1.mlp.gate.weight.gate_up"].recipe.pieces] == [
        "layers.1.mlp.gate.weight",
        "layers.1.mlp.up.weight",
    ]


def reasons(graph: Graph, encoding_of: Callable[[str], Encoding] = lambda name: FLOAT32) -> list[str]:
    """Notes of merging, canonicalizing and fusing rotation and cache write; the meaning must stay."""
    cached = InsertCaches()(graph)
    merge = MergeLinear(encoding_of).run(cached)
    fuse = FuseRopeKvWrite().run(Canonicalize()(merge.graph))
    assert find_difference(graph, fuse.graph) == ""
    return [*merge.notes, *fuse.notes]


def test_what_can_not_be_fused_is_reported(decoder: Callable[..., Any]) -> None:
    assert reasons(decoder().graph()) == []
    (merge, *_) = reasons(decoder(layers=1).graph(), lambda name: INT8 if ".v." in name else FLOAT32)
    assert merge == "layers.0.attn: queries, keys and values are not merged: their weights are stored as a8g32, f32"
    (fuse,) = reasons(decoder(layers=1, qk_norm="full").graph())
    assert fuse.startswith("layers.0.attn: rotation and cache write are not fused: ")
