"""The op table: for every op kind its attributes, shape rule, numpy meaning and ONNX body.

Adding an op is adding a row: a class in `ops_model.py`, `ops_tensor.py` or `ops_fused.py`, and a line below. Nothing else
in the compiler switches on op kinds except lowering's own table and the patterns of passes.

Notation: x[T,H] is a value with dims T and H; `?` marks an optional input. Optional inputs are listed by presence flags
in the attributes (`has_bias`), since inputs are positional. Dtypes follow the first input unless said otherwise. Axes are
counted from the front (`GraphBuilder` and `complete` turn negative ones around).

Tensor ops (as captured)
  embedding   (table[V,H], ids[T]) -> [T,H]                       rows of a table, times attr scale; also `gather` of any
                                                                  constant table
  linear      (x[..,K], w[N,K], b[N]?, e1, e2 ..) -> [..,N]       attrs has_bias, epilogue: "" or an expression in which
                                                                  in0 is x @ w.T + b and in1.. are the extra inputs e1..
                                                                  (each [..,N] or [N]). With gated, in0 and in1 are its
                                                                  halves, in2.. the extras, and the result is [..,N/2].
                                                                  Passes fill both
  norm        (x[..,D], w[D]?, b[D]?) -> [..,D]                   attrs kind "rms"|"layer"|"l2", eps, offset (added to w),
                                                                  has_weight, has_bias; computed in float32. w may be
                                                                  [Hn,D] for x[..,Hn,D]
  rope_table  (positions[T], lengths[T], frequencies[K,Dr/2]) -> [T,Dr/2]
                                                                  attrs function "cos"|"sin", first, scale: of position
                                                                  times the frequencies of the length, those of row
                                                                  lengths - first, or the first or last row beyond
  rope        (x[T,Hn,D], cos[T,Dr/2], sin[T,Dr/2]) -> [T,Hn,D]   attrs style "half"|"pair"; the first Dr columns rotate,
                                                                  the others pass
  attention   (q[T,Hq,D], k[T,Hk,D], v[T,Hk,Dv], sinks[Hq]?, slopes[Hq]?) -> [T,Hq,Dv]
                                                                  attrs layer, scale, window (0 none: key j is seen from i
                                                                  if i-j < window), softcap (0 none), causal, has_sinks,
                                                                  has_slopes (ALiBi: slope * (i-j) is taken off scores).
                                                                  Sequences are packed: `positions` restarts at 0
  activation  (x) -> x                                            attrs kind: silu gelu gelu_tanh relu relu2 sigmoid
                                                                  quick_gelu tanh softplus exp sqrt rsqrt neg abs ...
  add sub mul div pow maximum minimum (a, b?) -> broadcast        attrs scalar (used when b is absent), reverse (b op a)
  compare     (a, b?) -> bool                                     attrs op "lt"|"le"|"gt"|"ge"|"eq"|"ne", scalar
  where       (c, a, b) -> broadcast
  clamp       (x) -> x                                            attrs low, high
  softmax     (x) -> x                                            attrs axis
  reduce      (x) -> ..                                           attrs op "sum"|"mean"|"max", axis, keepdims
  bmm         (a[..,M,K], b[..,K,N]) -> [..,M,N]
  reshape     (x) -> shape                                        attrs shape: ints, -1 for the symbolic dimension
  transpose   (x) -> permuted                                     attrs perm
  slice       (x) -> ..                                           attrs axis, start, stop (step 1)
  concat      (a, b, ..) -> ..                                    attrs axis
  cast        (x) -> x                                            attrs dtype
  take_rows   (x[T,H], rows[R]) -> [R,H]                          the rows that need logits

Ops made by passes
  add_norm    (x[T,H], residual[T,H], w?, b?) -> (sum[T,H], norm(sum)[T,H])       attrs of norm
  rope_kv_write (qkv[T,(Hq+2Hk)*D], cos, sin, qw?, kw?, cache) -> (q[T,Hq,D], cache')
                                                                  attrs heads, kv_heads, head_dim, has_rope, style,
                                                                  has_qk_norm, and the norm's kind, eps, offset;
                                                                  normalizes and rotates q and k, writes k and v at the
                                                                  step's slots. Queries are first, then keys, then
                                                                  values. Absent: cos, sin without has_rope, qw, kw
                                                                  (each [D]) without has_qk_norm
  kv_write    (k[T,Hk,D], v[T,Hk,Dv], cache) -> cache'            the unfused form
  paged_attention (q[T,Hq,D], cache, sinks?, slopes?) -> [T,Hq,Dv]  attrs of attention plus kv_heads, value_dim
  pointwise   (a[T,..], b, ..) -> [T,..]                          attrs expr over in0, in1 .., in the language of
                                                                  `kernels_templates.expression`, e.g.
                                                                  "(mul (silu in0) in1)"; inputs broadcast
  reduction   (a[..,D], b, ..) -> [..,D] or [..,1], ..            attrs exprs: an expression for each output, which may
                                                                  have sums, means and maxima over the last axis
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType

import numpy as np
import numpy.typing as npt

from . import ops_fused, ops_model, ops_tensor
from .ir import Attr, Cache, Graph, Op, Param, Source, Value
from .op_spec import Attrs, OpSpec, Types, ir_dtype
from .shapes import CACHE, DType, Shape, TensorType
from .weights import Constant, Piece, Recipe

OPS: Mapping[str, OpSpec] = MappingProxyType(
    {row.kind: row for row in (*ops_model.ROWS, *ops_tensor.ROWS, *ops_fused.ROWS)}
)


NO_SOURCE = Source()


def complete(kind: str, types: Types, attrs: Attrs) -> dict[str, Attr]:
    """Every attribute of an op: the given ones, defaults for the others, and axes counted from the front.

    Raises ValueError for an unknown op and for a missing, unknown or mistyped attribute.
    """
    if kind not in OPS:
        raise ValueError(f"expected an op of the op table, found {kind!r}")
    specs = OPS[kind].attrs
    if unknown := sorted(set(attrs) - set(specs)):
        raise ValueError(f"{kind} has attributes {', '.join(specs) or 'none'}, found {', '.join(unknown)}")
    full: dict[str, Attr] = {}
    for name, spec in specs.items():
        value = attrs.get(name, spec.default)
        if spec.type == "float" and type(value) is int:
            value = float(value)
        if value is None or not spec.accepts(value):
            wanted = " or ".join(spec.choices) or spec.type
            raise ValueError(f"{kind} needs attribute {name}: {wanted}, found {value!r}")
        full[name] = value
    axis = full.get("axis")
    if isinstance(axis, int) and axis < 0 and types:
        full["axis"] = axis + len(types[0].shape)
    return full


def infer(kind: str, types: Types, attrs: Attrs) -> tuple[TensorType, ...]:
    """Types of an op's outputs, given all its attributes. Raises ValueError where the op would be illegal."""
    try:
        return OPS[kind].infer(types, attrs)
    except ValueError as error:
        raise ValueError(f"{kind}: {error}") from None


