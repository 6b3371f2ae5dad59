"""The interpreter: packed sequences, caches, chunks and steps."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from toolkit.compiler.interpret import assemble, interpret
from toolkit.compiler.ir import Graph
from toolkit.compiler.op_spec import Array, CacheState, Packing
from toolkit.compiler.ops import GraphBuilder
from toolkit.compiler.shapes import Sym
from toolkit.compiler.weights import Piece, Recipe

T, R = Sym("T", 64), Sym("R", 8)
VOCAB, HIDDEN, HEADS, KV_HEADS, WIDTH = 50, 32, 4, 2, 8


def one_layer(window: int = 0, softcap: float = 0.0, cached: bool = False) -> Graph:
    """Embedding, one attention layer with residual, head."""
    build = GraphBuilder()
    tokens, positions = build.input("tokens", "int32", (T,)), build.input("positions", "int32", (T,))
    rows = build.input("rows", "int32", (R,))
    table = build.param("embed", (VOCAB, HIDDEN))
    x = build.op("embedding", table, tokens, name="x")
    tables = [build.constant(name, angles(name)) for name in ("cos", "sin")]
    cos, sin = (build.op("embedding", table, positions, name="angle") for table in tables)
    heads = []
    for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
        weight = build.param(f"{name}.weight", (count * WIDTH, HIDDEN))
        heads.append(build.op("reshape", build.op("linear", x, weight), shape=(-1, count, WIDTH)))
    q, k = (build.op("rope", head, cos, sin) for head in heads[:2])
    options = {"layer": 0, "scale": WIDTH**-0.5, "window": window, "softcap": softcap}
    if cached:
        cache = build.op("kv_write", k, heads[2], build.cache(0, KV_HEADS, WIDTH, WIDTH, window))
        out = build.op("paged_attention", q, cache, kv_heads=KV_HEADS, value_dim=WIDTH, **options)
    else:
        out = build.op("attention", q, k, heads[2], **options)
    flat = build.op("reshape", out, shape=(-1, HEADS * WIDTH))
    x = build.op("add", x, build.op("linear", flat, build.param("o.weight", (HIDDEN, HEADS * WIDTH))))
    return build.build(build.op("linear", build.op("take_rows", x, rows), table, name="logits"))


def angles(name: str) -> Array:
    freqs = np.arange(64)[:, None] * 100.0 ** -(np.arange(WIDTH // 2) / (WIDTH // 2))
    return (np.cos(freqs) if name == "cos" else np.sin(freqs)).astype(np.float32)


def weights(graph: Graph, seed: int = 0) -> dict[str, Array]:
    random = np.random.default_rng(seed)
    shapes = {p.value.name: [int(d) for d in p.value.type.shape if isinstance(d, int)] for p in graph.params}
    return {n: (random.standard_normal(s) / np.sqrt(s[-1])).astype(np.float32) for n, s in shapes.items()}


def step(*sequences: tuple[int, list[int]]) -> dict[str, Array]:
    """Inputs of a step over sequences given as (first position, tokens), all rows wanted."""
    tokens = [token for _, sequence in sequences for token in sequence]
    positions = [start + i for start, sequence in sequences for i in range(len(sequence))]
    columns = {"tokens": tokens, "positions": positions, "rows": list(range(len(tokens)))}
    return {name: np.array(column, np.int32) for name, column in columns.items()}


def test_packed_equals_alone_and_torch() -> None:
    graph = one_layer()
    params = weights(graph)
    a, b = [3, 14, 15, 9, 26], [5, 35, 8]
    packed = interpret(graph, step((0, a), (0, b)), params)["logits"]
    alone = [interpret(graph, step((0, sequence)), params)["logits"] for sequence in (a, b)]
    np.testing.assert_allclose(packed, np.concatenate(alone), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(alone[0], torch_layer(a, params), rtol=1e-4, atol=1e-4)


def torch_layer(tokens: list[int], params: dict[str, Array]) -> Array:
    w = {name: torch.from_numpy(array) for name, array in params.items()}
    x = w["embed"][tokens]
    q, k, v = (
        (x @ w[f"{name}.weight"].T).view(len(tokens), count, WIDTH).transpose(0, 1)
        for name, count in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS))
    )
    cos, sin = (torch.from_numpy(angles(name))[: len(tokens)].repeat(1, 2) for name in ("cos", "sin"))
    q, k = (h * cos + torch.cat([-h[..., WIDTH // 2 :], h[..., : WIDTH // 2]], -1) * sin for h in (q, k))
    out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    x = x + out.transpose(0, 1).reshape(len(tokens), -1) @ w["o.weight"].T
    result: Array = (x @ w["embed"].T).numpy()
    return result


@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (3, 0.0), (0, 2.0), (2, 5.0)])
def test_chunked_and_stepwise_equal_whole(window: int, softcap: float) -> None:
    whole, cached = one_layer(window, softcap), one_layer(window, softcap, cached=True)
    params = weights(whole)
    a, b = [3, 14, 15, 9, 26, 5], [35, 8, 9, 7, 9]
    expected = interpret(whole, step((0, a), (0, b)), params)["logits"]
    caches: dict[str, CacheState] = {}
    parts: dict[int, list[Array]] = {0: [], 1: []}
    for cut_a, cut_b in [((0, 4), (0, 1)), ((4, 5), (1, 4)), ((5, 6), (4, 5))]:
        chunk = step((cut_a[0], a[slice(*cut_a)]), (cut_b[0], b[slice(*cut_b)]))
        middle = cut_a[1] - cut_a[0]
        packing = Packing((0, middle, len(chunk["tokens"])), (cut_a[1], cut_b[1]), ids=(0, 1))
        logits = interpret(cached, chunk, params, caches, packing)["logits"]
        parts[0].append(logits[:middle])
        parts[1].append(logits[middle:])
    np.testing.assert_allclose(np.concatenate(parts[0] + parts[1]), expected, rtol=1e-5, atol=1e-5)


def test_a_rewound_sequence_forgets_what_followed() -> None:
    graph = one_layer(cached=True)
    params = weights(graph)
    caches: dict[str, CacheState] = {}
    interpret(graph, step((0, [1, 2, 3, 4])), params, caches)
    again = interpret(graph, step((2, [7])), params, caches)["logits"]
    expected = interpret(graph, step((0, [1, 2, 7])), params)["logits"][-1:]
    np.testing.assert_allclose(again, expected, rtol=1e-5, atol=1e-5)


def test_a_gap_in_the_cache_is_an_error() -> None:
    graph = one_layer(cached=True)
    with pytest.raises(ValueError, match="continues at position 3"):
        interpret(graph, step((3, [1])), weights(graph))


def test_packing_from_positions() -> None:
    packing = Packing.from_positions(np.array([0, 1, 2, 0, 1, 7, 8]))
    assert packing.seq_start == (0, 3, 5, 7)
    assert packing.context == (3, 2, 9)
    assert [(name, span.start, start) for name, span, start in packing.sequences()] == [(0, 0, 0), (1, 3, 0), (2, 5, 7)]


def test_assemble_joins_cuts_and_transposes() -> None:
    a, b = np.arange(6.0).reshape(2, 3), np.arange(10.0).reshape(5, 2)
    recipe = Recipe((Piece("a", transpose=True, start=1), Piece("b", stop=2)))
    np.testing.assert_array_equal(assemble(recipe, {"a": a, "b": b}.__getitem__), np.concatenate([a.T[1:], b[:2]]))
