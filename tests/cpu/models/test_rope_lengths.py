"""RoPE whose frequencies depend on the length of each sequence, against Hugging Face step by step with its cache."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
from cpu.models import architectures
from cpu.models.architectures import (
    BOUNDS,
    cached_logits,
    reference_logits,
    sequences,
    tensors,
    tiny_config,
    tiny_model,
)
from torch import Tensor
from transformers.models.phi3 import modeling_phi3

from toolkit.compiler.check import find_difference
from toolkit.compiler.interpret import from_tensors, interpret
from toolkit.compiler.ir import Graph
from toolkit.compiler.onnx_io import to_onnx
from toolkit.compiler.op_spec import Array, CacheState, Packing
from toolkit.models.capture import capture
from toolkit.passes.fuse_pointwise import FusePointwise
from toolkit.passes.insert_caches import InsertCaches
from toolkit.runtime.errors import UserError

CASES = ("phi3 longrope", "llama dynamic rope")
SWITCH = {"phi3 longrope": 16, "llama dynamic rope": 12}
"""Lengths up to which a sequence has the frequencies of training."""
TOKENS = 24


@cache
def captured(case: str) -> Graph:
    return capture(tiny_config(case), dtype="float32", bounds=BOUNDS, has_weight=tensors(case).__contains__)


def step(parts: Sequence[tuple[int, Sequence[int], int]]) -> dict[str, Array]:
    """A step over parts of sequences: first position, tokens, and the length of the prompt."""
    tokens = [token for _, part, _ in parts for token in part]
    positions = [start + index for start, part, _ in parts for index in range(len(part))]
    prompts = [prompt for _, part, prompt in parts for _ in part]
    lengths = [max(prompt, position + 1) for prompt, position in zip(prompts, positions, strict=True)]
    columns = {"tokens": tokens, "positions": positions, "rows": range(len(tokens)), "lengths": lengths}
    return {name: np.array(column, np.int32) for name, column in columns.items()}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("chunk", [TOKENS, 5])
def test_prompts_in_chunks_then_decoding(case: str, chunk: int) -> None:
    """Together: a long prompt, one that decodes across the switch, and one that stays short."""
    graph = InsertCaches().run(captured(case)).graph
    prompts = (20, 9, 3)
    tokens = [sequences(case, [TOKENS], seed)[0] for seed in range(3)]
    ends = (TOKENS, TOKENS, 8)
    weights, caches = from_tensors(tensors(case)), dict[str, CacheState]()
    done = [0, 0, 0]
    found: list[list[Array]] = [[], [], []]
    while any(done[i] < ends[i] for i in range(3)):
        live = [i for i in range(3) if done[i] < ends[i]]
        counts = {i: min(chunk, prompts[i] - done[i]) if done[i] < prompts[i] else 1 for i in live}
        parts = [(done[i], tokens[i][done[i] : done[i] + counts[i]], prompts[i]) for i in live]
        inputs = step(parts)
        starts = np.cumsum([0, *counts.values()])
        context = tuple(done[i] + counts[i] for i in live)
        packing = Packing(tuple(starts.tolist()), context, tuple(live))
        logits = interpret(graph, inputs, weights, caches, packing)["logits"]
        for i, part in zip(live, np.split(logits, starts[1:-1]), strict=True):
            found[i].append(part)
            done[i] += counts[i]
    for i in range(3):
        expected = cached_logits(case, tokens[i][: ends[i]], prompts[i])
        np.testing.assert_allclose(np.concatenate(found[i]), expected, atol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_frequencies_by_length_are_few(case: str) -> None:
    graph = captured(case)
    tables = [op for op in graph.ops if op.kind == "rope_table"]
    assert [op.attrs["function"] for op in tables] == ["cos", "sin"]
    assert {op.attrs["first"] for op in tables} == {SWITCH[case]}
    rows = {op.inputs[2].type.shape for op in tables}
    assert rows == {(2, 8) if case == "phi3 longrope" else (BOUNDS.max_context - SWITCH[case] + 1, 8)}


@pytest.mark.parametrize("case", CASES)
def test_onnxruntime_agrees(case: str) -> None:
    graph = captured(case)
    onnxruntime = import_module("onnxruntime")  # it has no types
    written = to_onnx(graph, from_tensors(tensors(case))).SerializeToString()
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    inputs = step([(0, sequences(case, [20])[0], 20), (0, sequences(case, [9])[0], 9)])
    past = {x.name: np.zeros((0, *x.shape[1:]), np.float32) for x in session.get_inputs() if x.name[:5] == "past_"}
    (found,) = session.run(["logits"], inputs | past)
    np.testing.assert_allclose(found, interpret(graph, inputs, from_tensors(tensors(case)))["logits"], atol=1e-4)


def test_checks_between_passes_see_both_sets_of_frequencies() -> None:
    graph = captured("phi3 longrope")
    assert find_difference(graph, FusePointwise().run(graph).graph) == ""
    ops = [op for op in graph.ops if op.kind == "rope_table"]
    other = {op.output.name: {**op.attrs, "first": 1000} for op in ops}
    changed = tuple(replace(op, attrs=other.get(op.outputs[0].name, op.attrs)) for op in graph.ops)
    assert "changed by up to" in find_difference(graph, replace(graph, ops=changed))


def test_where_float32_is_coarser_than_the_bar_ours_is_no_coarser_than_hugging_faces(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Gemma's norms multiply by 1 + w, so random weights make steep softmaxes: float32 itself is 2e-4 off there."""
    factors = [[1 + i / 10 for i in range(17)], [2 + i / 2 for i in range(17)]]
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": factors[0], "long_factor": factors[1]}
    odd = {"head_dim": 34, "hidden_size": 130, "intermediate_size": 70, "original_max_position_embeddings": 16}
    case = "gemma longrope, odd sizes"
    monkeypatch.setitem(
        architectures.CASES, case, ("gemma", {**architectures.CASES["gemma"][1], **odd, "rope_parameters": rope})
    )
    (tokens,) = sequences(case, [37])
    theirs, ours = (
        reference_logits(case, tokens),
        interpret(captured(case), step([(0, tokens, len(tokens))]), from_tensors(tensors(case)))["logits"],
    )
    exact = exact_logits(case, tokens)
    assert np.abs(theirs - exact).max() > 1e-4
    assert np.abs(ours - exact).max() < 2 * np.abs(theirs - exact).max()