def make_op(
    kind: str, inputs: Sequence[Value], names: Sequence[str], attrs: Attrs | None = None, source: Source = NO_SOURCE
) -> Op:
    """An op with complete attributes and inferred output types. Raises ValueError where it would be illegal."""
    types = [value.type for value in inputs]
    full = complete(kind, types, attrs or {})
    outputs = tuple(Value(name, type_) for name, type_ in zip(names, infer(kind, types, full), strict=True))
    return Op(kind, tuple(inputs), outputs, full, source)


class GraphBuilder:
    """Builds a graph op by op; every op is checked as it is added.

    Names are hints: a name that is taken gets a number appended.
    """

    def __init__(self) -> None:
        self._inputs: list[Value] = []
        self._params: list[Param] = []
        self._caches: list[Cache] = []
        self._ops: list[Op] = []
        self._taken: set[str] = set()

    def fresh(self, hint: str) -> str:
        """A name that no value of the graph has."""
        name, number = hint, 0
        while name in self._taken:
            number += 1
            name = f"{hint}_{number}"
        self._taken.add(name)
        return name

    def input(self, name: str, dtype: DType, shape: Shape) -> Value:
        """A step input."""
        value = Value(self.fresh(name), TensorType(dtype, shape))
        self._inputs.append(value)
        return value

    def param(self, name: str, shape: Shape, recipe: Recipe | str | None = None) -> Value:
        """A float32 weight; a recipe that is a string, or the name by default, is one checkpoint tensor."""
        made = recipe if isinstance(recipe, Recipe) else Recipe((Piece(recipe or name),))
        value = Value(self.fresh(name), TensorType("float32", shape))
        self._params.append(Param(value, made))
        return value

    def constant(self, name: str, array: npt.NDArray[np.generic]) -> Value:
        """An array that is part of the graph."""
        value = Value(self.fresh(name), TensorType(ir_dtype(array), array.shape))
        self._params.append(Param(value, Recipe(constant=Constant(array))))
        return value

    def cache(self, layer: int, heads: int, key_dim: int, value_dim: int, window: int = 0) -> Value:
        """The initial state of a layer's K/V cache."""
        value = Value(self.fresh(f"cache{layer}"), CACHE)
        self._caches.append(Cache(value, layer, heads, key_dim, value_dim, window))
        return value

    def ops(
        self, kind: str, /, *inputs: Value, names: Sequence[str] = (), source: Source = NO_SOURCE, **attrs: Attr
    ) -> tuple[Value, ...]:
        """Append an op and return its outputs. Raises ValueError where it would be illegal."""
        types = [value.type for value in inputs]
        full = complete(kind, types, attrs)
        results = infer(kind, types, full)
        hints = names or [kind] * len(results)
        outputs = tuple(Value(self.fresh(hint), type_) for hint, type_ in zip(hints, results, strict=True))
        self._ops.append(Op(kind, inputs, outputs, full, source))
        return outputs

    def op(self, kind: str, /, *inputs: Value, name: str = "", source: Source = NO_SOURCE, **attrs: Attr) -> Value:
        """Append an op with one output and return that."""
        (value,) = self.ops(kind, *inputs, names=(name or kind,), source=source, **attrs)
        return value

    def build(self, *outputs: Value) -> Graph:
        """The graph with these outputs."""
        return Graph(tuple(self._inputs), tuple(self._params), tuple(self._ops), outputs, tuple(self._caches))
