"""The check of passes finds every kind of mistake, and names the pass and the op."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from toolkit.compiler.check import Check, find_difference, random_weight
from toolkit.compiler.ir import Graph, Op, Param, Value
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.pass_ import Outcome, Pass, run_passes
from toolkit.compiler.shapes import Sym, TensorType
from toolkit.compiler.targets import CPU
from toolkit.compiler.weights import Constant, Piece, Recipe
from toolkit.passes.pipelines import pipeline
from toolkit.passes.quantization import Quantization
from toolkit.runtime.encodings import FLOAT16, FLOAT32, INT4, INT8, Q4_1, Encoding
from toolkit.runtime.errors import InternalError

T = Sym("T", 16)
Make = Callable[..., Any]
Change = Callable[[Op], Op]


# --- the pipeline, with one pass broken -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Broken(Pass):
    """A pass whose result is spoiled."""

    right: Pass
    spoil: Callable[[Graph], Graph]

    def run(self, graph: Graph) -> Outcome:
        outcome = self.right.run(graph)
        spoiled = self.spoil(outcome.graph)
        assert spoiled != outcome.graph, "nothing was spoiled"
        return replace(outcome, graph=spoiled)


def spoiled_pipeline(name: str, spoil: Callable[[Graph], Graph], quant: str = "keep") -> list[Pass]:
    passes: list[Pass] = []
    for each in pipeline(CPU, quant=Quantization.parse(quant, "float32"), encoding_of=lambda tensor: FLOAT32):
        if each.name == name and name not in [other.name for other in passes]:
            broken = Broken(each, spoil)
            object.__setattr__(broken, "name", name)
            object.__setattr__(broken, "encodes", each.encodes)
            passes.append(broken)
        else:
            passes.append(each)
    return passes


def op_changed(at: str, change: Change) -> Callable[[Graph], Graph]:
    """Changes the op that makes the value."""
    return lambda graph: replace(
        graph, ops=tuple(change(op) if at in [value.name for value in op.outputs] else op for op in graph.ops)
    )


def attrs(**changed: Any) -> Change:
    return lambda op: replace(op, attrs={**op.attrs, **changed})


def inputs(*order: int) -> Change:
    return lambda op: replace(op, inputs=tuple(op.inputs[index] for index in order))


def renamed(first: str, second: str) -> Callable[[Graph], Graph]:
    """Two values change places."""
    swap = {first: second, second: first}

    def value(old: Value) -> Value:
        return replace(old, name=swap.get(old.name, old.name))

    return lambda graph: replace(
        graph, ops=tuple(replace(op, outputs=tuple(map(value, op.outputs))) for op in graph.ops)
    )


def param_changed(name: str, change: Callable[[Recipe], Recipe]) -> Callable[[Graph], Graph]:
    return lambda graph: replace(
        graph,
        params=tuple(
            replace(param, recipe=change(param.recipe)) if param.value.name == name else param for param in graph.params
        ),
    )


def pieces(change: Callable[[Piece], Piece]) -> Callable[[Recipe], Recipe]:
    return lambda recipe: replace(recipe, pieces=tuple(map(change, recipe.pieces)))


def negated(recipe: Recipe) -> Recipe:
    assert recipe.constant is not None
    return replace(recipe, constant=Constant(np.negative(recipe.constant.array, dtype=np.float32)))


LLAMA: Mapping[str, object] = {}
MISTAKES: dict[str, tuple[str, Callable[[Graph], Graph], str, Mapping[str, object]]] = {
    "scale lost": ("canonicalize", op_changed("x", attrs(scale=2.0)), "embedding %x", LLAMA),
    "table wrong": ("fold_constants", param_changed("sin.table", negated), "embedding %sin", LLAMA),
    "two weights taken for one": (
        *("common_subexpressions", op_changed("layers.1.mlp.up", lambda op: replace(op, inputs=_gate(op)))),
        *("linear %layers.1.mlp.up (layers.1.mlp.up)", LLAMA),
    ),
    "factor taken twice": (
        *("reassociate", op_changed("attention", attrs(scale=0.5))),
        *("attention %attention (layers.0.attn)", {"query_scale": 0.25, "rope": False}),
    ),
    "rows of another value": (
        *("early_rows", op_changed("add_3.rows", inputs(0, 0))),
        *("norm %take_rows (final_norm)", LLAMA),
    ),
    "rows of another weight": (
        *("quantize_weights", param_changed("layers.0.mlp.up.weight", pieces(lambda p: replace(p, start=5)))),
        *("linear %layers.0.mlp.up (layers.0.mlp.up)", LLAMA),
    ),
    "not transposed": (
        *("quantize_weights", param_changed("layers.0.mlp.up.weight", pieces(lambda p: replace(p, transpose=True)))),
        *("linear %layers.0.mlp.up (layers.0.mlp.up)", LLAMA),
    ),
    "keys and values swapped": (
        *("insert_caches", op_changed("cache1.next", inputs(1, 0, 2))),
        *("paged_attention %attention_1 (layers.1.attn)", LLAMA),
    ),
    "cap forgotten": (
        *("insert_caches", op_changed("attention", attrs(softcap=0.5))),
        *("paged_attention %attention (layers.0.attn)", LLAMA),
    ),
    "gate and up swapped": ("merge_linear", renamed("layers.0.mlp.gate", "layers.0.mlp.up"), "layers.0.mlp", LLAMA),
    "biases in another order": (
        *("merge_linear", param_changed("layers.0.attn.q.bias.qkv", lambda r: replace(r, pieces=r.pieces[::-1]))),
        *("slice %layers.0.attn.q (layers.0.attn.q)", {"bias": True}),
    ),
    "other rotation": (
        *("rope_kv_write", op_changed("rope_2", attrs(style="pair"))),
        *("rope_kv_write %rope_2 (layers.1.attn)", LLAMA),
    ),
    "norm without offset": (
        *("rope_kv_write", op_changed("cache0.next", attrs(offset=0.0))),
        *("rope_kv_write %rope (layers.0.attn)", {"qk_norm": "head"}),
    ),
    "residual lost": (
        *("add_norm", op_changed("layers.0.mlp.norm", inputs(0, 0, 2))),
        *("add_norm %add (layers.0.mlp.norm)", LLAMA),
    ),
    "another norm": (
        *("add_norm", op_changed("layers.0.mlp.norm", attrs(kind="l2"))),
        *("add_norm %add (layers.0.mlp.norm)", LLAMA),
    ),
    "operands in another order": (
        *("fuse_pointwise", op_changed("mul", inputs(1, 0))),
        *("pointwise %mul", LLAMA),
    ),
    "cap of the logits": (
        *("linear_epilogue", op_changed("mul_2", attrs(epilogue="(mul (tanh (div in0 9.0)) 9.01)"))),
        *("linear %mul_2", {"softcap": 9.0}),
    ),
    "halves taken for the whole": (
        *("linear_epilogue", op_changed("mul", attrs(epilogue="(mul (silu in1) in0)"))),
        *("linear %mul (layers.0.mlp.gate)", LLAMA),
    ),
    "output of another op": (
        *("drop_unused", lambda graph: replace(graph, outputs=(graph.ops[0].output,))),
        *("output %x has shape (10, 64), expected (3, 80)", LLAMA),
    ),
}
"""The pass, what is wrong with its result, the op that is named, and the variant of the decoder."""


def _gate(op: Op) -> tuple[Value, ...]:
    gate = replace(op.inputs[1], name=op.inputs[1].name.replace("up", "gate"))
    return (op.inputs[0], gate)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_broken_pass_is_named_with_its_op(decoder: Make, mistake: str) -> None:
    name, spoil, op, variant = MISTAKES[mistake]
    with pytest.raises(InternalError) as problem:
        run_passes(decoder(**variant).graph(), spoiled_pipeline(name, spoil), check=True)
    text = str(problem.value)
    assert text.startswith(f"pass {name} (after: "), text
    assert op in text
    assert "changed by up to " in text or "has shape" in text, text


def test_weights_merged_into_another_encoding_are_found(decoder: Make) -> None:
    spoil = param_changed("layers.0.attn.q.weight.qkv", lambda recipe: replace(recipe, encoding=Q4_1))
    graph = decoder().graph()
    run_passes(graph, pipeline(CPU, quant=Quantization.parse("int4"), encoding_of=lambda _: FLOAT32), check=True)
    with pytest.raises(InternalError, match=r"pass merge_linear .*: slice %layers\.0\.attn\.q .* changed by up to"):
        run_passes(graph, spoiled_pipeline("merge_linear", spoil, "int4"), check=True)


def test_an_op_that_fails_is_named() -> None:
    def graph(ids: int) -> Graph:
        build = GraphBuilder()
        table = build.constant("table", np.ones((ids, 2), np.float32))
        return build.build(build.op("embedding", table, build.input("positions", "int32", (T,)), name="rows"))

    assert find_difference(graph(9), graph(9)) == ""
    assert find_difference(graph(9), graph(6)).startswith(
        "embedding %rows can't be evaluated: index 6 is out of bounds"
    )


def test_only_what_changed_is_evaluated_again(decoder: Make) -> None:
    told: list[str] = []
    graph = decoder().graph()
    check = Check(graph, lambda what, done, total: told.append(what))
    assert len(told) == len(graph.ops)
    told.clear()
    assert check.follow(graph) == ""
    assert told == []
    changed = op_changed("layers.1.mlp.up", lambda op: replace(op, source=replace(op.source, line="pass.py")))(graph)
    assert check.follow(changed) == ""
    assert told == ["linear %layers.1.mlp.up (layers.1.mlp.up pass.py)"]


def test_errors_do_not_add_up() -> None:
    """A small error in each of many ops is no difference, one of the same size in a single op is."""

    def graph(factor: float) -> Graph:
        build = GraphBuilder()
        x = build.input("x", "float32", (T, 4))
        for _ in range(50):
            x = build.op("mul", x, scalar=factor)
        return build.build(x)

    assert find_difference(graph(1.0), graph(1 + 5e-5)) == ""
    assert find_difference(graph(1.0), graph(1 + 5e-4)).startswith("mul %mul: %mul changed by up to 0.00")


# --- random weights ---------------------------------------------------------------------------------------------------


def weight(rows: int, encoding: Encoding | None, *parts: Piece) -> Param:
    return Param(Value("w", TensorType("float32", (rows, 64))), Recipe(parts, encoding))


@pytest.mark.parametrize("encoding", [None, FLOAT16, INT8, INT4, Q4_1], ids=lambda e: e.name if e else "kept")
def test_a_weight_is_its_pieces_joined(encoding: Encoding | None) -> None:
    merged = weight(12, encoding, Piece("a", stop=8), Piece("b", start=2, stop=6))
    whole = [random_weight(weight(rows, encoding, Piece(name))) for name, rows in (("a", 8), ("b", 9))]
    np.testing.assert_array_equal(random_weight(merged), np.concatenate([whole[0], whole[1][2:6]]))
    assert 0.05 < random_weight(merged).std() < 0.4


def test_encodings_and_directions_differ() -> None:
    found = [
        random_weight(weight(8, encoding, Piece("a", transpose=transpose)))
        for encoding in (None, FLOAT16, INT8, INT4, Q4_1)
        for transpose in (False, True)
    ]
    for index, array in enumerate(found):
        assert all(np.abs(array - other).max() > 1e-6 for other in found[:index])


def test_large_weights_are_made_in_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("toolkit.compiler.check.BLOCK", 64 * 3)
    for encoding in (None, INT4):
        pieces = [random_weight(weight(rows, encoding, Piece("a"))) for rows in (7, 3)]
        np.testing.assert_array_equal(pieces[0][:3], pieces[1])
