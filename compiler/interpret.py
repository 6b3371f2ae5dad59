"""Slow reference execution of a graph in numpy: the meaning against which passes and architectures are checked."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any

import numpy as np

from .ir import Graph, Op, Param
from .op_spec import Array, CacheState, Packing
from .ops import OPS
from .shapes import CACHE
from .verify import describe
from .weights import Piece, Recipe, TensorSource

Params = Callable[[Param], Array] | Mapping[str, Array]
"""Arrays of a graph's parameters, by function or by value name. Constants need no entry."""


def interpret(
    graph: Graph,
    inputs: Mapping[str, Array],
    params: Params,
    caches: MutableMapping[str, CacheState] | None = None,
    packing: Packing | None = None,
) -> dict[str, Array]:
    """Run one step; the graph's outputs by name.

    Without a `packing`, sequences begin wherever `inputs["positions"]` does not count on; without `inputs["lengths"]`,
    they are as long as they are after the step. To run step after step, pass the same `caches`: it holds each cache's
    content by the name of its initial value, and is brought up to date.
    """
    packing = packing or Packing.from_positions(inputs["positions"])
    inputs = {"lengths": packing.lengths(), **inputs}
    values: dict[str, Any] = {value.name: inputs[value.name] for value in graph.inputs}
    values |= {param.value.name: param_array(param, params) for param in graph.params}
    caches = {} if caches is None else caches
    origin = {cache.value.name: cache.value.name for cache in graph.caches}
    values |= {name: caches.get(name, {}) for name in origin}
    last_use = {value.name: number for number, op in enumerate(graph.ops) for value in op.inputs}
    kept = {value.name for value in graph.outputs}
    for number, op in enumerate(graph.ops):
        results = evaluate_op(op, [values[value.name] for value in op.inputs], packing)
        for value, result in zip(op.outputs, results, strict=True):
            values[value.name] = result
            if value.type == CACHE:
                before = next(source.name for source in op.inputs if source.type == CACHE)
                origin[value.name] = origin[before]
                caches[origin[value.name]] = result
        for value in op.inputs:
            if last_use[value.name] == number and value.name not in kept:
                values.pop(value.name, None)
    return {value.name: values[value.name] for value in graph.outputs}


def evaluate_op(op: Op, operands: Sequence[Any], packing: Packing) -> tuple[Any, ...]:
    """An op's results. Raises ValueError, naming the op, where it has none."""
    try:
        return OPS[op.kind].evaluate(operands, op.attrs, packing)
    except (ValueError, KeyError, IndexError) as error:
        raise ValueError(f"{describe(op)} can't be evaluated: {error}") from error


def param_array(param: Param, params: Params) -> Array:
    """A parameter's array: its constant, or what `params` gives."""
    if param.recipe.constant is not None:
        return param.recipe.constant.array
    return params(param) if callable(params) else params[param.value.name]


def assemble(recipe: Recipe, tensor: Callable[[str], Array]) -> Array:
    """A recipe's pieces cut from float tensors and joined; encodings play no part."""
    return np.concatenate([_cut(piece, tensor(piece.tensor)) for piece in recipe.pieces])


def _cut(piece: Piece, array: Array) -> Array:
    return (array.T if piece.transpose else array)[piece.start : piece.stop]


def from_source(source: TensorSource) -> Callable[[Param], Array]:
    """Parameters read from a checkpoint, decoded to float32."""
    return lambda param: assemble(param.recipe, lambda name: source[name].read().decode())


def from_tensors(tensors: Mapping[str, Array]) -> Callable[[Param], Array]:
    """Parameters made from float tensors by checkpoint name."""
    return lambda param: assemble(param.recipe, tensors.__getitem__)
