"""Choose how each weight is stored."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import msgspec

from ..compiler.ir import Graph, Op, Param
from ..compiler.ops import OPS
from ..compiler.pass_ import Outcome, Pass
from ..runtime.encodings import FLOAT32, Encoding
from .quantization import FLOATS, GROUPS, KEEP, NONE, Quantization, Role, Rule, parse_encoding


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """Expects: weights not merged yet. Guarantees: every weight that only linear layers and embeddings read has the
    encoding that the rules choose (None: as the checkpoint has it); all else (norms, biases, tables) is float32.

    A weight whose rows are no multiple of the encoding's group gets a smaller group, or stays at the float dtype. That
    is reported, and so is a recipe's rule that no weight is left for.
    """

    quantization: Quantization
    name: ClassVar[str] = "quantize_weights"
    encodes: ClassVar[bool] = True

    def run(self, graph: Graph) -> Outcome:
        return _Choices(self.quantization, graph).outcome()


class _Choices:
    """The choices for one graph, and what there is to say about them."""

    def __init__(self, quantization: Quantization, graph: Graph) -> None:
        self._quantization = quantization
        self._graph = graph
        self._users = graph.uses()
        self._heads = _heads(graph)
        self._used: set[Rule] = set()
        self._misfits: dict[str, list[str]] = defaultdict(list)

    def outcome(self) -> Outcome:
        params = [replace(old, recipe=replace(old.recipe, encoding=self._encoding(old))) for old in self._graph.params]
        matches = sum(old.recipe != new.recipe for old, new in zip(self._graph.params, params, strict=True))
        idle = [rule for rule in self._quantization.rules if rule.where and rule not in self._used]
        notes = (
            *(f"{rule.where} decides about no weight" for rule in idle),
            *(f"{_listed(names)}: {reason}" for reason, names in self._misfits.items()),
        )
        return Outcome(replace(self._graph, params=tuple(params)), matches, notes)

    def _encoding(self, param: Param) -> Encoding | None:
        users = self._users.get(param.value.name, [])
        if param.recipe.constant is not None or not users or not all(_reads_weight(op, param) for op in users):
            return FLOAT32
        tensor = param.recipe.pieces[0].tensor
        rule = self._quantization.rule(tensor, {self._role(op) for op in users})
        if rule is None:
            return None
        self._used.add(rule)
        return self._chosen(rule.encoding, tensor, param)

    def _role(self, op: Op) -> Role:
        if op.kind == "embedding":
            return "embedding"
        return "head" if op.output.name in self._heads else "linear"

    def _chosen(self, name: str, tensor: str, param: Param) -> Encoding | None:
        plain = FLOATS[self._quantization.dtype]
        if name in (KEEP, NONE):
            return None if name == KEEP else plain
        encoding, columns = parse_encoding(name), param.value.type.shape[1]
        assert isinstance(columns, int)
        if encoding.kind != "affine" or columns % encoding.group == 0:
            return encoding
        fitting = [group for group in GROUPS if group < encoding.group and columns % group == 0]
        instead = f"groups of {fitting[-1]}" if fitting else self._quantization.dtype
        reason = f"{instead} instead of {name}, since {columns} columns are no multiple of {encoding.group}"
        self._misfits[reason].append(tensor)
        return msgspec.structs.replace(encoding, group=fitting[-1]) if fitting else plain


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _heads(graph: Graph) -> set[str]:
    """Results of linear layers that reach an output through pointwise ops alone."""
    producers = graph.producers()
    heads, pending = set(), [value.name for value in graph.outputs]
    while pending:
        op = producers.get(pending.pop())
        if op is not None and op.kind == "linear":
            heads.add(op.output.name)
        elif op is not None and OPS[op.kind].expression(op.attrs, len(op.inputs)) is not None:
            pending += [value.name for value in op.inputs]
    return heads


def _reads_weight(op: Op, param: Param) -> bool:
    """Whether an op reads a parameter as the weight of a linear layer or the table of an embedding, and only so."""
    place = {"linear": 1, "embedding": 0}.get(op.kind)
    return place is not None and [value == param.value for value in op.inputs].index(True) == place
