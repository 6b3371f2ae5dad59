"""Queries, keys and values from one projection: split, normalize, rotate and write to the cache in one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Attr, Graph, Op, Value
from ..compiler.op_spec import Attrs, int_attr
from ..compiler.ops import make_op
from ..compiler.pass_ import Outcome, Pass
from ..compiler.rewrite import Replacement, Workspace, rewrite

NORM_KINDS = ("rms", "layer")


@dataclass(frozen=True)
class FuseRopeKvWrite(Pass):
    """Expects: q, k and v as slices of one value, canonical. Guarantees: a `kv_write` whose keys and values, and the
    queries that read it, are such slices with at most a per-head norm and a rotation is `rope_kv_write`.

    Every other `kv_write` stays, and why is reported.
    """

    name: ClassVar[str] = "rope_kv_write"

    def run(self, graph: Graph) -> Outcome:
        return rewrite(graph, {"kv_write": _fuse})


class _NoMatchError(Exception):
    """Why a `kv_write` can't be fused."""


@dataclass(frozen=True)
class _Head:
    """How queries or keys are made from a slice of the projection."""

    source: Value
    start: int
    heads: int
    width: int
    norm: Op | None
    rope: Op | None


def _fuse(op: Op, work: Workspace) -> Replacement | None:
    try:
        return _fused(op, work)
    except _NoMatchError as reason:
        work.note(f"{op.source.module or op.output.name}: rotation and cache write are not fused: {reason}")
        return None


def _fused(op: Op, work: Workspace) -> Replacement:
    attention = work.only_user(op.output, "paged_attention")
    if attention is None:
        raise _NoMatchError("the cache is read more than once")
    q, k, v = (_head(value, work) for value in (attention.inputs[0], *op.inputs[:2]))
    _check_slices(q, k, v)
    tables, rope_attrs = _rope(q, k, v)
    weights, norm_attrs = _norm(q, k, v)
    attrs: dict[str, Attr] = {"heads": q.heads, "kv_heads": k.heads, "head_dim": q.width, **rope_attrs, **norm_attrs}
    inputs = (q.source, *tables, *weights, op.inputs[2])
    names = [attention.inputs[0].name, op.output.name]
    return Replacement((make_op("rope_kv_write", inputs, names, attrs, op.source),))


def _head(value: Value, work: Workspace) -> _Head:
    """Trace a value [T, heads, D] back: rotation, norm, reshape, slice."""
    _, heads, width = value.type.shape
    assert isinstance(heads, int)
    assert isinstance(width, int)
    rope = work.producer(value, "rope")
    value = rope.inputs[0] if rope is not None else value
    norm = work.producer(value, "norm")
    value = norm.inputs[0] if norm is not None else value
    reshape = work.producer(value, "reshape")
    cut = work.producer(reshape.inputs[0], "slice") if reshape is not None else None
    if cut is None or len(cut.inputs[0].type.shape) != 2:
        found = work.producer(reshape.inputs[0] if reshape is not None else value)
        raise _NoMatchError(f"%{value.name} is no slice of a projection but comes from {found.kind if found else '?'}")
    return _Head(cut.inputs[0], int_attr(cut.attrs, "start"), heads, width, norm, rope)


def _check_slices(q: _Head, k: _Head, v: _Head) -> None:
    if q.source != k.source or k.source != v.source:
        raise _NoMatchError("queries, keys and values come from different values")
    if not q.width == k.width == v.width or k.heads != v.heads:
        raise _NoMatchError("heads of queries, keys and values differ in size")
    ends = [head.start + head.heads * head.width for head in (q, k, v)]
    if [q.start, k.start, v.start] != [0, *ends[:2]] or ends[2] != q.source.type.shape[1]:
        raise _NoMatchError("queries, keys and values are not all of the projection, in that order")


def _rope(q: _Head, k: _Head, v: _Head) -> tuple[tuple[Value, ...], Attrs]:
    """The tables, and the attributes that say how they are used."""
    if v.rope is not None or (q.rope is None) != (k.rope is None):
        raise _NoMatchError("queries and keys are not both rotated, or values are")
    if q.rope is None or k.rope is None:
        return (), {"has_rope": False}
    if q.rope.inputs[1:] != k.rope.inputs[1:] or q.rope.attrs != k.rope.attrs:
        raise _NoMatchError("queries and keys are rotated differently")
    return q.rope.inputs[1:], {"has_rope": True, "style": q.rope.attrs["style"]}


def _norm(q: _Head, k: _Head, v: _Head) -> tuple[tuple[Value, ...], Attrs]:
    """The norm weights of queries and keys, and the attributes of the norm."""
    if v.norm is not None or (q.norm is None) != (k.norm is None):
        raise _NoMatchError("queries and keys are not both normalized, or values are")
    if q.norm is None or k.norm is None:
        return (), {}
    attrs = q.norm.attrs
    if attrs != k.norm.attrs or attrs["kind"] not in NORM_KINDS or not attrs["has_weight"] or attrs["has_bias"]:
        raise _NoMatchError("queries and keys have norms of a form that the fused op lacks")
    weights = (q.norm.inputs[1], k.norm.inputs[1])
    shapes = [weight.type.shape for weight in weights]
    if shapes not in ([(q.width,)] * 2, [(q.heads, q.width), (k.heads, k.width)]):
        raise _NoMatchError("the norm's weights are neither shared by all heads nor one for each")
    return weights, {"has_qk_norm": True, **{name: attrs[name] for name in ("kind", "eps", "offset")}}
