"""Compute at compile time what depends on constants alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from ..compiler.interpret import evaluate_op
from ..compiler.ir import Param, Value
from ..compiler.op_spec import Packing, to_numpy
from ..compiler.rewrite import Match, Mismatch, Replacement, Rewriting, Rule
from ..compiler.shapes import Sym, product
from ..compiler.weights import Constant, Recipe


@dataclass(frozen=True)
class FoldConstants(Rewriting):
    """Expects nothing. Guarantees: no op of constants alone whose results have at most `max_elements` elements."""

    name: ClassVar[str] = "fold_constants"
    max_elements: int = 1 << 22
    """Larger results stay computed, to keep the plan small."""

    def rules(self) -> tuple[Rule, ...]:
        return (Rule("any(first, *rest)", "its results, if all inputs are constants", self._fold, "it is not folded"),)

    def _fold(self, match: Match) -> Replacement | None:
        op = match.op
        recipes = [param.recipe if (param := match.work.param(value)) else Recipe() for value in op.inputs]
        arrays = [recipe.constant.array for recipe in recipes if recipe.constant is not None]
        sizes = [product(value.type.shape) for value in op.outputs]
        if len(arrays) < len(op.inputs) or any(isinstance(size, Sym) for size in sizes):
            return None
        if any(isinstance(size, int) and size > self.max_elements for size in sizes):
            raise Mismatch(f"a result has more than {self.max_elements} numbers")
        results = evaluate_op(op, arrays, Packing((0,), (), ()))
        made = [_constant(match, value, np.asarray(result)) for value, result in zip(op.outputs, results, strict=True)]
        forward = {value.name: param.value for value, param in zip(op.outputs, made, strict=True)}
        return Replacement(forward=forward, params=tuple(made))


def _constant(match: Match, value: Value, array: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> Param:
    name = match.work.fresh(f"{value.name}.folded")
    return Param(Value(name, value.type), Recipe(constant=Constant(array.astype(to_numpy(value.type.dtype)))))
