"""Whether passes keep what a graph computes: its values are followed from pass to pass on random inputs and weights."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from ..runtime.encodings import EncodedArray, Encoding
from .interpret import evaluate_op, param_array
from .ir import Graph, Op, Param, Value
from .op_spec import Array, Packing, int_attr
from .quantize import encode
from .shapes import Shape, Sym
from .verify import describe
from .weights import Piece

Progress = Callable[[str, int, int], None]
"""Told what is at work, how much is done, and of how much."""

SEQUENCES = (7, 3)
"""Tokens of the packed sequences on which graphs are compared."""
ROWS = (9, 6, 2)
"""Tokens that need logits."""
TOLERANCE = 1e-4
"""Relative to the largest magnitude of a value."""
BLOCK = 1 << 22
"""Numbers of a random weight that are decoded at a time."""


class Check:
    """The values of a graph, with which those of the graphs that passes make of it are compared.

    A value that lives on keeps its name (see `rewrite.Replacement`), so a value of the same name must have the same
    numbers. An op that a pass changed is evaluated on the values from before that pass, and one that it kept is not
    evaluated again. So the first op that differs is the one that is wrong, errors do not add up over the layers, and
    following a graph through many passes costs little more than interpreting it twice.
    """

    def __init__(self, graph: Graph, progress: Progress | None = None) -> None:
        self._progress = progress
        self._inputs = random_inputs(graph)
        self._graph = graph
        self._values: dict[str, Any] = {}
        """Arrays, or contents of caches, by name."""
        self._outputs: list[Array] = []
        self._rebase(graph)

    def follow(self, graph: Graph, *, encodings_change: bool = False) -> str:
        """What differs in a graph that a pass made of the one before, and at which op; "" if both compute the same.

        A weight is rounded as its recipe says. If a pass is there to change that (`encodings_change`), the graphs are
        compared without encodings, and later ones with this one as it is encoded.
        """
        try:
            if encodings_change:
                self._graph = _without_encodings(self._graph)
                self._advance(_without_encodings(graph))
                self._rebase(graph)
            else:
                self._advance(graph)
        except _DifferenceError as difference:
            return str(difference)
        return ""

    def _rebase(self, graph: Graph) -> None:
        """Take a graph as right, whatever was before it."""
        self._graph = Graph(graph.inputs, (), (), graph.outputs)
        self._values, self._outputs = {}, []
        self._advance(graph)

    def _advance(self, graph: Graph) -> None:
        """Evaluate what is new in a graph. Raises _DifferenceError at the first op that changes a value."""
        kept = _kept(self._graph, graph)
        params = {param.value.name: param for param in graph.params}
        values: dict[str, Any] = {cache.value.name: {} for cache in graph.caches} | self._inputs

        def array(value: Value) -> Any:
            return param_array(params[value.name], random_weight) if value.name in params else values[value.name]

        for number, op in enumerate(graph.ops):
            if op.outputs[0].name in kept:
                values |= {value.name: self._values[value.name] for value in op.outputs}
                continue
            if self._progress is not None:
                self._progress(describe(op), number, len(graph.ops))
            results = _evaluated(op, [array(value) for value in op.inputs])
            for value, result in zip(op.outputs, results, strict=True):
                values[value.name] = self._values.get(value.name, result)
                if difference := _difference(values[value.name], result):
                    raise _DifferenceError(f"{describe(op)}: %{value.name} {difference}")
        outputs = [array(value) for value in graph.outputs]
        for value, before, after in zip(graph.outputs, self._outputs, outputs, strict=False):
            if difference := _difference(before, after):
                raise _DifferenceError(f"output %{value.name} {difference}")
        if self._outputs and len(outputs) != len(self._outputs):
            raise _DifferenceError(f"there are {len(outputs)} outputs, expected {len(self._outputs)}")
        self._graph, self._values, self._outputs = graph, values, outputs


def find_difference(before: Graph, after: Graph) -> str:
    """How two graphs differ on random inputs, and at which op of the second; "" if they agree within rounding."""
    return Check(before).follow(after)


class _DifferenceError(Exception):
    """What differs in a graph."""


def _kept(before: Graph, after: Graph) -> set[str]:
    """First results of the ops that are as they were, weights included."""
    ops = {op.outputs[0].name: op for op in before.ops}
    recipes = {param.value.name: param.recipe for param in before.params}
    same = {param.value.name for param in after.params if recipes.get(param.value.name) == param.recipe}
    new = {param.value.name for param in after.params} - same
    return {
        name
        for op in after.ops
        if ops.get(name := op.outputs[0].name) == op and not any(value.name in new for value in op.inputs)
    }


def _without_encodings(graph: Graph) -> Graph:
    params = (replace(param, recipe=replace(param.recipe, encoding=None)) for param in graph.params)
    return replace(graph, params=tuple(params))


def _evaluated(op: Op, operands: list[Any]) -> tuple[Any, ...]:
    try:
        return evaluate_op(op, operands, Packing.from_positions(_positions()))
    except ValueError as error:
        raise _DifferenceError(str(error)) from error


def _difference(expected: Any, found: Any) -> str:
    """How a value differs, or ""."""
    if isinstance(expected, dict):  # a cache: keys and values by sequence
        pairs = [(old, new) for name, both in expected.items() for old, new in zip(both, found[name], strict=True)]
        return next(filter(None, (_difference(*pair) for pair in pairs)), "")
    if found.shape != expected.shape:
        return f"has shape {found.shape}, expected {expected.shape}"
    if found is expected or not found.size:
        return ""
    error = float(np.abs(found.astype(np.float64) - expected).max())
    largest = float(np.abs(expected).max())
    return "" if error <= TOLERANCE * max(1.0, largest) else f"changed by up to {error:.3g}, of {largest:.3g}"


# --- random inputs and weights ----------------------------------------------------------------------------------------


def _positions() -> Array:
    return np.concatenate([np.arange(length) for length in SEQUENCES])


def random_inputs(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Step inputs for `SEQUENCES`: positions from 0, `ROWS`, lengths around those at which RoPE frequencies change, ids
    below the smallest table they index; else floats.
    """
    random = np.random.default_rng(seed)
    inputs: dict[str, Array] = {}
    for value in graph.inputs:
        shape = _sizes(value.type.shape)
        if value.name == "positions":
            inputs[value.name] = _positions().astype(np.int32)
        elif value.name == "rows":
            inputs[value.name] = np.array(ROWS, np.int32)
        elif value.name == "lengths":
            firsts = [int_attr(op.attrs, "first") for op in graph.ops if op.kind == "rope_table"]
            inputs[value.name] = (min(firsts, default=0) + random.integers(-2, 3, shape)).astype(np.int32)
        elif value.type.dtype.startswith("int"):
            inputs[value.name] = random.integers(0, _limit(graph, value.name), shape).astype(np.int32)
        else:
            inputs[value.name] = random.standard_normal(shape, np.float32)
    return inputs


