"""Legality of a graph: what every pass may rely on and must keep."""

from __future__ import annotations

from ..runtime.errors import InternalError
from .ir import Graph, Op, Param
from .op_spec import to_numpy
from .ops import complete, infer
from .shapes import CACHE, Sym


def verify(graph: Graph) -> None:
    """Raise InternalError, listing every problem, unless the graph is legal.

    Legal: names are unique; values are defined before use, with one type; every op is a row of the op table with all
    its attributes, legal inputs and the outputs that its shape rule gives; a cache version is written to at most once,
    and what an op says of its cache is so; a symbol has one bound; constants have the type of their value.
    """
    if problems := find_problems(graph):
        raise InternalError("the graph is illegal:\n  " + "\n  ".join(problems))


def find_problems(graph: Graph) -> list[str]:
    """Every way in which the graph is illegal, one sentence each."""
    return [
        *_names(graph),
        *_symbols(graph),
        *(problem for param in graph.params for problem in _param(param)),
        *(
            f"cache %{cache.value.name} has type {cache.value.type}"
            for cache in graph.caches
            if cache.value.type != CACHE
        ),
        *_definitions(graph),
        *(problem for op in graph.ops for problem in _op(op)),
        *_cache_versions(graph),
        *_cache_attributes(graph),
    ]


def describe(op: Op) -> str:
    """An op in messages: its kind, first result and source."""
    place = " ".join(filter(None, (op.source.module, op.source.line)))
    return f"{op.kind} %{op.outputs[0].name if op.outputs else '?'}" + (f" ({place})" if place else "")


def _names(graph: Graph) -> list[str]:
    seen: set[str] = set()
    problems = []
    for value in graph.values():
        if value.name in seen:
            problems.append(f"%{value.name} is defined twice")
        seen.add(value.name)
    return problems


def _symbols(graph: Graph) -> list[str]:
    bounds: dict[str, set[int]] = {}
    for value in graph.values():
        for dim in value.type.shape:
            if isinstance(dim, Sym):
                bounds.setdefault(dim.name, set()).add(dim.bound)
    return [f"symbol {name} has bounds {sorted(found)}" for name, found in bounds.items() if len(found) > 1]


def _param(param: Param) -> list[str]:
    recipe, name = param.recipe, param.value.name
    if (recipe.constant is None) == (not recipe.pieces):
        return [f"parameter %{name} needs either pieces or a constant"]
    if recipe.constant is None:
        return []
    array = recipe.constant.array
    if array.shape != param.value.type.shape or array.dtype != to_numpy(param.value.type.dtype):
        return [f"constant %{name} is {array.dtype}{list(array.shape)}, expected {param.value.type}"]
    return []


def _definitions(graph: Graph) -> list[str]:
    known = {value.name: value for value in graph.inputs}
    known |= {param.value.name: param.value for param in graph.params}
    known |= {cache.value.name: cache.value for cache in graph.caches}
    problems = []
    for op in graph.ops:
        for value in op.inputs:
            if known.get(value.name) != value:
                found = known.get(value.name, "nothing of that name")
                problems.append(f"{describe(op)} reads {value}, but before it there is {found}")
        known |= {value.name: value for value in op.outputs}
    problems += [f"output {value} is not defined" for value in graph.outputs if known.get(value.name) != value]
    return problems


def _op(op: Op) -> list[str]:
    types = [value.type for value in op.inputs]
    try:
        if complete(op.kind, types, op.attrs) != dict(op.attrs):
            raise ValueError(f"expected attributes {complete(op.kind, types, op.attrs)}, found {dict(op.attrs)}")
        expected = infer(op.kind, types, op.attrs)
    except ValueError as error:
        return [f"{describe(op)}: {error}"]
    found = tuple(value.type for value in op.outputs)
    if found != expected:
        return [f"{describe(op)} has results {', '.join(map(str, found))}, expected {', '.join(map(str, expected))}"]
    return []


def _cache_versions(graph: Graph) -> list[str]:
    writers: dict[str, int] = {}
    for op in graph.ops:
        if any(value.type == CACHE for value in op.outputs):
            for value in op.inputs:
                if value.type == CACHE:
                    writers[value.name] = writers.get(value.name, 0) + 1
    return [f"cache version %{name} is written to {count} times" for name, count in writers.items() if count > 1]


def _cache_attributes(graph: Graph) -> list[str]:
    """Where an op names the layer, heads, width or window of its cache otherwise than the cache does."""
    caches, problems = {cache.value.name: cache for cache in graph.caches}, []
    for op in graph.ops:
        cache = next((caches[value.name] for value in op.inputs if value.name in caches), None)
        if cache is None:
            continue
        caches |= {value.name: cache for value in op.outputs if value.type == CACHE}
        said = {"layer": cache.layer, "kv_heads": cache.heads, "value_dim": cache.value_dim, "window": cache.window}
        for name, value in said.items():
            if op.attrs.get(name, value) != value:
                problems.append(f"{describe(op)} has {name} {op.attrs[name]}, but its cache {value}")
    return problems
