"""What a captured model has beyond the plain decoder, read from its graph."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from toolkit.compiler.ir import Graph, Op, Value
from toolkit.compiler.op_spec import divide


def rope_kinds(graph: Graph, config: PretrainedConfig) -> list[str]:
    """How frequencies are chosen, by the names of transformers; none without rotations."""
    if not any(op.kind == "rope" for op in graph.ops):
        return []
    parameters = getattr(config, "rope_parameters", None) or {}
    by_layer_type = [each for each in parameters.values() if isinstance(each, dict) and "rope_type" in each]
    return sorted({each.get("rope_type", "default") for each in by_layer_type or [parameters]})


def features(graph: Graph) -> list[str]:
    """Names of features, in order of the way through the model."""
    return [name for reader in (_embeddings, _attention, _layers, _head) for name in reader(graph)]


def _embeddings(graph: Graph) -> Iterator[str]:
    lookups = [op for op in graph.ops if op.kind == "embedding"]
    tokens = next(op for op in lookups if op.inputs[1].name == "tokens")
    users = graph.uses()[tokens.output.name]
    if tokens.attrs["scale"] != 1.0 or any(op.kind == "mul" and len(op.inputs) == 1 for op in users):
        yield "scaled embeddings"
    constants = {param.value for param in graph.params if param.recipe.constant is not None}
    if any(op.inputs[1].name == "positions" and op.inputs[0] not in constants for op in lookups):
        yield "learned positions"


def _attention(graph: Graph) -> Iterator[str]:
    found = [op for op in graph.ops if op.kind == "attention"]
    queries = [list(_back_to_projection(graph, op.inputs[0])) for op in found]
    (_, heads, width), (_, kv_heads, _) = (value.type.shape for value in found[0].inputs[:2])
    if kv_heads != heads:
        yield "MQA" if kv_heads == 1 else "GQA"
    if any(op.kind == "norm" for path in queries for op in path):
        yield "QK norm"
    rotated = [[op for op in path if op.kind == "rope"] for path in queries]
    if any(rotated) and not all(rotated):
        yield "layers without RoPE"
    if any(divide(width, 2) != op.inputs[1].type.shape[1] for path in rotated for op in path):
        yield "partial RoPE"
    if any(op.attrs["style"] == "pair" for path in rotated for op in path):
        yield "pairwise RoPE"
    windows = [op.attrs["window"] != 0 for op in found]
    if any(windows):
        yield "windows" if all(windows) else "windows in some layers"
    if any(op.attrs["has_slopes"] for op in found):
        yield "ALiBi"
    if any(op.attrs["softcap"] for op in found):
        yield "attention softcap"


def _back_to_projection(graph: Graph, value: Value) -> Iterator[Op]:
    """Ops between a value and the linear layers that it is made of."""
    producers = {output: op for op in graph.ops for output in op.outputs}
    waiting = [value]
    while waiting:
        op = producers.get(waiting.pop())
        if op is not None and op.kind != "linear":
            yield op
            waiting += op.inputs


def _layers(graph: Graph) -> Iterator[str]:
    behind: dict[Value, set[int]] = {}
    for index, op in enumerate(graph.ops):
        before = set[int]().union(*(behind.get(value, set()) for value in op.inputs))
        behind |= {output: before | {index} for output in op.outputs}
    first = next(index for index, op in enumerate(graph.ops) if op.kind == "attention")
    beside = set(range(len(graph.ops))) - behind[graph.ops[first].output]
    linear = [index for index, op in enumerate(graph.ops) if op.kind == "linear"]
    if any(index in beside and first not in behind[graph.ops[index].output] for index in linear):
        yield "parallel residual"
    if any(op.kind == "norm" and op.attrs["kind"] == "layer" for op in graph.ops):
        yield "layer norms"
    if any(graph.ops[index].attrs["has_bias"] for index in linear):
        yield "biases"


def _head(graph: Graph) -> Iterator[str]:
    head = max(index for index, op in enumerate(graph.ops) if op.kind == "linear")
    tables = [op.inputs[0] for op in graph.ops if op.kind == "embedding"]
    if graph.ops[head].inputs[1] in tables:
        yield "tied head"
    after = {op.kind for op in graph.ops[head + 1 :]}
    if "activation" in after or "tanh" in after:
        yield "logit softcap"
    elif after & {"mul", "div"}:
        yield "logit scale"
