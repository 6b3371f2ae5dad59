"""Layout changes cancel, layers are stamped out, and nothing dead is left."""

from __future__ import annotations

import numpy as np
import pytest

from toolkit.compiler.ir import Graph, Op, Source, Value
from toolkit.compiler.shapes import Sym
from toolkit.models.emitter import Emitter, LayersDiffer

T, R = Sym("T", 16), Sym("R", 4)


def kinds(graph: Graph) -> list[str]:
    return [op.kind for op in graph.ops]


@pytest.fixture
def emit() -> Emitter:
    return Emitter("layers")


def test_transposes_cancel(emit: Emitter) -> None:
    x = emit.input("x", "float32", (T, 2, 8))
    turned = emit.transpose(x, (1, 0, 2))
    assert turned.type.shape == (2, T, 8)
    assert emit.transpose(turned, (1, 0, 2)) == x
    assert emit.transpose(emit.transpose(turned, (2, 0, 1)), (2, 1, 0)) == x
    assert kinds(emit.finish(emit.transpose(turned, (0, 2, 1)), "y")) == ["transpose"]


def test_rowwise_ops_move_above_transposes(emit: Emitter) -> None:
    x, w = emit.input("x", "float32", (T, 2, 8)), emit.weight("w", (8,))
    turned = emit.transpose(x, (1, 0, 2))
    normed = emit.rowwise("norm", turned, w, kind="rms", eps=1e-6)
    scaled = emit.rowwise("mul", normed, scalar=2.0)
    part = emit.slice(scaled, 2, 0, 4)
    scale = emit.transpose(emit.input("s", "float32", (T, 1, 1)), (1, 0, 2))
    product = emit.broadcast("mul", part, scale)
    graph = emit.finish(emit.transpose(product, (1, 0, 2)), "y")
    assert kinds(graph) == ["norm", "mul", "slice", "mul"]
    assert graph.outputs[0].type.shape == (T, 2, 4)


def test_a_norm_over_a_transposed_axis_stays(emit: Emitter) -> None:
    x, w = emit.input("x", "float32", (T, 2, 8)), emit.weight("w", (2, 8))
    assert emit.producer(emit.rowwise("activation", emit.transpose(x, (0, 2, 1)), kind="silu"), "activation")
    with pytest.raises(ValueError, match="weights that match"):
        emit.rowwise("norm", emit.transpose(x, (0, 2, 1)), w, kind="rms", eps=1e-6)


@pytest.mark.parametrize("rotated", [False, True])
def test_heads_repeated_for_groups_are_attended_once(emit: Emitter, rotated: bool) -> None:
    x, tables = emit.input("x", "float32", (T, 2, 8)), [emit.input(name, "float32", (T, 4)) for name in ("cos", "sin")]
    grouped = emit.repeat(emit.reshape(x, (T, 2, 1, 8)), 2, 3)
    heads = emit.reshape(grouped, (T, 6, 8))
    key = emit.emit("rope", heads, *tables) if rotated else heads
    found, value = emit.ungrouped(key, heads)
    assert value == x
    assert kinds(emit.finish(found, "y") if rotated else emit.finish(emit.emit("add", found, scalar=1.0), "y")) == [
        "rope" if rotated else "add"
    ]
    assert emit.ungrouped(key, emit.input("v", "float32", (T, 6, 8)))[0] == key


def test_heads_that_repeat_as_a_whole_are_not_groups(emit: Emitter) -> None:
    x, other = emit.input("x", "float32", (T, 2, 8)), emit.input("z", "float32", (T, 2, 1, 8))
    alternating = emit.concat([emit.reshape(x, (T, 2, 1, 8)), other], 2)
    for heads in (emit.repeat(x, 1, 3), emit.reshape(alternating, (T, 4, 8))):
        assert emit.ungrouped(heads, heads) == (heads, heads)


def test_reshapes_merge(emit: Emitter) -> None:
    x = emit.input("x", "float32", (T, 16))
    split = emit.reshape(x, (T, 2, 8))
    assert emit.reshape(split, (T, 16)) == x
    y = emit.reshape(split, (T, 4, 4))
    graph = emit.finish(y, "y")
    assert kinds(graph) == ["reshape"]
    assert graph.ops[0].inputs == (x,)
    assert graph.ops[0].attrs["shape"] == (-1, 4, 4)


def test_a_rotated_part_and_the_rest_are_a_partial_rotation(emit: Emitter) -> None:
    x = emit.input("x", "float32", (T, 2, 8))
    cos, sin = emit.input("cos", "float32", (T, 2)), emit.input("sin", "float32", (T, 2))
    rotated = emit.emit("rope", emit.slice(x, 2, 0, 4), cos, sin, style="half")
    graph = emit.finish(emit.concat([rotated, emit.slice(x, 2, 4, 8)], 2), "y")
    assert kinds(graph) == ["rope"]
    assert graph.ops[0].inputs == (x, cos, sin)


