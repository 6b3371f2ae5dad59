"""Compute equal things once, and hold equal parameters once."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..compiler.ir import Graph, Param, Value
from ..compiler.pass_ import Outcome
from ..compiler.rewrite import Match, Replacement, Rewriting, Rule
from ..compiler.shapes import TensorType
from ..compiler.weights import Recipe


@dataclass(frozen=True)
class CommonSubexpressions(Rewriting):
    """Expects nothing. Guarantees: no two ops of one kind, inputs and attributes; no two parameters of one recipe."""

    name: ClassVar[str] = "common_subexpressions"

    def rules(self) -> tuple[Rule, ...]:
        return (Rule("any(first, *rest)", "an earlier op of the same kind, inputs and attributes", _reuse),)

    def run(self, graph: Graph) -> Outcome:
        merged = _merge_params(graph)
        outcome = super().run(merged)
        return replace(outcome, matches=outcome.matches + len(graph.params) - len(merged.params))


def _merge_params(graph: Graph) -> Graph:
    kept: dict[tuple[Recipe, TensorType], Param] = {}
    instead: dict[Value, Value] = {}
    for param in graph.params:
        instead[param.value] = kept.setdefault((param.recipe, param.value.type), param).value
    ops = tuple(replace(op, inputs=tuple(instead.get(value, value) for value in op.inputs)) for op in graph.ops)
    outputs = tuple(instead.get(value, value) for value in graph.outputs)
    return replace(graph, params=tuple(kept.values()), ops=ops, outputs=outputs)


def _reuse(match: Match) -> Replacement | None:
    """The first op that computes the same from the same inputs takes this one's place."""
    op = match.op
    for other in match.work.users(match["first"]):
        if other.outputs == op.outputs:
            return None
        if (other.kind, other.inputs, other.attrs) == (op.kind, op.inputs, op.attrs):
            return Replacement(forward={mine.name: its for mine, its in zip(op.outputs, other.outputs, strict=True)})
    return None
