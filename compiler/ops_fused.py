"""Rows of the op table: ops made by passes. They have no ONNX body."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ..kernels_templates import expression as ex
from .op_spec import (
    Array,
    Attrs,
    AttrSpec,
    CacheState,
    OpSpec,
    Packing,
    Types,
    bool_attr,
    broadcast,
    declare,
    expect,
    float_attr,
    int_attr,
    str_attr,
)
from .ops_model import (
    ATTENTION_ATTRS,
    NORM_ATTRS,
    ROPE_STYLES,
    attend,
    attention_weights,
    evaluate_norm,
    infer_norm,
    norm_expression,
    rotate,
)
from .ops_tensor import PointwiseSpec
from .shapes import CACHE, Shape, TensorType


class AddNorm(OpSpec):
    """(x[T,H], residual[T,H], w?, b?) -> (sum[T,H], norm(sum)[T,H])"""

    kind = "add_norm"
    attrs = NORM_ATTRS

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        infer_norm(types, attrs, data=2)
        expect(types[0] == types[1], "x and residual of one type", types)
        return (types[0], types[0])

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        total = inputs[0] + inputs[1]
        return (total, evaluate_norm(total, inputs[2:], attrs))

    def rows(self, types: Types, attrs: Attrs) -> tuple[ex.Expression, ...] | None:
        total = ex.parse("(add in0 in1)")
        return (total, norm_expression(total, 2, attrs))


class Pointwise(PointwiseSpec):
    """(a[T,..], b, ..) -> [T,..]"""

    kind = "pointwise"
    attrs = declare(expr=AttrSpec("str"))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        (out,) = super().infer(types, attrs)
        return (TensorType("float32", out.shape),)

    def expression(self, attrs: Attrs, inputs: int) -> ex.Expression | None:
        body = ex.parse(str_attr(attrs, "expr"))
        return body if ex.inputs(body) == set(range(inputs)) else None


class Reduction(OpSpec):
    """(a[..,D], b, ..) -> [..,D] or [..,1], one for each expression"""

    kind = "reduction"
    attrs = declare(exprs=AttrSpec("str"))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        bodies, shapes = self.rows(types, attrs), [t.shape for t in types]
        expect(set().union(*map(ex.inputs, bodies)) == set(range(len(types))), "the inputs of the expressions", types)
        return tuple(TensorType("float32", shape_of(body, shapes)) for body in bodies)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        wide = [x.astype(np.float64) for x in inputs]
        types = [TensorType("float32", x.shape) for x in inputs]
        return tuple(ex.evaluate(body, wide).astype(np.float32) for body in self.rows(types, attrs))

    def rows(self, types: Types, attrs: Attrs) -> tuple[ex.Expression, ...]:
        return ex.parse_all(str_attr(attrs, "exprs"))


def shape_of(body: ex.Expression, inputs: Sequence[Shape]) -> Shape:
    """The shape of an expression. Raises ValueError where shapes don't go together."""
    if isinstance(body, ex.Input):
        return inputs[body.index]
    if isinstance(body, ex.Number):
        return ()
    shape = broadcast([shape_of(arg, inputs) for arg in body.args])
    return (*shape[:-1], 1) if body.operator in ex.REDUCTIONS else shape


def written(cache: CacheState, k: Array, v: Array, packing: Packing) -> CacheState:
    """The cache with each sequence's new keys and values at its positions in this step."""
    state = dict(cache)
    for name, span, start in packing.sequences():
        old = state.get(name)
        if (len(old[0]) if old is not None else 0) < start:
            raise ValueError(f"sequence {name} continues at position {start}, beyond what its cache holds")
        state[name] = (
            (k[span], v[span])
            if old is None
            else (np.concatenate([old[0][:start], k[span]]), np.concatenate([old[1][:start], v[span]]))
        )
    return state


class KvWrite(OpSpec):
    """(k[T,Hk,D], v[T,Hk,Dv], cache) -> cache'"""

    kind = "kv_write"

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        good = len(types) == 3 and all(len(t.shape) == 3 for t in types[:2]) and types[2] == CACHE
        expect(good and types[0].shape[:2] == types[1].shape[:2], "k[T, Hk, D], v[T, Hk, Dv] and a cache", types)
        return (CACHE,)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[CacheState, ...]:
        k, v, cache = inputs
        return (written(cache, k, v, packing),)


