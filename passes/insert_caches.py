"""Give every attention layer its K/V cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Cache, Graph, Op, Value
from ..compiler.op_spec import bool_attr, int_attr
from ..compiler.ops import make_op
from ..compiler.pass_ import Outcome
from ..compiler.rewrite import Match, Replacement, Rewriting, Rule
from ..compiler.shapes import CACHE, Dim
from ..runtime.errors import UserError


@dataclass(frozen=True)
class InsertCaches(Rewriting):
    """Expects: causal attention, each with a layer number of its own. Guarantees: no `attention` op; each has become
    `kv_write` and `paged_attention` with a cache of its own in `Graph.caches`.

    Raises UserError naming every attention that is not causal: such a model has no incremental form.
    """

    name: ClassVar[str] = "insert_caches"

    def rules(self) -> tuple[Rule, ...]:
        return (Rule("attention(q, k, v, *weights)", "paged_attention(q, kv_write(k, v, cache), *weights)", _cached),)

    def run(self, graph: Graph) -> Outcome:
        found = [op for op in graph.ops if op.kind == "attention"]
        if wrong := [op.source.module or op.output.name for op in found if not bool_attr(op.attrs, "causal")]:
            raise UserError(
                f"attention that is not causal can't be run token by token: {', '.join(wrong)}; only decoders compile"
            )
        return super().run(graph)


def _cached(match: Match) -> Replacement:
    op = match.op
    cache = _cache(op)
    name = match.work.fresh(f"{cache.value.name}.next")
    write = make_op("kv_write", (match["k"], match["v"], cache.value), [name], source=op.source)
    attrs = {**op.attrs, "kv_heads": cache.heads, "value_dim": cache.value_dim}
    inputs = (match["q"], write.output, *match.rest("weights"))
    attend = make_op("paged_attention", inputs, [op.output.name], attrs, op.source)
    return Replacement((write, attend), caches=(cache,))


def _cache(op: Op) -> Cache:
    layer = int_attr(op.attrs, "layer")
    (_, heads, key_dim), (_, _, value_dim) = op.inputs[1].type.shape, op.inputs[2].type.shape
    name = Value(f"cache{layer}", CACHE)
    return Cache(name, layer, _int(heads), _int(key_dim), _int(value_dim), int_attr(op.attrs, "window"))


def _int(dim: Dim) -> int:
    assert isinstance(dim, int)
    return dim
