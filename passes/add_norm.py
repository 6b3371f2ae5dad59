"""A residual addition and the norm behind it become one op."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Graph, Op
from ..compiler.ops import make_op
from ..compiler.pass_ import Outcome, Pass
from ..compiler.rewrite import Replacement, Workspace, rewrite


@dataclass(frozen=True)
class FuseAddNorm(Pass):
    """Expects nothing. Guarantees: no norm over rows reads an addition of two values of its own shape."""

    name: ClassVar[str] = "add_norm"

    def run(self, graph: Graph) -> Outcome:
        return rewrite(graph, {"norm": _fuse})


def _fuse(op: Op, work: Workspace) -> Replacement | None:
    x, *weights = op.inputs
    add = work.producer(x, "add")
    if add is None or len(x.type.shape) != 2 or [value.type for value in add.inputs] != [x.type] * 2:
        return None
    names = [x.name, op.output.name]
    return Replacement((make_op("add_norm", (*add.inputs, *weights), names, op.attrs, op.source),))