class PagedAttention(OpSpec):
    """(q[T,Hq,D], cache, sinks[Hq]?, slopes[Hq]?) -> [T,Hq,Dv]"""

    kind = "paged_attention"
    attrs = declare(**ATTENTION_ATTRS, kv_heads=AttrSpec("int"), value_dim=AttrSpec("int"))

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        good = len(types) >= 2 and len(types[0].shape) == 3 and types[1] == CACHE
        expect(good and bool_attr(attrs, "causal"), "q[T, Hq, D], a cache and causal attention", types)
        tokens, heads, _ = types[0].shape
        good = isinstance(heads, int) and heads % int_attr(attrs, "kv_heads") == 0
        expect(good, "Hq a multiple of kv_heads", types)
        attention_weights(types, attrs, 2)
        return (TensorType(types[0].dtype, (tokens, heads, int_attr(attrs, "value_dim"))),)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Array, ...]:
        q, cache, *weights = inputs
        parts = []
        for name, span, start in packing.sequences():
            keys, values = cache[name]
            parts.append(attend(q[span], keys, values, start, attrs, weights=weights))
        return (np.concatenate(parts),)


class RopeKvWrite(OpSpec):
    """(qkv[T,(Hq+2Hk)*D], cos?, sin?, qw?, kw?, cache) -> (q[T,Hq,D], cache')"""

    kind = "rope_kv_write"
    attrs = declare(
        heads=AttrSpec("int"),
        kv_heads=AttrSpec("int"),
        head_dim=AttrSpec("int"),
        has_rope=AttrSpec("bool", True),
        style=AttrSpec("str", "half", ROPE_STYLES),
        has_qk_norm=AttrSpec("bool", False),
        kind=AttrSpec("str", "rms", ("rms", "layer")),
        eps=AttrSpec("float", 0.0),
        offset=AttrSpec("float", 0.0),
    )

    def infer(self, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
        heads, kv_heads, width = (int_attr(attrs, name) for name in ("heads", "kv_heads", "head_dim"))
        has_rope, has_norm = bool_attr(attrs, "has_rope"), bool_attr(attrs, "has_qk_norm")
        good = len(types) == 2 + 2 * has_rope + 2 * has_norm and types[-1] == CACHE and len(types[0].shape) == 2
        expect(good, "qkv, cos and sin, q and k norm weights as flagged, and a cache", types)
        expect(types[0].shape[1] == (heads + 2 * kv_heads) * width, f"qkv[T, ({heads} + 2*{kv_heads})*{width}]", types)
        tokens = types[0].shape[0]
        if has_rope:
            half = types[1].shape[-1]
            good = (
                types[1] == types[2]
                and types[1].shape[:-1] == (tokens,)
                and isinstance(half, int)
                and 2 * half <= width
            )
            expect(good, "cos[T, Dr/2] and sin[T, Dr/2]", types)
        if has_norm:
            shapes = [t.shape for t in types[-3:-1]]
            good = shapes in ([(width,), (width,)], [(heads, width), (kv_heads, width)])
            expect(good, f"q and k norm weights [{width}], or one for each head", types)
        return (TensorType(types[0].dtype, (tokens, heads, width)), CACHE)

    def evaluate(self, inputs: Sequence[Any], attrs: Attrs, packing: Packing) -> tuple[Any, ...]:
        heads, kv_heads, width = (int_attr(attrs, name) for name in ("heads", "kv_heads", "head_dim"))
        cos, sin, *weights = inputs[1:-1] if bool_attr(attrs, "has_rope") else (None, None, *inputs[1:-1])
        q, k, v = np.split(inputs[0].reshape(-1, heads + 2 * kv_heads, width), (heads, heads + kv_heads), axis=1)
        if bool_attr(attrs, "has_qk_norm"):
            norm: Attrs = {
                "kind": str_attr(attrs, "kind"),
                "eps": float_attr(attrs, "eps"),
                "offset": float_attr(attrs, "offset"),
                "has_weight": True,
                "has_bias": False,
            }
            q, k = evaluate_norm(q, weights[:1], norm), evaluate_norm(k, weights[1:], norm)
        if cos is not None:
            q, k = (rotate(x, cos, sin, str_attr(attrs, "style")) for x in (q, k))
        return (q, written(inputs[-1], k, v, packing))


ROWS: tuple[OpSpec, ...] = (
    AddNorm(),
    Pointwise(),
    Reduction(),
    KvWrite(),
    PagedAttention(),
    RopeKvWrite(),
)