def test_other_parts_are_joined(emit: Emitter) -> None:
    x = emit.input("x", "float32", (T, 2, 8))
    cos, sin = emit.input("cos", "float32", (T, 2)), emit.input("sin", "float32", (T, 2))
    rotated = emit.emit("rope", emit.slice(x, 2, 4, 8), cos, sin, style="half")
    graph = emit.finish(emit.concat([rotated, emit.slice(x, 2, 0, 4)], 2), "y")
    assert kinds(graph) == ["slice", "rope", "slice", "concat"]


def test_rows_are_taken_before_what_treats_rows_alone(emit: Emitter) -> None:
    x, rows = emit.input("x", "float32", (T, 8)), emit.input("rows", "int32", (R,))
    emit.source = Source("last")
    y = emit.emit("add", x, x)
    emit.source = Source("norm")
    y = emit.emit("norm", y, emit.weight("w", (8,)), kind="rms", eps=1e-6)
    y = emit.emit("mul", y, emit.weight("gain", (8,)))
    y = emit.emit("mul", y, scalar=0.5)
    emit.source = Source("head")
    graph = emit.finish(emit.take_rows(y, rows), "y")
    assert kinds(graph) == ["add", "take_rows", "norm", "mul", "mul"]
    assert [op.source.module for op in graph.ops] == ["last", "head", "norm", "norm", "norm"]


def test_equal_constants_are_one_parameter(emit: Emitter) -> None:
    table = np.arange(8, dtype=np.float32).reshape(4, 2)
    first, second = emit.constant("rope.cos", table), emit.constant("rope.cos", table.copy())
    other = emit.constant("rope.cos", table + 1)
    assert first == second
    assert (first.name, other.name) == ("rope.cos", "rope.cos_1")


def test_pieces_of_one_tensor_are_different_parameters(emit: Emitter) -> None:
    assert emit.weight("w", (4, 6)) == emit.weight("w", (4, 6))
    assert emit.weight("w", (4, 6), transpose=True).type.shape == (6, 4)
    assert emit.weight("w", (4, 6), start=2).type.shape == (2, 6)


def layer(emit: Emitter, index: int, x: Value, *, scale: float = 1.0) -> Value:
    emit.source = Source(f"layers.{index}.mlp", "model.py:1")
    y = emit.emit("linear", x, emit.weight(f"layers.{index}.mlp.weight", (8, 8)))
    heads = emit.reshape(y, (T, 2, 4))
    y = emit.reshape(emit.emit("attention", heads, heads, heads, layer=index, scale=scale), (T, 8))
    return emit.emit("add", x, emit.emit("mul", y, emit.weight("shared", (8,))))


def stack(emit: Emitter, count: int, *, stamp: bool, scales: tuple[float, ...] = ()) -> Graph:
    x = emit.input("x", "float32", (T, 8))
    for index in range(count):
        if stamp and index > 1:
            x = emit.repeat_layer(index, 0, x)
            continue
        begin = emit.begin_layer(index, x)
        x = emit.end_layer(index, 0, layer(emit, index, begin, scale=scales[index] if scales else 1.0))
    return emit.finish(x, "y")


def test_repeated_layers_equal_traced_ones(emit: Emitter) -> None:
    assert stack(emit, 12, stamp=True) == stack(Emitter("layers"), 12, stamp=False)


def test_repeated_layers_have_their_own_weights_layer_and_source(emit: Emitter) -> None:
    graph = stack(emit, 4, stamp=True)
    assert {param.recipe.pieces[0].tensor for param in graph.params} == {
        *(f"layers.{index}.mlp.weight" for index in range(4)),
        "shared",
    }
    attention = [op for op in graph.ops if op.kind == "attention"]
    assert [op.attrs["layer"] for op in attention] == [0, 1, 2, 3]
    assert {op.source.module for op in graph.ops[-5:]} == {"layers.3.mlp"}


def test_layers_that_differ_are_not_repeated(emit: Emitter) -> None:
    with pytest.raises(LayersDiffer):
        stack(emit, 3, stamp=True, scales=(1.0, 0.5))


def test_dead_ops_and_parameters_are_dropped(emit: Emitter) -> None:
    x = emit.input("x", "float32", (T, 8))
    emit.emit("mul", x, emit.weight("unused", (8,)))
    y = emit.emit("add", x, x)
    graph = emit.finish(y, "logits")
    assert kinds(graph) == ["add"]
    assert graph.params == ()
    assert graph.outputs[0].name == "logits"
    assert isinstance(graph.ops[0], Op)
