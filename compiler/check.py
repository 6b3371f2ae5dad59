"""Whether two graphs compute the same: both are interpreted on random inputs and weights."""

from __future__ import annotations

import hashlib

import numpy as np

from .interpret import interpret
from .ir import Graph, Param
from .op_spec import Array
from .shapes import Sym

SEQUENCES = (7, 3)
"""Tokens of the packed sequences on which graphs are compared."""
TOLERANCE = 1e-4
"""Relative to the largest magnitude of an output."""


def find_difference(before: Graph, after: Graph) -> str:
    """How the outputs of two graphs differ on random inputs, or "" if they agree within rounding."""
    inputs = random_inputs(before)
    old, new = (interpret(graph, inputs, random_weights) for graph in (before, after))
    if list(old) != list(new):
        return f"the outputs are {', '.join(new)}, expected {', '.join(old)}"
    for name, expected in old.items():
        found = new[name]
        if found.shape != expected.shape:
            return f"output %{name} has shape {found.shape}, expected {expected.shape}"
        error = float(np.abs(found - expected).max())
        if not error <= TOLERANCE * max(1.0, float(np.abs(expected).max())):
            return f"output %{name} changed by up to {error:.3g}"
    return ""


def random_inputs(graph: Graph, seed: int = 0) -> dict[str, Array]:
    """Step inputs for `SEQUENCES`: positions from 0, every token's row, ids below the smallest table they index."""
    random = np.random.default_rng(seed)
    count = sum(SEQUENCES)
    inputs: dict[str, Array] = {}
    for value in graph.inputs:
        if value.name == "positions":
            array = np.concatenate([np.arange(length) for length in SEQUENCES])
        elif value.name == "rows":
            array = np.arange(count)
        else:
            array = random.integers(0, _limit(graph, value.name), count)
        inputs[value.name] = array.astype(np.int32)
    return inputs


def _limit(graph: Graph, name: str) -> int:
    tables = (op.inputs[0].type.shape[0] for op in graph.ops if op.kind == "embedding" and op.inputs[1].name == name)
    return min((rows for rows in tables if isinstance(rows, int)), default=2)


def random_weights(param: Param) -> Array:
    """A parameter that depends only on the checkpoint tensors in its recipe: a merged one equals its parts joined."""
    width = tuple(dim for dim in param.value.type.shape[1:] if not isinstance(dim, Sym))
    parts = []
    for piece in param.recipe.pieces:
        stop = piece.stop if piece.stop is not None else piece.start + _rows(param)
        parts.append(random_tensor(piece.tensor, stop, width)[piece.start :])
    return np.concatenate(parts)


def _rows(param: Param) -> int:
    rows = param.value.type.shape[0]
    assert isinstance(rows, int)
    return rows


def random_tensor(name: str, rows: int, width: tuple[int, ...]) -> Array:
    """The first rows of an endless random tensor that belongs to the name."""
    seed = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "little")
    random = np.random.default_rng(seed)
    scale = 1.0 / np.sqrt(width[-1]) if width else 1.0
    return (random.uniform(-1.7, 1.7, (rows, *width)) * scale).astype(np.float32)
