"""What does nothing disappears; what does something stays."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from toolkit.compiler.ir import Value
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.compiler.verify import verify
from toolkit.passes.canonicalize import Canonicalize

T = Sym("T", 8)
Step = Callable[[GraphBuilder, Value], Value]


def _joined(b: GraphBuilder, x: Value) -> Value:
    parts = [b.op("slice", x, axis=1, start=start, stop=stop) for start, stop in [(2, 4), (4, 5), (5, 8)]]
    return b.op("concat", *parts, axis=1)


def _cut_out(b: GraphBuilder, x: Value) -> Value:
    both = b.op("concat", b.op("activation", x, kind="neg"), x, axis=1)
    return b.op("slice", both, axis=1, start=13, stop=15)


def _reshaped(b: GraphBuilder, x: Value) -> Value:
    return b.op("reshape", b.op("reshape", x, shape=(-1, 2, 2, 3)), shape=(-1, 4, 3))


def _turned(b: GraphBuilder, x: Value) -> Value:
    cube = b.op("reshape", x, shape=(-1, 3, 4))
    return b.op("transpose", b.op("transpose", cube, perm=(1, 2, 0)), perm=(2, 1, 0))


CASES: dict[str, tuple[Step, list[str]]] = {
    "reshape back": (lambda b, x: b.op("reshape", b.op("reshape", x, shape=(-1, 3, 4)), shape=(-1, 12)), []),
    "reshape twice": (_reshaped, ["reshape"]),
    "transpose back": (lambda b, x: b.op("transpose", b.op("transpose", x, perm=(1, 0)), perm=(1, 0)), []),
    "transpose of ones": (
        lambda b, x: b.op("transpose", b.op("reshape", x, shape=(1, -1, 12)), perm=(1, 0, 2)),
        ["reshape"],
    ),
    "bias": (lambda b, x: b.op("add", b.op("linear", x, b.param("w", (3, 12))), b.param("bias", (3,))), ["linear"]),
    "no bias": (
        lambda b, x: b.op("add", b.op("linear", x, b.param("w", (3, 12))), b.param("c", (1,))),
        ["linear", "add"],
    ),
    "transpose twice": (_turned, ["reshape", "transpose"]),
    "slice of all": (lambda b, x: b.op("slice", x, axis=1, start=0, stop=12), []),
    "slice of slice": (
        lambda b, x: b.op("slice", b.op("slice", x, axis=1, start=2, stop=9), axis=1, start=3, stop=5),
        ["slice"],
    ),
    "slice of concat": (_cut_out, ["slice"]),
    "slice of a part": (lambda b, x: b.op("slice", b.op("concat", x, x, axis=1), axis=1, start=12, stop=24), []),
    "slice across parts": (
        lambda b, x: b.op("slice", b.op("concat", x, x, axis=1), axis=1, start=11, stop=24),
        ["concat", "slice"],
    ),
    "concat of neighbors": (_joined, ["slice"]),
    "concat of one": (lambda b, x: b.op("concat", x, axis=1), []),
    "cast to itself": (lambda b, x: b.op("cast", x, dtype="float32"), []),
    "neutral": (lambda b, x: b.op("div", b.op("mul", b.op("sub", x), scalar=1.0), scalar=1.0), []),
    "0 - x": (lambda b, x: b.op("sub", x, reverse=True), ["sub"]),
    "1 / x": (lambda b, x: b.op("div", x, scalar=1.0, reverse=True), ["div"]),
}


@pytest.mark.parametrize("case", CASES)
def test_canonical_form(case: str) -> None:
    step, expected = CASES[case]
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 12))
    graph = build.build(build.op("activation", step(build, x), kind="exp"))
    result = Canonicalize()(graph)
    verify(result)
    assert [op.kind for op in result.ops] == [*expected, "activation"]
    assert Canonicalize().run(result).matches == 0


def test_an_embeddings_scale_becomes_its_attribute() -> None:
    build = GraphBuilder()
    ids = build.input("ids", "int32", (T,))
    table = build.param("table", (9, 4))
    rows = build.op("embedding", table, ids)
    graph = build.build(build.op("mul", build.op("mul", rows, scalar=3.0), scalar=2.0))
    (op,) = Canonicalize()(graph).ops
    assert (op.kind, op.attrs["scale"]) == ("embedding", 6.0)


def test_a_scale_stays_where_others_read_the_rows() -> None:
    build = GraphBuilder()
    rows = build.op("embedding", build.param("table", (9, 4)), build.input("ids", "int32", (T,)))
    graph = build.build(build.op("mul", rows, scalar=3.0), build.op("activation", rows, kind="exp"))
    assert Canonicalize()(graph) == graph
