"""print ∘ parse is the identity on graphs, whatever they hold."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.compiler.ir import Graph, Source, Value
from toolkit.compiler.op_spec import Array
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.compiler.text import constants, parse_graph, print_graph
from toolkit.compiler.verify import verify
from toolkit.compiler.weights import Piece, Recipe
from toolkit.runtime.encodings import BFLOAT16, Q4_K, Q5_0, Encoding

T = Sym("T", 512)
TEXT = """\
symbol T <= 512
input %tokens: int32[T]
param %embed: float32[100, 8] = "model.embed_tokens.weight"
param %qkv: float32[12, 8] = "q.weight"[0:4], "k.weight".T[4:12] as affine(5, 32, 16, "float16", false)
param %half: float32[2] = constant [0.5, -1e-06]
param %bias: float32[4, 3] = "b" as bfloat16
cache %cache0: layer 0, heads 1, key_dim 4, value_dim 4, window 7
%x: float32[T, 8] = embedding(%embed, %tokens) {scale = 24.0} from "model.embed" at "modeling_llama.py:12"
%y: float32[T, 12] = linear(%x, %qkv)
%q: float32[T, 1, 4] = slice(%r, %s) {axis = 0}
return %y
"""


def test_the_text_form_is_readable() -> None:
    text = "\n".join(line for line in TEXT.splitlines() if "%r" not in line) + "\n"
    graph = parse_graph(text)
    assert print_graph(graph) == text
    assert graph.params[1].recipe == Recipe((Piece("q.weight", stop=4), Piece("k.weight", True, 4, 12)), Q5_0)
    assert graph.ops[0].source == Source("model.embed", "modeling_llama.py:12")
    assert graph.caches[0].window == 7


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (TEXT, r"line 10: %r is not defined"),
        ("input %x: int33[2]", "line 1: expected a dtype, found int33"),
        ("input %x: int32[U]", "line 1: expected a dimension, found U"),
        ("input %x: int32[2] 3", "line 1: unexpected 3"),
        ("input %x: int32[2]\n%y: int32[2] = frob(%x)", "line 2: expected an op of the op table, found 'frob'"),
        ("input %x: int32[2]\n%y: int32[2] = clamp(%x) {hi = 1.0}", "line 2: clamp has attributes low, high, found hi"),
        (f"param %x: float32[20] = constant {'0' * 64}", "line 1: constant 0+ is not in the table"),
        ('param %x: float32[20] = "a" as affine(1, 2)', "line 1: expected a value of an attribute"),
        ('param %x: float32[20] = "a" as float31', "line 1: Invalid enum value 'float31'"),
    ],
)
def test_errors_name_the_line(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_graph(text)


def test_large_constants_go_by_digest() -> None:
    build = GraphBuilder()
    table = build.constant("table", np.random.default_rng(0).standard_normal((50, 3)).astype(np.float32))
    graph = build.build(build.op("activation", table, kind="neg"))
    text = print_graph(graph)
    (digest,) = constants(graph)
    assert f"constant {digest}" in text
    assert parse_graph(text, constants(graph)) == graph


FLOATS = st.floats(width=32, allow_nan=False)
NAMES = st.text("abcxyz._0", min_size=1, max_size=6)
ENCODINGS: st.SearchStrategy[Encoding | None] = st.sampled_from([None, BFLOAT16, Q5_0, Q4_K])
PIECES = st.builds(
    Piece, st.text(max_size=5), st.booleans(), st.integers(0, 9), st.one_of(st.none(), st.integers(10, 20))
)


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random legal graphs over values of shape [T, 4]."""
    build = GraphBuilder()
    ids = build.input("ids", "int32", (Sym("T", draw(st.integers(1, 4096))),))
    recipe = Recipe(tuple(draw(st.lists(PIECES, min_size=1, max_size=3))), draw(ENCODINGS))
    values = [build.op("embedding", build.param(draw(NAMES), (draw(st.integers(1, 100)), 4), recipe), ids)]
    for _ in range(draw(st.integers(0, 8))):
        values.append(draw(st.sampled_from(STEPS))(draw, build, draw(st.sampled_from(values))))
    return build.build(*draw(st.lists(st.sampled_from(values), min_size=1, max_size=3, unique=True)))


def _constant(draw: st.DrawFn, build: GraphBuilder, x: Value) -> Value:
    columns: Array = np.array(draw(st.lists(FLOATS, min_size=4, max_size=4)), np.float32)
    return build.op("mul", x, build.constant(draw(NAMES), columns))


def _scalar(draw: st.DrawFn, build: GraphBuilder, x: Value) -> Value:
    return build.op("add", x, scalar=draw(FLOATS), reverse=draw(st.booleans()), name=draw(NAMES))


def _linear(draw: st.DrawFn, build: GraphBuilder, x: Value) -> Value:
    source = Source(draw(st.text(max_size=8)), draw(st.text(max_size=8)))
    return build.op("linear", x, build.param(draw(NAMES), (4, 4)), epilogue="(silu in0)", source=source)


def _round_trip(draw: st.DrawFn, build: GraphBuilder, x: Value) -> Value:
    parts = [build.op("slice", build.op("reshape", x, shape=(-1, 2)), axis=-1, start=i, stop=i + 1) for i in (0, 1)]
    return build.op("reshape", build.op("concat", *parts, axis=1), shape=(-1, 4))


def _norms(draw: st.DrawFn, build: GraphBuilder, x: Value) -> Value:
    kind = draw(st.sampled_from(["rms", "layer", "l2"]))
    eps = draw(st.floats(0, 1))
    return build.ops("add_norm", x, x, kind=kind, eps=eps, has_weight=False, names=(draw(NAMES), "n"))[1]


STEPS = (_constant, _scalar, _linear, _round_trip, _norms)


@settings(max_examples=60, deadline=None)
@given(graphs())
def test_parse_inverts_print(graph: Graph) -> None:
    verify(graph)
    text = print_graph(graph)
    again = parse_graph(text, constants(graph))
    assert again == graph
    assert print_graph(again) == text
