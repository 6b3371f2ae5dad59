"""Queries, keys and values that one linear layer makes, head by head, become linear layers over rows of its weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import prod
from typing import ClassVar

import numpy as np

from ..compiler.ir import Op, Param, Value
from ..compiler.lowering import static
from ..compiler.op_spec import bool_attr, int_attr
from ..compiler.ops import make_op
from ..compiler.rewrite import Match, Mismatch, Replacement, Rewriting, Rule, Workspace
from ..compiler.shapes import Shape, Sym
from ..compiler.weights import Piece


@dataclass(frozen=True)
class SplitLinear(Rewriting):
    """Expects: `paged_attention` over `kv_write`; weights not merged yet. Guarantees: queries, keys and values that are
    slices of the reshaped result of one linear layer, interleaved by head perhaps, come from linear layers of their own
    over those rows of its weight, if that is one checkpoint tensor.
    """

    name: ClassVar[str] = "split_linear"

    def rules(self) -> tuple[Rule, ...]:
        pattern = "paged_attention(q, kv_write(k, v, _), *_)"
        failure = "queries, keys and values are not taken apart"
        return (Rule(pattern, "the same of three linear layers, if q, k and v are slices of one", _split, failure),)


def _split(match: Match) -> Replacement | None:
    cuts = [cut for name in ("q", "k", "v") if (cut := _slice_behind(match[name], match.work)) is not None]
    heads = match.work.producer(cuts[0].inputs[0], "reshape") if len(cuts) == 3 else None
    linear = match.work.producer(heads.inputs[0], "linear") if heads is not None else None
    if heads is None or linear is None:
        return None
    names = {cut.output.name for cut in match.work.users(heads.output)}
    if len(names) != 3 or names != {cut.output.name for cut in cuts}:
        return None
    if match.work.only_user(linear.output) is None or match.work.is_output(heads.output) or linear.attrs["epilogue"]:
        raise Mismatch("the linear layer before them is read elsewhere, or has an epilogue")
    rows = [_rows(cut, heads.output.type.shape, static(linear.output.type.shape[-1])) for cut in cuts]
    if len({row for taken in rows for row in taken}) < sum(map(len, rows)):
        raise Mismatch("they overlap")
    ops, params = list[Op](), list[Param]()
    for cut, taken in zip(cuts, rows, strict=True):
        count = 1 + bool_attr(linear.attrs, "has_bias")
        weights = [_take(match.work, weight, taken) for weight in linear.inputs[1 : 1 + count]]
        inputs = (linear.inputs[0], *(param.value for param in weights))
        part = make_op("linear", inputs, [match.work.fresh(f"{cut.output.name}.rows")], linear.attrs, linear.source)
        shape = tuple(-1 if isinstance(size, Sym) else size for size in cut.output.type.shape)
        ops += [part, make_op("reshape", [part.output], [cut.output.name], {"shape": shape}, cut.source)]
        params += weights
    return Replacement(tuple(ops), params=tuple(params))


def _slice_behind(value: Value, work: Workspace) -> Op | None:
    """The slice that a value comes from, through what works on each head alone."""
    while (op := work.producer(value)) is not None and op.kind in ("reshape", "rope", "norm"):
        value = op.inputs[0]
    return op if op is not None and op.kind == "slice" else None


def _rows(cut: Op, shape: Shape, width: int) -> list[int]:
    """Which of a linear layer's `width` columns a slice of them in a shape takes."""
    axis, start, stop = (int_attr(cut.attrs, name) for name in ("axis", "start", "stop"))
    tokens = next((index for index, size in enumerate(shape) if isinstance(size, Sym)), len(shape))
    sizes = [size for size in shape[tokens + 1 :] if isinstance(size, int)]
    if axis <= tokens or any(size != 1 for size in shape[:tokens]) or prod(sizes) != width:
        raise Mismatch("tokens are among what is sliced")
    columns = np.arange(prod(sizes)).reshape(sizes)
    taken: list[int] = columns.take(range(start, stop), axis - tokens - 1).ravel().tolist()
    return taken


def _take(work: Workspace, weight: Value, rows: Sequence[int]) -> Param:
    """A parameter of some rows of another."""
    param = work.param(weight)
    if param is None or len(param.recipe.pieces) != 1:
        raise Mismatch("the weight is computed or made of several tensors")
    (piece,) = param.recipe.pieces
    breaks = [0, *(at for at, (row, after) in enumerate(pairwise(rows), 1) if after != row + 1), len(rows)]
    pieces = [_cut(piece, rows[first], rows[last - 1] + 1) for first, last in pairwise(breaks)]
    type_ = replace(weight.type, shape=(len(rows), *weight.type.shape[1:]))
    return Param(Value(work.fresh(f"{weight.name}.rows"), type_), replace(param.recipe, pieces=tuple(pieces)))


def _cut(piece: Piece, start: int, stop: int) -> Piece:
    return replace(piece, start=piece.start + start, stop=piece.start + stop)
