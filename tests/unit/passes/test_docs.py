"""`docs/passes.md` shows what each pass does on a small graph; `TOOLKIT_UPDATE_DOCS=1` writes it anew."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np

from toolkit.compiler.ir import Graph, Source, Value
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.pass_ import Pass
from toolkit.compiler.rewrite import Rewriting
from toolkit.compiler.shapes import Sym
from toolkit.compiler.targets import CPU
from toolkit.compiler.text import parse_graph, print_graph
from toolkit.compiler.verify import verify
from toolkit.passes.add_norm import FuseAddNorm
from toolkit.passes.canonicalize import Canonicalize
from toolkit.passes.common_subexpressions import CommonSubexpressions
from toolkit.passes.drop_unused import DropUnused
from toolkit.passes.early_rows import EarlyRows
from toolkit.passes.fold_constants import FoldConstants
from toolkit.passes.fuse_pointwise import FusePointwise
from toolkit.passes.fuse_reductions import FuseReductions
from toolkit.passes.insert_caches import InsertCaches
from toolkit.passes.linear_epilogue import FuseLinearEpilogue
from toolkit.passes.merge_linear import MergeLinear
from toolkit.passes.pipelines import LEVELS, pipeline
from toolkit.passes.quantization import Quantization
from toolkit.passes.quantize_weights import QuantizeWeights
from toolkit.passes.reassociate import Reassociate
from toolkit.passes.rope_kv_write import FuseRopeKvWrite
from toolkit.passes.split_linear import SplitLinear
from toolkit.runtime.encodings import BFLOAT16

PAGE = Path(__file__).parents[3] / "docs" / "passes.md"
HEAD = """\
# Passes

A pass is a function from graph to graph. `passes/pipelines.py` lists which run for a target and in which order; the
runner (`compiler/pass_.py`) verifies the graph after each one, and `toolkit compile --dump-ir DIR` writes it as text
after each one. The language of the graphs below is described in `compiler/text.py`, the ops in `compiler/ops.py`.

| level | does | passes, in this order |
|---|---|---|
{levels}

