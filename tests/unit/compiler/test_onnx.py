"""onnxruntime runs the ONNX twin and agrees with the interpreter: packed, and step by step over explicit past."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

from toolkit.compiler.check import random_weight
from toolkit.compiler.interpret import interpret
from toolkit.compiler.ir import Graph
from toolkit.compiler.onnx_io import to_onnx, write_onnx
from toolkit.compiler.op_spec import Array, Packing
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.kernels_templates.expression import UNARY

T, R = Sym("T", 64), Sym("R", 8)
HEADS, WIDTH = 4, 8


def model(
    window: int = 0, softcap: float = 0.0, sinks: bool = False, slopes: bool = False, style: str = "half"
) -> Graph:
    """Two attention layers with everything that an attention op can have."""
    build = GraphBuilder()
    tokens, positions = build.input("tokens", "int32", (T,)), build.input("positions", "int32", (T,))
    rows = build.input("rows", "int32", (R,))
    table = build.param("embed", (50, HEADS * WIDTH))
    x = build.op("embedding", table, tokens, scale=2.0)
    angles = np.arange(64)[:, None] / np.array([1.0, 3.0, 9.0])
    pair = [build.constant(name, f(angles).astype(np.float32)) for name, f in (("cos", np.cos), ("sin", np.sin))]
    cos, sin = (build.op("embedding", table, positions) for table in pair)
    for layer, (kind, bias) in enumerate([("rms", False), ("layer", True)]):
        weights = [build.param(f"norm{layer}", (HEADS * WIDTH,)), build.param(f"shift{layer}", (HEADS * WIDTH,))]
        h = build.op("norm", x, *weights[: 1 + bias], kind=kind, eps=1e-5, offset=1.0, has_bias=bias)
        heads = []
        for name, count in (("q", HEADS), ("k", 2), ("v", 2)):
            parts = [build.param(f"{name}{layer}", (count * WIDTH, HEADS * WIDTH))]
            parts += [build.param(f"{name}{layer}.bias", (count * WIDTH,))] if bias else []
            heads.append(build.op("reshape", build.op("linear", h, *parts, has_bias=bias), shape=(-1, count, WIDTH)))
        q, k = (build.op("rope", head, cos, sin, style=style) for head in heads[:2])
        flags = {"sinks": sinks, "slopes": slopes}
        extra = [build.param(f"{name}{layer}", (HEADS,)) for name, present in flags.items() if present]
        options = {"scale": WIDTH**-0.5, "softcap": softcap, "window": window}
        options |= {f"has_{name}": present for name, present in flags.items()}
        out = build.op("attention", q, k, heads[2], *extra, layer=layer, **options)
        x = build.op("add", x, build.op("reshape", out, shape=(-1, HEADS * WIDTH)))
    return build.build(build.op("linear", build.op("take_rows", x, rows), table, name="logits"))


def run(graph: Graph, inputs: dict[str, Array], past: dict[str, Array] | None = None) -> dict[str, Array]:
    written = to_onnx(graph, random_weight)
    onnx.checker.check_model(written, full_check=True)
    onnxruntime = import_module("onnxruntime")  # it has no types
    session = onnxruntime.InferenceSession(written.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [spec.name for spec in session.get_inputs() if spec.name.startswith("past_")]
    feeds = inputs | (past or {name: np.zeros((0, 2, WIDTH), np.float32) for name in names})
    outputs = [spec.name for spec in session.get_outputs()]
    return dict(zip(outputs, session.run(outputs, feeds), strict=True))


def step(tokens: list[int], positions: list[int]) -> dict[str, Array]:
    columns = {"tokens": tokens, "positions": positions, "rows": list(range(len(tokens)))}
    return {name: np.array(column, np.int32) for name, column in columns.items()}


@pytest.mark.parametrize(
    "options",
    [
        *({}, {"window": 2}, {"softcap": 1.5}, {"sinks": True}, {"slopes": True}, {"style": "pair"}),
        {"window": 3, "sinks": True, "slopes": True},
    ],
    ids=str,
)
def test_onnxruntime_agrees(options: dict[str, Any]) -> None:
    graph = model(**options)
    packed = step([3, 1, 4, 1, 5, 9, 2], [0, 1, 2, 3, 0, 1, 2])
    expected = interpret(graph, packed, random_weight)["logits"]
    np.testing.assert_allclose(run(graph, packed)["logits"], expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("window", [0, 2])
def test_stepwise_over_the_past_equals_whole(window: int) -> None:
    graph = model(window=window)
    tokens = [3, 1, 4, 1, 5, 9]
    expected = interpret(graph, step(tokens, list(range(6))), random_weight)["logits"]
    past: dict[str, Array] | None = None
    found = []
    for start, stop in [(0, 3), (3, 4), (4, 6)]:
        outputs = run(graph, step(tokens[start:stop], list(range(start, stop))), past)
        found.append(outputs.pop("logits"))
        past = {name.replace("present", "past"): array for name, array in outputs.items()}
    np.testing.assert_allclose(np.concatenate(found), expected, rtol=1e-4, atol=1e-4)


def test_every_tensor_op_agrees() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 6))
    parts = [build.op("slice", x, axis=1, start=start, stop=start + 3) for start in (0, 3)]
    positive = build.op("add", build.op("activation", parts[0], kind="abs"), scalar=0.5)
    outs = [build.op("activation", positive, kind=kind) for kind in UNARY]
    outs += [build.op(kind, positive, parts[1]) for kind in ("add", "sub", "mul", "div", "maximum", "minimum", "pow")]
    outs += [build.op("sub", positive, scalar=2.0, reverse=True), build.op("clamp", parts[1], low=-0.5, high=0.25)]
    for op in ("lt", "le", "gt", "ge", "eq", "ne"):
        outs.append(build.op("where", build.op("compare", parts[1], positive, op=op), *parts))
    outs += [build.op("reduce", x, op=op, axis=-1, keepdims=True) for op in ("sum", "mean", "max")]
    outs += [build.op("norm", x, kind="l2", eps=1e-6, has_weight=False), build.op("softmax", x)]
    square = build.op("bmm", build.op("reshape", x, shape=(-1, 3, 2)), build.op("reshape", x, shape=(-1, 2, 3)))
    outs += [build.op("transpose", square, perm=(0, 2, 1)), build.op("concat", *parts[::-1], axis=1)]
    outs += [build.op("cast", build.op("cast", build.op("compare", x, op="gt"), dtype="int32"), dtype="float32")]
    graph = build.build(*outs)
    inputs = {"x": np.random.default_rng(0).standard_normal((5, 6)).astype(np.float32)}
    expected = interpret(graph, inputs, {}, packing=Packing((0, 5), (5,), (0,)))
    found = run(graph, inputs)
    for value in outs:
        np.testing.assert_allclose(found[value.name], expected[value.name], rtol=2e-5, atol=2e-6, err_msg=value.name)


def test_weights_are_omitted_but_named(tmp_path: Path) -> None:
    graph = model()
    write_onnx(graph, tmp_path / "graph.onnx")
    assert [path.name for path in tmp_path.iterdir()] == ["graph.onnx"]
    written = onnx.load(tmp_path / "graph.onnx", load_external_data=False)
    embed = next(tensor for tensor in written.graph.initializer if tensor.name == "embed")
    assert embed.external_data[0].value == "omitted"
    assert embed.doc_string == "embed"
    assert (tmp_path / "graph.onnx").stat().st_size < 40_000


def test_fused_ops_have_no_onnx_body() -> None:
    build = GraphBuilder()
    x = build.input("x", "float32", (T, 6))
    with pytest.raises(ValueError, match="add_norm has no ONNX body: write the captured graph"):
        to_onnx(build.build(*build.ops("add_norm", x, x, eps=1e-5, has_weight=False, names=("sum", "norm"))))