def _sizes(shape: Shape) -> tuple[int, ...]:
    counts = {"T": sum(SEQUENCES), "S": len(SEQUENCES), "R": len(ROWS)}
    return tuple(counts[dim.name] * dim.factor if isinstance(dim, Sym) else dim for dim in shape)


def _limit(graph: Graph, name: str) -> int:
    tables = (op.inputs[0].type.shape[0] for op in graph.ops if op.kind == "embedding" and op.inputs[1].name == name)
    return min((rows for rows in tables if isinstance(rows, int)), default=2)


def random_weight(param: Param) -> Array:
    """A parameter that depends on its recipe alone, piece by piece: a merged one equals its parts joined.

    Encoded pieces are random numbers of that encoding, so that one in another encoding differs.
    """
    rows, *width = _sizes(param.value.type.shape)
    pieces, encoding = param.recipe.pieces, param.recipe.encoding
    stops = [piece.stop if piece.stop is not None else piece.start + rows for piece in pieces]
    parts = [_random_rows(piece, stop, tuple(width), encoding) for piece, stop in zip(pieces, stops, strict=True)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _random_rows(piece: Piece, stop: int, width: tuple[int, ...], encoding: Encoding | None) -> Array:
    """The piece's rows of an endless random matrix that belongs to its tensor, its direction and its codes."""
    codes = encoding.name if encoding is not None and encoding.kind == "affine" else ""
    key = hashlib.sha256(f"{piece.tensor} {piece.transpose} {codes}".encode()).digest()
    streams = [np.random.default_rng([*key, number]) for number in range(3)]
    unit = 1.7 / np.sqrt(width[-1]) if width else 1.7
    result = np.empty((stop, *width), np.float32)
    step = max(1, BLOCK // int(np.prod(width)))
    for start in range(0, stop, step):
        block = result[start : start + step]
        if encoding is not None and encoding.kind == "affine":
            block[...] = _random_codes(streams, block.shape, encoding, unit).decode()
            continue
        streams[0].random(out=block, dtype=np.float32)
        block -= np.float32(0.5)
        block *= np.float32(2 * unit)
        if encoding is not None:
            block[...] = encode(block, encoding).decode()
    return result[piece.start :]


def _random_codes(
    streams: Sequence[np.random.Generator], shape: tuple[int, ...], encoding: Encoding, unit: float
) -> EncodedArray:
    """Codes, scales and minima, each from a stream of its own, of values around `unit`."""
    levels = 1 << encoding.bits
    codes = streams[0].integers(0, levels, shape, np.uint8)
    groups = (*shape[:-1], shape[-1] // encoding.group)
    scale = (streams[1].uniform(0.5, 1.5, groups) * 2 * unit / levels).astype(encoding.scale)
    minimum = (streams[2].uniform(-1.5, -0.5, groups) * unit).astype(encoding.scale) if encoding.has_minimum else None
    return EncodedArray(encoding, codes.view(np.int8) if encoding.bits == 8 else codes, scale, minimum)
