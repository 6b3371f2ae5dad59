"""Gated activations: act(gate) * up over the two halves of one value becomes one op."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from typing import ClassVar

from ..compiler.ir import Graph, Op
from ..compiler.ops import make_op
from ..compiler.pass_ import Outcome, Pass
from ..compiler.rewrite import Replacement, Workspace, rewrite


@dataclass(frozen=True)
class FuseActMul(Pass):
    """Expects: gate and up merged. Guarantees: act(x[.., :F]) * x[.., F:] is `act_mul` for activations in `kinds`."""

    kinds: Set[str]
    name: ClassVar[str] = "act_mul"

    def run(self, graph: Graph) -> Outcome:
        return rewrite(graph, {"mul": self._fuse})

    def _fuse(self, op: Op, work: Workspace) -> Replacement | None:
        for gate, up in (op.inputs, op.inputs[::-1]) if len(op.inputs) == 2 else ():
            activation = work.producer(gate, "activation")
            if activation is None or activation.attrs["kind"] not in self.kinds or work.only_user(gate) is not op:
                continue
            halves = [work.producer(value, "slice") for value in (activation.inputs[0], up)]
            if halves[0] is None or halves[1] is None or not _are_halves(halves[0], halves[1]):
                continue
            attrs = {"kind": activation.attrs["kind"]}
            return Replacement((make_op("act_mul", halves[0].inputs, [op.output.name], attrs, op.source),))
        return None


def _are_halves(first: Op, second: Op) -> bool:
    """Whether two slices are the first and the second half of the last axis of one value."""
    shape = first.inputs[0].type.shape
    width = shape[-1]
    if first.inputs != second.inputs or not isinstance(width, int) or width % 2:
        return False
    bounds = [(op.attrs["axis"], op.attrs["start"], op.attrs["stop"]) for op in (first, second)]
    return bounds == [(len(shape) - 1, 0, width // 2), (len(shape) - 1, width // 2, width)]