@torch.no_grad()
def exact_logits(case: str, tokens: list[int]) -> Array:
    """Logits[n, V] of the Hugging Face model in float64."""
    model: Any = copy.deepcopy(tiny_model(case)).double()
    logits: Array = model(torch.tensor([tokens]), use_cache=False).logits[0].numpy()
    return logits


def quadratic(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, x: Tensor, position_ids: Tensor) -> Any:
        cos, sin = original(self, x, position_ids)
        return (cos, sin) if int(position_ids.max()) < 40 else (cos * cos, sin)

    return forward


def doubled(original: Callable[..., Any]) -> Callable[..., Any]:
    def forward(self: Any, *args: Any, position_embeddings: tuple[Tensor, Tensor], **kwargs: Any) -> Any:
        cos, sin = position_embeddings
        return original(self, *args, position_embeddings=(cos * 2, sin), **kwargs)

    return forward


@pytest.mark.parametrize(
    ("case", "owner", "change", "reason"),
    [
        ("phi3", modeling_phi3.Phi3RotaryEmbedding, quadratic, "something else in sequences of more than 40 tokens"),
        ("phi3 longrope", modeling_phi3.Phi3DecoderLayer, doubled, "rotary tables that depend on the length"),
    ],
)
def test_other_dependence_on_the_length_is_refused(
    case: str, owner: Any, change: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(owner, "forward", change(owner.forward))
    with pytest.raises(UserError, match=reason):
        capture(tiny_config(case), dtype="float32", bounds=BOUNDS, has_weight=tensors(case).__contains__)
