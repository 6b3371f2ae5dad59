"""Compute at compile time what depends on constants alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..compiler.ir import Graph, Op, Param, Value
from ..compiler.op_spec import Packing
from ..compiler.ops import OPS
from ..compiler.pass_ import Outcome, Pass
from ..compiler.rewrite import ANY, Replacement, Workspace, rewrite
from ..compiler.shapes import CACHE, Sym, product
from ..compiler.weights import Constant, Recipe


@dataclass(frozen=True)
class FoldConstants(Pass):
    """Expects nothing. Guarantees: no op of constants alone whose results have at most `max_elements` elements."""

    name: ClassVar[str] = "fold_constants"
    max_elements: int = 1 << 22
    """Larger results stay computed, to keep the plan small."""

    def run(self, graph: Graph) -> Outcome:
        return rewrite(graph, {ANY: self._fold})

    def _fold(self, op: Op, work: Workspace) -> Replacement | None:
        params = [work.param(value) for value in op.inputs]
        arrays = [param.recipe.constant.array for param in params if param is not None and param.recipe.constant]
        if not op.inputs or len(arrays) != len(op.inputs) or not self._small(op.outputs):
            return None
        results = OPS[op.kind].evaluate(arrays, op.attrs, Packing((0,), (), ()))
        made = [
            Param(Value(work.fresh(f"{value.name}.folded"), value.type), Recipe(constant=Constant(np.asarray(result))))
            for value, result in zip(op.outputs, results, strict=True)
        ]
        forward = {value.name: param.value for value, param in zip(op.outputs, made, strict=True)}
        return Replacement(forward=forward, params=tuple(made))

    def _small(self, values: Sequence[Value]) -> bool:
        sizes = [product(value.type.shape) for value in values if value.type != CACHE]
        return len(sizes) == len(values) and all(not isinstance(s, Sym) and s <= self.max_elements for s in sizes)