Every level gives a plan that works; `-O3` is the default. Levels 0 to 2 do the same arithmetic in the same order, level
3 may round otherwise. `toolkit compile --check` checks every pass on the model at hand: see [The graph](ir.md#meaning).

Most passes are tables of rules (`compiler/rewrite.py`). A rule has a pattern of ops (`compiler/pattern.py`), a function
that makes their replacement, and what it means if the function refuses: that becomes a note in the plan's report, which
`compile` and `inspect` print. What matches no pattern is no near miss, and makes no note.

Two fusions that one might look for are not made, as measured ([Performance](performance.md)). An argmax in the head's
epilogue: every sampled token comes with its log-probability and the check that all logits are finite, which need all
logits. On CPU a norm as a prologue of the linear layer behind it: each thread would repeat what the norm's kernel does
once, codes included. A weight is decoded within the linear layer that reads it.

Each section says what the pass expects and what it guarantees, lists its rules, and shows a graph before and after it.
This page is written by `TOOLKIT_UPDATE_DOCS=1 pytest tests/unit/passes/test_docs.py`; the test suite fails when it is
out of date, or when a pass is missing here.
"""
T = Sym("T", 512)


def _x(b: GraphBuilder, width: int = 64, name: str = "x") -> Value:
    return b.input(name, "float32", (T, width))


def _w(b: GraphBuilder, name: str, *shape: int) -> Value:
    return b.param(name, shape, f"{name}.weight")


def canonicalize(b: GraphBuilder) -> Value:
    rows = b.op("embedding", _w(b, "embed", 100, 64), b.input("tokens", "int32", (T,)), name="rows")
    heads = b.op("reshape", b.op("mul", rows, scalar=8.0, name="scaled"), shape=(-1, 4, 16), name="heads")
    return b.op("activation", b.op("reshape", heads, shape=(-1, 64), name="flat"), kind="relu", name="y")


def fold_constants(b: GraphBuilder) -> Value:
    halves = b.op("mul", b.constant("ones", np.array([1.0, 2.0], np.float32)), scalar=0.5, name="halves")
    return b.op("mul", _x(b, 2), halves, name="y")


def common_subexpressions(b: GraphBuilder) -> Value:
    x = _x(b)
    first, second = (b.op("activation", x, kind="exp", name=name) for name in ("first", "second"))
    return b.op("add", first, second, name="y")


def reassociate(b: GraphBuilder) -> Value:
    q, k, v = (b.input(name, "float32", (T, 64)) for name in "qkv")
    q = b.op("mul", q, scalar=0.25, name="scaled")
    q, k, v = (
        b.op("reshape", x, shape=(-1, 4, 16), name=f"{name}.heads") for name, x in zip("qkv", (q, k, v), strict=True)
    )
    return b.op("attention", q, k, v, layer=0, scale=1.0, name="y")


def early_rows(b: GraphBuilder) -> Value:
    x = _x(b)
    product = b.op(
        "linear", b.op("norm", x, _w(b, "norm", 64), eps=1e-5, name="h"), _w(b, "mlp", 64, 64), name="product"
    )
    return b.op("take_rows", b.op("add", x, product, name="sum"), b.input("rows", "int32", (Sym("R", 64),)), name="y")


def quantize_weights(b: GraphBuilder) -> Value:
    x = b.op("norm", _x(b), _w(b, "norm", 64), eps=1e-5, name="h")
    return b.op("reshape", b.op("linear", x, _w(b, "up", 96, 64), name="y"), shape=(-1, 3, 32), name="heads")


def insert_caches(b: GraphBuilder) -> Value:
    q, k, v = (b.input(name, "float32", (T, heads, 16)) for name, heads in (("q", 4), ("k", 2), ("v", 2)))
    return b.op("attention", q, k, v, layer=3, scale=0.25, window=128, name="y", source=Source("layers.3.attn"))


def split_linear(b: GraphBuilder) -> Value:
    heads = b.op("reshape", b.op("linear", _x(b), _w(b, "qkv", 96, 64), name="qkv"), shape=(-1, 2, 48), name="heads")
    starts = (("q", 0), ("k", 16), ("v", 32))
    q, k, v = (b.op("slice", heads, axis=2, start=at, stop=at + 16, name=name) for name, at in starts)
    cache = b.op("kv_write", k, v, b.cache(0, 2, 16, 16), name="cache0.next")
    return b.op("paged_attention", q, cache, layer=0, scale=0.25, kv_heads=2, value_dim=16, name="y")


def merge_linear(b: GraphBuilder) -> Value:
    x = _x(b)
    up, gate = (b.op("linear", x, _w(b, f"mlp.{name}", 96, 64), name=name) for name in ("up", "gate"))
    return b.op("mul", b.op("activation", gate, kind="silu", name="act"), up, name="y")


def rope_kv_write(b: GraphBuilder) -> Value:
    x = _x(b, 128, "qkv")
    cos, sin = (b.input(name, "float32", (T, 8)) for name in ("cos", "sin"))
    heads = []
    for name, start, count in (("q", 0, 4), ("k", 64, 2), ("v", 96, 2)):
        flat = b.op("slice", x, axis=1, start=start, stop=start + 16 * count, name=f"{name}.flat")
        heads.append(b.op("reshape", flat, shape=(-1, count, 16), name=name))
    q, k = (b.op("rope", head, cos, sin, name=f"{head.name}.turned") for head in heads[:2])
    cache = b.op("kv_write", k, heads[2], b.cache(0, 2, 16, 16), name="cache0.next")
    return b.op("paged_attention", q, cache, layer=0, scale=0.25, kv_heads=2, value_dim=16, name="y")


def add_norm(b: GraphBuilder) -> Value:
    total = b.op("add", _x(b), _x(b, name="branch"), name="sum")
    normed = b.op("norm", total, _w(b, "norm", 64), eps=1e-5, name="h")
    return b.op("mul", normed, total, name="y")


def fuse_pointwise(b: GraphBuilder) -> Value:
    x, y = _x(b), _x(b, name="gate")
    return b.op("mul", b.op("activation", b.op("add", x, scalar=1.0, name="a"), kind="tanh", name="t"), y, name="y")


def linear_epilogue(b: GraphBuilder) -> Value:
    gate_up = b.op("linear", _x(b), _w(b, "mlp", 192, 64), name="gate_up")
    cuts = (("gate", 0), ("up", 96))
    gate, up = (b.op("slice", gate_up, axis=1, start=start, stop=start + 96, name=name) for name, start in cuts)
    product = b.op(
        "linear", b.op("pointwise", gate, up, expr="(mul (silu in0) in1)", name="act"), _w(b, "down", 64, 96)
    )
    return b.op("add", _x(b, name="residual"), b.op("activation", product, kind="gelu", name="gelu"), name="y")


def fuse_reductions(b: GraphBuilder) -> Value:
    normed = b.op("norm", _x(b, name="branch"), _w(b, "norm", 64), eps=1e-5, name="normed")
    total = b.op("add", _x(b, name="residual"), normed, name="sum")
    return b.op("sub", total, b.op("reduce", total, op="mean", keepdims=True, name="mean"), name="y")


def drop_unused(b: GraphBuilder) -> Value:
    b.cache(0, 2, 16, 16)
    b.op("linear", _x(b), _w(b, "spare", 8, 64), name="spare_product")
    return b.op("activation", b.input("z", "float32", (T, 4)), kind="exp", name="y")


EXAMPLES: tuple[tuple[Pass, Callable[[GraphBuilder], Value]], ...] = (
    (Canonicalize(), canonicalize),
    (FoldConstants(), fold_constants),
    (CommonSubexpressions(), common_subexpressions),
    (Reassociate(), reassociate),
    (EarlyRows(), early_rows),
    (QuantizeWeights(Quantization.parse("int4")), quantize_weights),
    (InsertCaches(), insert_caches),
    (SplitLinear(), split_linear),
    (MergeLinear(lambda tensor: BFLOAT16), merge_linear),
    (FuseRopeKvWrite(), rope_kv_write),
    (FuseAddNorm(), add_norm),
    (FusePointwise(), fuse_pointwise),
    (FuseLinearEpilogue(), linear_epilogue),
    (FuseReductions(), fuse_reductions),
    (DropUnused(), drop_unused),
)


def page() -> str:
    head = HEAD.replace("{levels}", "\n".join(_levels()))
    return "\n".join([head, *(line for each, example in EXAMPLES for line in _section(each, example))])


def _levels() -> Iterator[str]:
    for level, what in LEVELS.items():
        names = ", ".join(each.name for each in _pipeline(level))
        yield f"| {level} | {what} | {names} |"


def _pipeline(level: int) -> tuple[Pass, ...]:
    return pipeline(CPU, quant=Quantization.parse("keep"), encoding_of=lambda tensor: BFLOAT16, level=level)


def _section(each: Pass, example: Callable[[GraphBuilder], Value]) -> Iterator[str]:
    build = GraphBuilder()
    before = build.build(example(build))
    yield f"## {each.name}\n"
    yield _paragraphs(each.__doc__ or "") + "\n"
    if isinstance(each, Rewriting) and each.rules():
        yield "| pattern | becomes |"
        yield "|---|---|"
        yield from (f"| `{rule.pattern.replace('|', chr(92) + '|')}` | {rule.becomes} |" for rule in each.rules())
        yield ""
    yield from (_code("Before", before), _code("After", each(before)))


def _paragraphs(text: str) -> str:
    return "\n".join(line.strip() for line in text.strip().splitlines())


def _code(title: str, graph: Graph) -> str:
    return f"{title}:\n\n```text\n{print_graph(graph)}```\n"


def test_every_pass_of_the_pipeline_is_shown() -> None:
    modules = {path.stem for path in (PAGE.parents[1] / "passes").glob("*.py")} - {
        "__init__",
        "pipelines",
        "expressions",
        "quantization",
    }
    assert {type(each).__module__.rpartition(".")[2] for each, _ in EXAMPLES} == modules


def test_the_page_is_up_to_date() -> None:
    if os.environ.get("TOOLKIT_UPDATE_DOCS"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()


def test_every_example_is_changed() -> None:
    for each, example in EXAMPLES:
        build = GraphBuilder()
        graph = build.build(example(build))
        assert each.run(graph).matches > 0, each.name


def test_the_graph_page_shows_a_legal_graph() -> None:
    text = (PAGE.parent / "ir.md").read_text().split("```text\n")[1].split("```")[0]
    graph = parse_graph(text)
    verify(graph)
    assert print_graph(graph) == text
