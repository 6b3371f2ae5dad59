"""Is a captured graph what the configuration and the model say? Zero matches is never success."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping

from transformers import PreTrainedConfig

from ..compiler.ir import Graph, Op
from .hooks import Hooks

LISTED = 8
"""Most names in one sentence."""


def other_parts(config: PreTrainedConfig) -> list[str]:
    """A sentence if the configuration has parts for images or sound."""
    text = config.get_text_config()
    parts = [name for name in config.sub_configs if getattr(config, name, None) not in (None, text)]
    return [f"parts beside the language model are not supported: {', '.join(sorted(parts))}"] if parts else []


def find_missing(
    graph: Graph, config: PreTrainedConfig, hooks: Hooks, tensors: Mapping[str, str], has_weight: Callable[[str], bool]
) -> list[str]:
    """A sentence for each way in which the graph lacks something.

    `hooks` were in the exported model; `tensors` are the checkpoint tensors of the model's parameters by name.
    """
    text = config.get_text_config()
    count = getattr(text, "num_hidden_layers", 0)
    return [
        *_attention(graph, count),
        *_rotations(graph, text, hooks),
        *_norms(graph, hooks.norms),
        *_feed_forward(graph, text, [f"{hooks.layers.path}.{index}." for index in range(count)]),
        *_head(graph),
        *_weights(graph, set(tensors.values()), has_weight),
    ]


def _attention(graph: Graph, count: int) -> list[str]:
    """One attention op a layer."""
    found = Counter(int(str(op.attrs["layer"])) for op in graph.ops if op.kind == "attention")
    if found == Counter(range(count)):
        return []
    return [
        f"the configuration has {count} layers, but {found.total()} attention ops were found in {len(found)} layers"
    ]


def _rotations(graph: Graph, config: PreTrainedConfig, hooks: Hooks) -> list[str]:
    """Queries and keys are rotated in every layer, or in the layers that a list of the configuration tells apart.

    With ALiBi nothing rotates, although the model may have rotary tables.
    """
    attention = [op for op in graph.ops if op.kind == "attention"]
    if not hooks.rope.tables or all(op.attrs["has_slopes"] for op in attention):
        return []
    count = getattr(config, "num_hidden_layers", 0)
    found = Counter(_layer(op, hooks.layers.path) for op in graph.ops if op.kind == "rope")
    rotations = [found[layer] for layer in range(count)]
    wrong = [layer for layer, rotated in enumerate(rotations) if rotated not in (0, 2)]
    if wrong:
        return [f"{rotations[wrong[0]]} ops rotate in layer {wrong[0]}, expected a query and a key"]
    lists = [each for each in config.to_dict().values() if isinstance(each, list) and len(each) == count]
    kinds = [dict(zip(map(str, each), rotations, strict=True)) for each in lists]
    explained = any([kind[str(x)] for x in each] == rotations for kind, each in zip(kinds, lists, strict=True))
    if 2 not in rotations or (0 in rotations and not explained):
        return [f"{rotations.count(0)} of {count} layers rotate no query and key, and the configuration doesn't say so"]
    return []


def _layer(op: Op, layers: str) -> int | None:
    """The layer that an op belongs to, given the path of the list of layers."""
    inside = op.source.module.removeprefix(f"{layers}.").partition(".")[0]
    return int(inside) if layers and inside.isdecimal() else None


def _norms(graph: Graph, calls: Mapping[str, int]) -> list[str]:
    """Every norm of the model is computed, as often as it was called."""
    computed = Counter(op.source.module for op in graph.ops if op.kind == "norm")
    lost = sorted(path for path, count in calls.items() if computed[path] < max(1, count))
    return [f"{len(lost)} norms of {len(calls)} are computed by no op: {_some(lost)}"] if lost else []


def _feed_forward(graph: Graph, config: PreTrainedConfig, layers: list[str]) -> list[str]:
    """Every layer has a linear op that reads the width which the configuration gives the inside of an MLP."""
    names = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner", "dff")
    given = [getattr(config, name, None) for name in names]
    flat = [width for value in given for width in (value if isinstance(value, list) else [value])]
    widths = {width for width in flat if isinstance(width, int)} or {4 * getattr(config, "hidden_size", 0)}
    readers = [op.source.module for op in graph.ops if op.kind == "linear" and op.inputs[1].type.shape[1] in widths]
    lost = [layer.strip(".") for layer in layers if not any(module.startswith(layer) for module in readers)]
    if not lost:
        return []
    width = " or ".join(map(str, sorted(widths)))
    return [f"{len(lost)} of {len(layers)} layers have no linear op that reads {width} columns: {_some(lost)}"]


def _head(graph: Graph) -> list[str]:
    """The rows that need logits are taken once, and a linear op makes logits of them."""
    count = sum(op.kind == "take_rows" for op in graph.ops)
    if count != 1:
        return [f"the head reads its rows in {count} ops, expected 1"]
    shape = graph.outputs[0].type.shape
    heads = [op for op in graph.ops if op.kind == "linear" and op.output.type.shape == shape]
    return [] if heads else [f"no linear op gives {shape[-1]} logits"]


def _weights(graph: Graph, expected: set[str], has_weight: Callable[[str], bool]) -> list[str]:
    """Every parameter of the model is read, and is in the checkpoint."""
    used = {piece.tensor for param in graph.params for piece in param.recipe.pieces}
    unread, absent = sorted(expected - used), sorted(name for name in used if not has_weight(name))
    found = [f"{len(unread)} parameters are read by no op: {_some(unread)}"] if unread else []
    return found + ([f"the checkpoint lacks {len(absent)} of {len(used)} tensors: {_some(absent)}"] if absent else [])


def _some(names: list[str]) -> str:
    """The first names, and how many more there are."""
    more = f" and {len(names) - LISTED} more" if len(names) > LISTED else ""
    return ", ".join(names[:LISTED]) + more
