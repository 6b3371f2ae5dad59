"""Give every attention layer its K/V cache."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..compiler.ir import Cache, Graph, Op, Value
from ..compiler.op_spec import bool_attr, int_attr
from ..compiler.ops import make_op
from ..compiler.pass_ import Outcome, Pass
from ..compiler.shapes import CACHE, Dim
from ..runtime.errors import UserError


@dataclass(frozen=True)
class InsertCaches(Pass):
    """Expects: causal attention, each with a layer number of its own. Guarantees: no `attention` op; each has become
    `kv_write` and `paged_attention` with a cache of its own in `Graph.caches`.

    Raises UserError naming every attention that is not causal: such a model has no incremental form.
    """

    name: ClassVar[str] = "insert_caches"

    def run(self, graph: Graph) -> Outcome:
        found = [op for op in graph.ops if op.kind == "attention"]
        if wrong := [op.source.module or op.output.name for op in found if not bool_attr(op.attrs, "causal")]:
            raise UserError(
                f"attention that is not causal can't be run token by token: {', '.join(wrong)}; only decoders compile"
            )
        caches: list[Cache] = []
        ops: list[Op] = []
        for op in graph.ops:
            if op.kind == "attention":
                cache = _cache(op)
                caches.append(cache)
                ops += _cached(op, cache)
            else:
                ops.append(op)
        return Outcome(replace(graph, ops=tuple(ops), caches=(*graph.caches, *caches)), len(found))


def _cache(op: Op) -> Cache:
    layer = int_attr(op.attrs, "layer")
    (_, heads, key_dim), (_, _, value_dim) = op.inputs[1].type.shape, op.inputs[2].type.shape
    name = Value(f"cache{layer}", CACHE)
    return Cache(name, layer, _int(heads), _int(key_dim), _int(value_dim), int_attr(op.attrs, "window"))


def _int(dim: Dim) -> int:
    assert isinstance(dim, int)
    return dim


def _cached(op: Op, cache: Cache) -> list[Op]:
    q, k, v, *weights = op.inputs
    write = make_op("kv_write", (k, v, cache.value), [f"{cache.value.name}.next"], source=op.source)
    attrs = {**op.attrs, "kv_heads": cache.heads, "value_dim": cache.value_dim}
    return [write, make_op("paged_attention", (q, write.output, *weights), [op.output.name], attrs, op.source)]
