"""Every pass on random graphs: the result is legal, computes the same, and is not changed by the pass again."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from toolkit.compiler.check import Check
from toolkit.compiler.ir import Graph, Value
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.compiler.targets import CPU
from toolkit.compiler.verify import verify
from toolkit.passes.pipelines import pipeline
from toolkit.passes.quantization import Quantization
from toolkit.runtime.encodings import FLOAT32, INT8, Encoding

T, R, WIDTH = Sym("T", 16), Sym("R", 4), 32


class Random:
    """Draws ops over values [T, 32], from few kinds so that patterns come up often."""

    def __init__(self, draw: st.DrawFn) -> None:
        self.draw = draw
        self.build = GraphBuilder()
        self.values = [self.build.input("x", "float32", (T, WIDTH))]
        self.weights: list[Value] = []

    def value(self) -> Value:
        """One of the values, mostly a recent one."""
        return self.draw(st.sampled_from(self.values[-4:] if self.draw(st.integers(0, 3)) else self.values))

    def weight(self, *shape: int) -> Value:
        """A weight, perhaps one that is there already."""
        same = [weight for weight in self.weights if weight.type.shape == shape]
        if same and self.draw(st.integers(0, 5)) == 0:
            return self.draw(st.sampled_from(same))
        self.weights.append(self.build.param(f"w{len(self.weights)}", shape))
        return self.weights[-1]

    def step(self) -> Value:
        """A new value."""
        made: Callable[[], Value] = self.draw(
            st.sampled_from([self.unary, self.unary, self.scalar, self.binary, self.binary, self.wide, self.linear])
            | st.sampled_from([self.norm, self.gated, self.layout, self.column, self.constant])
        )
        return made()

    def unary(self) -> Value:
        return self.build.op("activation", self.value(), kind=self.draw(st.sampled_from(["silu", "tanh", "relu"])))

    def scalar(self) -> Value:
        kind = self.draw(st.sampled_from(["add", "sub", "mul", "div"]))
        number = self.draw(st.sampled_from([0.0, 1.0, 0.5])) if kind != "div" else 1.0
        return self.build.op(kind, self.value(), scalar=number)

    def binary(self) -> Value:
        return self.build.op(self.draw(st.sampled_from(["add", "mul", "maximum"])), self.value(), self.value())

    def wide(self) -> Value:
        return self.build.op(self.draw(st.sampled_from(["add", "mul"])), self.value(), self.weight(WIDTH))

    def linear(self) -> Value:
        bias = [self.weight(WIDTH)] if self.draw(st.booleans()) else []
        return self.build.op("linear", self.value(), self.weight(WIDTH, WIDTH), *bias, has_bias=bool(bias))

    def norm(self) -> Value:
        return self.build.op("norm", self.value(), self.weight(WIDTH), eps=1e-5)

    def gated(self) -> Value:
        """A gated layer, of one projection or two."""
        x, build = self.value(), self.build
        if self.draw(st.booleans()):
            gate, up = (build.op("linear", x, self.weight(WIDTH, WIDTH)) for _ in range(2))
        else:
            both = build.op("linear", x, self.weight(2 * WIDTH, WIDTH))
            gate, up = (build.op("slice", both, axis=1, start=at, stop=at + WIDTH) for at in (0, WIDTH))
        return build.op("mul", build.op("activation", gate, kind="silu"), up)

    def layout(self) -> Value:
        """Columns in another order, or the same one in a roundabout way."""
        x, build = self.value(), self.build
        cut = self.draw(st.sampled_from([8, 16, WIDTH]))
        parts = [build.op("slice", x, axis=1, stop=cut)]
        parts += [build.op("slice", x, axis=1, start=cut, stop=WIDTH)] if cut < WIDTH else []
        joined = build.op("concat", *(parts[::-1] if self.draw(st.booleans()) else parts), axis=1)
        return build.op("reshape", build.op("reshape", joined, shape=(-1, 4, 8)), shape=(-1, WIDTH))

    def column(self) -> Value:
        """Work with one number a row."""
        x, build = self.value(), self.build
        total = build.op("reduce", x, op=self.draw(st.sampled_from(["mean", "max"])), keepdims=True)
        return build.op("sub", x, build.op("mul", total, scalar=0.5))

    def constant(self) -> Value:
        row = self.build.constant("row", np.linspace(-1, 1, WIDTH, dtype=np.float32))
        return self.build.op("mul", self.value(), self.build.op("activation", row, kind="tanh"))


@st.composite
def graphs(draw: st.DrawFn) -> Graph:
    """Random graphs whose first output are rows, perhaps with another that reads an inner value."""
    random = Random(draw)
    for _ in range(draw(st.integers(1, 10))):
        random.values.append(random.step())
    rows = random.build.op("take_rows", random.values[-1], random.build.input("rows", "int32", (R,)))
    return random.build.build(rows, *([random.value()] if draw(st.integers(0, 3)) == 0 else []))


def encoding_of(tensor: str) -> Encoding:
    """Some weights are stored in another way than the others."""
    return INT8 if tensor.endswith("3") else FLOAT32


@settings(max_examples=80)
@given(graphs(), st.sampled_from(["keep", "int8"]))
def test_passes_are_exact_and_idempotent(graph: Graph, quant: str) -> None:
    verify(graph)
    check = Check(graph)
    for each in pipeline(CPU, quant=Quantization.parse(quant), encoding_of=encoding_of):
        graph = each(graph)
        verify(graph)
        assert check.follow(graph, encodings_change=each.encodes) == "", each.name
        again = each.run(graph)
        assert (again.graph, again.matches) == (graph, 0), each.name
