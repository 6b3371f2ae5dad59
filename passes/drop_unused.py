"""Drop ops, parameters and caches that no output depends on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

from ..compiler.ir import Graph
from ..compiler.pass_ import Outcome
from ..compiler.rewrite import Rewriting, Rule


@dataclass(frozen=True)
class DropUnused(Rewriting):
    """Expects nothing. Guarantees: every op, parameter and cache contributes to an output. Step inputs stay."""

    name: ClassVar[str] = "drop_unused"

    def rules(self) -> tuple[Rule, ...]:
        return ()  # dead ops and parameters vanish whatever the rules

    def run(self, graph: Graph) -> Outcome:
        kept = super().run(graph).graph
        used = {value.name for op in kept.ops for value in op.inputs}
        kept = replace(kept, caches=tuple(cache for cache in kept.caches if cache.value.name in used))
        return Outcome(kept, _size(graph) - _size(kept))


def _size(graph: Graph) -> int:
    return len(graph.ops) + len(graph.params) + len(graph.caches)
