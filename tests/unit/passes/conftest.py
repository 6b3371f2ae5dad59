"""A decoder as capture makes it, with the variations that passes must tell apart."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from toolkit.compiler.ir import Graph, Source, Value
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym

HIDDEN, WIDTH, HEADS, KV_HEADS, FFN, VOCAB, CONTEXT = 64, 16, 4, 2, 96, 80, 64
T, R = Sym("T", 64), Sym("R", 16)


@dataclass
class Decoder:
    """Builds a small decoder; the fields are what architectures vary."""

    layers: int = 2
    rope: bool = True
    qk_norm: str = ""
    """"", "head" (before the rotation, per head), "full" (over all heads at once) or "late" (after it, no weights)."""
    bias: bool = False
    gated: bool = True
    post_norm: bool = False
    softcap: float = 0.0
    query_scale: float = 1.0
    tied: bool = True

    def __post_init__(self) -> None:
        self.build = GraphBuilder()
        self.tables: list[Value] = []

    def graph(self) -> Graph:
        build = self.build
        tokens, positions = build.input("tokens", "int32", (T,)), build.input("positions", "int32", (T,))
        rows = build.input("rows", "int32", (R,))
        embed = build.param("embed.weight", (VOCAB, HIDDEN))
        x = build.op("embedding", embed, tokens, name="x")
        if self.rope:
            self.tables = [build.op("embedding", self._table(name), positions, name=name) for name in ("cos", "sin")]
        else:
            x = build.op("add", x, build.op("embedding", build.param("wpe", (CONTEXT, HIDDEN)), positions))
        for layer in range(self.layers):
            x = self._residual(x, f"layers.{layer}.attn", self._attention)
            x = self._residual(x, f"layers.{layer}.mlp", self._mlp)
        x = build.op("take_rows", self._norm(x, "final_norm"), rows)
        head = embed if self.tied else build.param("lm_head.weight", (VOCAB, HIDDEN))
        x = build.op("linear", x, head, name="logits")
        if self.softcap:
            x = build.op("mul", build.op("activation", build.op("div", x, scalar=9.0), kind="tanh"), scalar=9.0)
        return build.build(x)

    def _table(self, name: str) -> Value:
        angles = np.arange(CONTEXT)[:, None] * 100.0 ** -(np.arange(WIDTH // 2) / (WIDTH // 2))
        return self.build.constant(f"{name}.table", (np.cos if name == "cos" else np.sin)(angles).astype(np.float32))

    def _residual(self, x: Value, at: str, branch: Callable[[Value, str], Value]) -> Value:
        if self.post_norm:
            return self.build.op("add", x, self._norm(branch(x, at), f"{at}.norm"))
        return self.build.op("add", x, branch(self._norm(x, f"{at}.norm"), at))

    def _norm(self, x: Value, name: str) -> Value:
        weight = self.build.param(f"{name}.weight", (HIDDEN,))
        return self.build.op("norm", x, weight, eps=1e-5, name=name, source=Source(name))

    def _linear(self, x: Value, name: str, columns: int, rows: int) -> Value:
        weights = [self.build.param(f"{name}.weight", (columns, rows))]
        if self.bias:
            weights.append(self.build.param(f"{name}.bias", (columns,)))
        return self.build.op("linear", x, *weights, has_bias=self.bias, name=name, source=Source(name))

    def _attention(self, x: Value, at: str) -> Value:
        build = self.build
        q, k, v = (self._heads(x, f"{at}.{name}", n) for name, n in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)))
        if self.rope:
            q, k = (build.op("rope", head, *self.tables) for head in (q, k))
        if self.qk_norm == "late":
            q, k = (build.op("norm", head, eps=1e-5, has_weight=False) for head in (q, k))
        layer = int(at.split(".")[1])
        out = build.op("attention", q, k, v, layer=layer, scale=WIDTH**-0.5, window=4 * layer, source=Source(at))
        return self._linear(build.op("reshape", out, shape=(-1, HEADS * WIDTH)), f"{at}.o", HIDDEN, HEADS * WIDTH)

    def _heads(self, x: Value, name: str, count: int) -> Value:
        build = self.build
        flat = self._linear(x, name, count * WIDTH, HIDDEN)
        if self.query_scale != 1.0 and name.endswith("q"):
            flat = build.op("mul", flat, scalar=self.query_scale)
        normed = self.qk_norm and not name.endswith("v")
        if normed and self.qk_norm == "full":
            flat = build.op("norm", flat, build.param(f"{name}_norm", (count * WIDTH,)), eps=1e-5)
        heads = build.op("reshape", flat, shape=(-1, count, WIDTH))
        if normed and self.qk_norm == "head":
            heads = build.op("norm", heads, build.param(f"{name}_norm", (WIDTH,)), eps=1e-5, offset=1.0)
        return heads

    def _mlp(self, x: Value, at: str) -> Value:
        up = self._linear(x, f"{at}.up", FFN, HIDDEN)
        if not self.gated:
            return self._linear(self.build.op("activation", up, kind="gelu_tanh"), f"{at}.down", HIDDEN, FFN)
        gate = self.build.op("activation", self._linear(x, f"{at}.gate", FFN, HIDDEN), kind="silu")
        return self._linear(self.build.op("mul", gate, up), f"{at}.down", HIDDEN, FFN)


@pytest.fixture
def decoder() -> type[Decoder]:
    return Decoder
