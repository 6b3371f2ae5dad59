"""Random graphs of work on rows: fused into one op, and compiled, they compute what the interpreter does op by op."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from cpu.kernels.harness import Guarded, assert_q8, isas, load_kernel, random_floats

from toolkit.compiler.interpret import from_tensors, interpret
from toolkit.compiler.ir import Graph, Op, Value
from toolkit.compiler.lower import row_forms
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.kernels_templates import expression as ex
from toolkit.kernels_templates.catalog import POINTWISE_INPUTS, KernelSpec, ParamValue
from toolkit.kernels_templates.packing import q8_row_bytes
from toolkit.passes.fuse_pointwise import FusePointwise
from toolkit.passes.fuse_reductions import FuseReductions
from toolkit.runtime.plan import IsaName

Floats = npt.NDArray[np.float32]
ROWS = 5
T = Sym("T", ROWS)
SEEDS = range(5)


class Rows:
    """A random chain of ops over rows of some columns, with two reductions or three."""

    def __init__(self, seed: int, width: int) -> None:
        self.rng, self.width, self.build = np.random.default_rng(seed), width, GraphBuilder()
        self.weights = 0

    def graph(self) -> Graph:
        reduce: list[Callable[[Value], Value]] = [self.norm, self.softmax, self.centered]
        point: list[Callable[[Value], Value]] = [self.add, self.scaled, self.activated]
        x = self.activated(self.build.input("x", "float32", (T, self.width)))
        for kinds in (point, reduce, point, reduce, point):
            x = kinds[self.rng.integers(3)](x)
        outputs = [x]
        if self.rng.integers(3) == 0:
            outputs = [self.build.op("reduce", x, op="max", keepdims=True)]
        elif self.rng.integers(2):
            other = self.build.input("branch", "float32", (T, self.width))
            outputs = list(self.build.ops("add_norm", x, other, self.weight(), eps=1e-5, names=("sum", "normed")))
        return self.build.build(*outputs)

    def weight(self) -> Value:
        self.weights += 1
        return self.build.param(f"w{self.weights}", (self.width,))

    def norm(self, x: Value) -> Value:
        kind = ("rms", "layer", "l2")[self.rng.integers(3)]
        return self.build.op("norm", x, self.weight(), kind=kind, eps=1e-5, offset=float(self.rng.integers(2)))

    def softmax(self, x: Value) -> Value:
        return self.build.op("softmax", x, axis=1)

    def centered(self, x: Value) -> Value:
        """x less its mean or maximum; that `x` has two readers is fused as well."""
        op = ("mean", "max", "sum")[self.rng.integers(3)]
        return self.build.op("sub", x, self.build.op("reduce", x, op=op, keepdims=True))

    def add(self, x: Value) -> Value:
        return self.build.op("add", x, self.build.input("residual", "float32", (T, self.width)))

    def scaled(self, x: Value) -> Value:
        return self.build.op("mul", self.build.op("add", x, scalar=0.25), self.weight())

    def activated(self, x: Value) -> Value:
        return self.build.op("activation", x, kind=("silu", "tanh", "relu")[self.rng.integers(3)])


def fused(graph: Graph) -> Op:
    """The one op that a graph becomes."""
    (op,) = FuseReductions(max_passes=8)(FusePointwise()(graph)).ops
    assert op.kind == "reduction"
    return op


def run(op: Op, values: dict[str, Floats], isa: IsaName, threads: int, *, q8: bool = False) -> list[Any]:
    """The outputs of a compiled op, as floats or the last one as q8 alone."""
    bodies = ex.parse_all(str(op.attrs["exprs"]))
    _, width, forms = row_forms(bodies, [value.type.shape for value in op.inputs])
    column = op.outputs[-1].type.shape[-1] == 1
    params: dict[str, ParamValue] = {f"in{index}": "" for index in range(POINTWISE_INPUTS)}
    params |= {f"in{index}": form for index, form in enumerate(forms)}
    params |= {"exprs": str(op.attrs["exprs"]), "column": column, "first_out": len(bodies) == 2}
    params |= {"float_out": not q8, "q8_out": q8}
    outs = [Guarded((ROWS, 1 if column else width), np.float32) for _ in bodies]
    if q8:
        outs[-1] = Guarded((ROWS, q8_row_bytes(width)), np.uint8)
    arrays = [values[value.name] for value in op.inputs]
    load_kernel(KernelSpec("reduction", params), isa)(
        *arrays, *(out.array for out in outs), ROWS, width, threads=threads
    )
    for out in outs:
        out.check()
    return [out.array for out in outs]


def numbers(graph: Graph, seed: int) -> dict[str, Floats]:
    """Random inputs and weights."""
    rng = np.random.default_rng(seed)
    shapes = {value.name: value.type.shape for value in (*graph.inputs, *(param.value for param in graph.params))}
    return {
        name: random_floats(rng, *(ROWS if isinstance(size, Sym) else size for size in shape))
        for name, shape in shapes.items()
    }


def expected(graph: Graph, values: dict[str, Floats]) -> list[Any]:
    """The outputs, interpreted op by op."""
    positions = np.arange(ROWS, dtype=np.int32)
    return list(interpret(graph, {"positions": positions, **values}, from_tensors(values)).values())


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("width", [45, 320])
def test_a_random_chain_is_one_kernel(seed: int, width: int) -> None:
    graph = Rows(seed, width).graph()
    values = numbers(graph, seed)
    wanted = expected(graph, values)
    for threads in (1, 3):
        for found, want in zip(run(fused(graph), values, "x86-64-v3", threads), wanted, strict=True):
            np.testing.assert_allclose(found, want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("isa", isas())
def test_a_norm_between_two_additions_as_codes(isa: IsaName) -> None:
    b = GraphBuilder()
    x, y, z = (b.input(name, "float32", (T, 96)) for name in "xyz")
    normed = b.op("norm", b.op("add", x, y), b.param("w", (96,)), eps=1e-5)
    graph = b.build(b.op("add", normed, z))
    values = numbers(graph, 0)
    (want,) = expected(graph, values)
    (floats,) = run(fused(graph), values, isa, 2)
    np.testing.assert_allclose(floats, want, rtol=1e-5, atol=1e-5)
    (codes,) = run(fused(graph), values, isa, 2, q8=True)
    assert_q8(codes, want)


def test_nan_is_passed_on() -> None:
    graph = Rows(0, 45).graph()
    values = numbers(graph, 0)
    values["x"][2, 7] = np.nan
    for found in run(fused(graph), values, "x86-64-v3", 1):
        assert np.isnan(found).any(axis=1).tolist() == [False, False, True, False, False]
