"""Folding a scale into what makes an activation changes nothing that the model computes."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from unit.passes.conftest import Decoder

from toolkit.compiler.calibration.fold import Folds
from toolkit.compiler.check import random_inputs, random_weight
from toolkit.compiler.interpret import interpret
from toolkit.compiler.ir import Graph, Value
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.compiler.weights import Piece, Recipe

Floats = npt.NDArray[np.float32]
T = Sym("T", 64)


def scaled(graph: Graph, value: Value) -> dict[str, Floats] | None:
    """Random weights with random scales moved from the columns of `value`'s readers into what makes it."""
    fold = Folds(graph).of(value)
    if fold is None:
        return None
    weights = {param.value.name: random_weight(param) for param in graph.params if param.recipe.constant is None}
    rows = fold.rows
    scale = np.random.default_rng(3).uniform(0.2, 5.0, rows.max() + 1).astype(np.float32)[rows]
    for op in graph.uses()[value.name]:
        assert op.kind == "linear"
        weights[op.inputs[1].name] = weights[op.inputs[1].name] * scale
    for target in fold.targets:
        name = target.param.value.name
        array = weights[name] + np.float32(target.offset)
        divisor = np.ones(len(array), np.float32)
        divisor[rows] = scale
        weights[name] = array / divisor.reshape(-1, *[1] * (array.ndim - 1)) - np.float32(target.offset)
    return weights


def check(graph: Graph, value: Value) -> None:
    weights = scaled(graph, value)
    assert weights is not None, value.name
    inputs = random_inputs(graph)
    for shown, expected in zip(
        interpret(graph, inputs, weights).values(), interpret(graph, inputs, random_weight).values(), strict=True
    ):
        np.testing.assert_allclose(shown, expected, rtol=1e-4, atol=1e-4)


def read_by_linear_layers(graph: Graph) -> list[Value]:
    """Values that linear layers other than the head read."""
    values = [op.inputs[0] for op in graph.ops if op.kind == "linear" and op.inputs[1].name not in ("embed.weight",)]
    return list(dict.fromkeys(values))


@pytest.mark.parametrize(
    ("variant", "count"),
    [
        ({}, 4),  # a layer: q, k, v; o; gate, up; down
        ({"bias": True}, 4),
        ({"qk_norm": "head"}, 4),
        ({"gated": False, "rope": False, "bias": True}, 3),  # not down: gelu stands before it
        ({"post_norm": True}, 2),  # q, k, v and gate, up read the residual stream
    ],
)
def test_every_input_of_a_decoder(variant: dict[str, object], count: int) -> None:
    graph = Decoder(layers=1, **variant).graph()  # type: ignore[arg-type]
    folds = Folds(graph)
    foldable = [value for value in read_by_linear_layers(graph) if folds.of(value) is not None]
    assert len(foldable) == count
    for value in foldable:
        check(graph, value)


def small(make: Callable[[GraphBuilder, Value], Value]) -> tuple[Graph, Value]:
    """A linear layer, what `make` makes of its result, and a linear layer that reads it."""
    build = GraphBuilder()
    table = build.param("table", (20, 16))
    x = build.op("embedding", table, build.input("tokens", "int32", (T,)))
    build.input("positions", "int32", (T,))
    made = make(build, x)
    columns = made.type.shape[1]
    assert isinstance(columns, int)
    return build.build(build.op("linear", made, build.param("last", (8, columns)))), made


def linear(build: GraphBuilder, x: Value, name: str, rows: int) -> Value:
    columns = x.type.shape[1]
    assert isinstance(columns, int)
    return build.op("linear", x, build.param(name, (rows, columns)))


def packed_gate_up(build: GraphBuilder, x: Value) -> Value:
    both = linear(build, x, "gate_up", 24)
    gate, up = (build.op("slice", both, axis=1, start=start, stop=start + 12) for start in (0, 12))
    return build.op("mul", build.op("activation", gate, kind="silu"), up)


def shared_heads(build: GraphBuilder, x: Value) -> Value:
    sizes = (("q", 6), ("k", 2), ("v", 2))
    q, k, v = (build.op("reshape", linear(build, x, name, 4 * n), shape=(-1, n, 4)) for name, n in sizes)
    out = build.op("attention", q, k, v, layer=0, scale=0.5)
    return build.op("reshape", out, shape=(-1, 24))


def offset_norm(build: GraphBuilder, x: Value) -> Value:
    return build.op("norm", x, build.param("norm", (16,)), eps=1e-5, offset=1.0)


def head_norm(build: GraphBuilder, x: Value) -> Value:
    heads = build.op("reshape", linear(build, x, "first", 12), shape=(-1, 3, 4))
    return build.op("reshape", build.op("norm", heads, build.param("norm", (4,)), eps=1e-5), shape=(-1, 12))


def relu(build: GraphBuilder, x: Value) -> Value:
    return build.op("activation", build.op("mul", linear(build, x, "first", 12), scalar=0.3), kind="relu")


@pytest.mark.parametrize("make", [packed_gate_up, shared_heads, offset_norm, head_norm, relu])
def test_ways_to_what_makes_a_value(make: Callable[[GraphBuilder, Value], Value]) -> None:
    check(*small(make))


def test_heads_that_share_values_share_scales() -> None:
    graph, value = small(shared_heads)
    fold = Folds(graph).of(value)
    assert fold is not None
    assert fold.rows.reshape(2, 3, 4).tolist() == [[[0, 1, 2, 3]] * 3, [[4, 5, 6, 7]] * 3]


def gelu(build: GraphBuilder, x: Value) -> Value:
    return build.op("activation", linear(build, x, "first", 12), kind="gelu")


def read_twice(build: GraphBuilder, x: Value) -> Value:
    first = linear(build, x, "first", 12)
    return build.op("mul", build.op("activation", first, kind="silu"), first)


def shared_norm_weight(build: GraphBuilder, x: Value) -> Value:
    weight = build.param("norm", (16,))
    return build.op("norm", build.op("norm", x, weight, eps=1e-5), weight, eps=1e-5)


def one_tensor_twice(build: GraphBuilder, x: Value) -> Value:
    first = build.op("linear", x, build.param("a", (16, 16), Recipe((Piece("both", stop=16),))))
    return build.op("linear", first, build.param("b", (16, 16), Recipe((Piece("both", start=16),))))


def residual(build: GraphBuilder, x: Value) -> Value:
    return build.op("add", x, linear(build, x, "first", 16))


@pytest.mark.parametrize("make", [gelu, read_twice, shared_norm_weight, one_tensor_twice, residual])
def test_what_can_not_take_a_scale(make: Callable[[GraphBuilder, Value], Value]) -> None:
    graph, value = small(make)
    assert Folds(graph).of(value) is None


def test_a_graphs_output_keeps_its_scale() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 16))
    y = build.op("norm", x, build.param("norm", (16,)), eps=1e-5)
    graph = build.build(y, build.op("linear", y, build.param("w", (4, 16))))
    assert Folds(graph).of(y) is None
