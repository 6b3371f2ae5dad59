"""Merge linear layers of one input: queries, keys and values into one, gate and up into one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from ..compiler.ir import Attr, Op, Param, Value
from ..compiler.op_spec import bool_attr
from ..compiler.ops import make_op
from ..compiler.rewrite import Mismatch, Replacement, Rewriting, Rule, Workspace
from ..compiler.shapes import TensorType
from ..compiler.weights import Piece, Recipe
from ..runtime.encodings import Encoding


@dataclass(frozen=True)
class MergeLinear(Rewriting):
    """Expects: `paged_attention` over `kv_write`; weight encodings chosen. Guarantees: where q, k and v (or the
    activated and the plain factor of a product) come from linear layers of one value whose weights are stored alike,
    they are slices of one linear layer, in that order.

    `encoding_of` says how the checkpoint stores a tensor. Weights stored in different encodings are not merged, which
    is reported.
    """

    encoding_of: Callable[[str], Encoding]
    name: ClassVar[str] = "merge_linear"

    def rules(self) -> tuple[Rule, ...]:
        return (
            Rule(
                "paged_attention(q, kv_write(k, v, _), *_)",
                "the same of slices of one linear layer, if q, k and v come from several",
                lambda match: self._merge([match["q"], match["k"], match["v"]], "qkv", match.work),
                "queries, keys and values are not merged",
            ),
            Rule(
                "mul(activation(gate), up:linear(*_))",
                "the same of slices of one linear layer, if gate comes from another",
                lambda match: self._merge([match["gate"], match.labeled("up").output], "gate_up", match.work),
                "gate and up are not merged",
            ),
        )

    def _merge(self, values: Sequence[Value], name: str, work: Workspace) -> Replacement | None:
        """One linear layer and its slices in the place of several distinct ones behind the values."""
        linears = [op for value in values if (op := _linear_behind(value, work)) is not None]
        if len({op.output for op in linears}) < len(values):
            return None
        self._check(linears, work)
        return _merged(linears, name, work)

    def _check(self, linears: Sequence[Op], work: Workspace) -> None:
        """Raise Mismatch unless linear layers can be merged."""
        if len({op.inputs[0] for op in linears}) > 1:
            raise Mismatch("they read different values")
        if any(op.attrs["epilogue"] for op in linears) or len({op.attrs["has_bias"] for op in linears}) > 1:
            raise Mismatch("only some have a bias or an epilogue")
        params = [work.param(op.inputs[1]) for op in linears]
        if any(param is None or len(work.users(param.value)) > 1 for param in params):
            raise Mismatch("a weight is computed or shared")
        encodings = {self._encoding(param) for param in params if param is not None}
        if len(encodings) > 1:
            names = ", ".join(sorted(encoding.name for encoding in encodings))
            raise Mismatch(f"their weights are stored as {names}")

    def _encoding(self, param: Param) -> Encoding:
        return param.recipe.encoding or self.encoding_of(param.recipe.pieces[0].tensor)


def _linear_behind(value: Value, work: Workspace) -> Op | None:
    """The linear layer that a value comes from, through whatever keeps heads apart."""
    while (op := work.producer(value)) is not None and op.kind != "linear":
        if op.kind not in ("reshape", "rope", "norm"):
            return None
        value = op.inputs[0]
    return op


def _merged(linears: Sequence[Op], name: str, work: Workspace) -> Replacement:
    first = linears[0]
    has_bias = bool_attr(first.attrs, "has_bias")
    params = [_join([op.inputs[index] for op in linears], work, name) for index in range(1, 2 + has_bias)]
    inputs = (first.inputs[0], *(param.value for param in params))
    merged = make_op("linear", inputs, [work.fresh(f"{first.output.name}.{name}")], first.attrs, first.source)
    slices, start = [], 0
    for op in linears:
        stop = start + _rows(op.inputs[1].type)
        attrs: dict[str, Attr] = {"axis": len(op.output.type.shape) - 1, "start": start, "stop": stop}
        slices.append(make_op("slice", [merged.output], [op.output.name], attrs, op.source))
        start = stop
    return Replacement((merged, *slices), params=tuple(params))


def _join(values: Sequence[Value], work: Workspace, name: str) -> Param:
    """One parameter made of several, whose pieces say their rows so that the recipe stands alone."""
    pieces: list[Piece] = []
    params = [param for value in values if (param := work.param(value)) is not None]
    for param in params:
        for piece in param.recipe.pieces:
            whole = len(param.recipe.pieces) == 1 and piece.stop is None
            _append(pieces, replace(piece, stop=piece.start + _rows(param.value.type)) if whole else piece)
    shape = (sum(_rows(value.type) for value in values), *values[0].type.shape[1:])
    value = Value(work.fresh(f"{values[0].name}.{name}"), replace(values[0].type, shape=shape))
    return Param(value, Recipe(tuple(pieces), params[0].recipe.encoding))


def _append(pieces: list[Piece], piece: Piece) -> None:
    """Add a piece, as part of the last one if it goes on with that one's rows."""
    if pieces and replace(pieces[-1], start=piece.start, stop=piece.stop) == piece and pieces[-1].stop == piece.start:
        piece = replace(piece, start=pieces.pop().start)
    pieces.append(piece)


def _rows(type_: TensorType) -> int:
    rows = type_.shape[0]
    assert isinstance(rows, int)
    return rows
