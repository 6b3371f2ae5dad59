"""Queries, keys and values from one projection: split, normalize, rotate and write to the cache in one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..compiler.ir import Attr, Op, Param, Value
from ..compiler.op_spec import Attrs, int_attr
from ..compiler.ops import make_op
from ..compiler.rewrite import Match, Mismatch, Replacement, Rewriting, Rule, Workspace
from ..compiler.shapes import TensorType
from ..compiler.weights import Constant, Recipe
from ..runtime.encodings import FLOAT32

NORM_KINDS = ("rms", "layer")


@dataclass(frozen=True)
class FuseRopeKvWrite(Rewriting):
    """Expects: q, k and v as slices of one value, canonical. Guarantees: a `kv_write` whose keys and values, and the
    queries that read it, are such slices with at most a per-head norm and a rotation is `rope_kv_write`.

    Every other `kv_write` stays, and why is reported.
    """

    name: ClassVar[str] = "rope_kv_write"

    def rules(self) -> tuple[Rule, ...]:
        pattern = "paged_attention(q, write:kv_write(k, v, cache), *_)"
        failure = "rotation and cache write are not fused"
        return (Rule(pattern, "paged_attention(q, state, *_) of q, state = rope_kv_write(...)", _fuse, failure),)


@dataclass(frozen=True)
class _Head:
    """How queries or keys are made from a slice of the projection."""

    source: Value
    start: int
    heads: int
    width: int
    norm: Op | None
    rope: Op | None


def _fuse(match: Match) -> Replacement:
    write, work = match.labeled("write"), match.work
    if work.only_user(write.output) is None:
        raise Mismatch("the cache is read more than once")
    if work.only_user(match["q"]) is None:
        raise Mismatch("the queries are read elsewhere")
    q, k, v = (_head(match[name], work) for name in ("q", "k", "v"))
    _check_slices(q, k, v)
    tables, rope_attrs = _rope(q, k, v)
    weights, norm_attrs, ones = _norm(q, k, v)
    attrs: dict[str, Attr] = {"heads": q.heads, "kv_heads": k.heads, "head_dim": q.width, **rope_attrs, **norm_attrs}
    inputs = (q.source, *tables, *weights, match["cache"])
    names = [match["q"].name, write.output.name]
    return Replacement((make_op("rope_kv_write", inputs, names, attrs, write.source),), params=ones)


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
        raise Mismatch(f"%{value.name} is no slice of a projection but comes from {found.kind if found else '?'}")
    return _Head(cut.inputs[0], int_attr(cut.attrs, "start"), heads, width, norm, rope)


def _check_slices(q: _Head, k: _Head, v: _Head) -> None:
    if q.source != k.source or k.source != v.source:
        raise Mismatch("queries, keys and values come from different values")
    if not q.width == k.width == v.width or k.heads != v.heads:
        raise Mismatch("heads of queries, keys and values differ in size")
    ends = [head.start + head.heads * head.width for head in (q, k, v)]
    if [q.start, k.start, v.start] != [0, *ends[:2]] or ends[2] != q.source.type.shape[1]:
        raise Mismatch("queries, keys and values are not all of the projection, in that order")


def _rope(q: _Head, k: _Head, v: _Head) -> tuple[tuple[Value, ...], Attrs]:
    """The tables, and the attributes that say how they are used."""
    if v.rope is not None or (q.rope is None) != (k.rope is None):
        raise Mismatch("queries and keys are not both rotated, or values are")
    if q.rope is None or k.rope is None:
        return (), {"has_rope": False}
    if q.rope.inputs[1:] != k.rope.inputs[1:] or q.rope.attrs != k.rope.attrs:
        raise Mismatch("queries and keys are rotated differently")
    return q.rope.inputs[1:], {"has_rope": True, "style": q.rope.attrs["style"]}


def _norm(q: _Head, k: _Head, v: _Head) -> tuple[tuple[Value, ...], Attrs, tuple[Param, ...]]:
    """The norm weights of queries and keys, the attributes of the norm, and the weights that norms without any get."""
    if v.norm is not None or (q.norm is None) != (k.norm is None):
        raise Mismatch("queries and keys are not both normalized, or values are")
    if q.norm is None or k.norm is None:
        return (), {}, ()
    attrs = q.norm.attrs
    if attrs != k.norm.attrs or attrs["kind"] not in NORM_KINDS or attrs["has_bias"]:
        raise Mismatch("queries and keys have norms of a form that the fused op lacks")
    fused: Attrs = {"has_qk_norm": True, "kind": attrs["kind"], "eps": attrs["eps"]}
    if not attrs["has_weight"]:
        ones = Recipe(constant=Constant(np.ones(q.width, np.float32)), encoding=FLOAT32)
        param = Param(Value(f"ones.{q.width}", TensorType("float32", (q.width,))), ones)
        return (param.value, param.value), fused, (param,)
    weights = (q.norm.inputs[1], k.norm.inputs[1])
    shapes = [weight.type.shape for weight in weights]
    if shapes not in ([(q.width,)] * 2, [(q.heads, q.width), (k.heads, k.width)]):
        raise Mismatch("the norm's weights are neither shared by all heads nor one for each")
    return weights, {**fused, "offset": attrs["offset"]}, ()
