"""Captured architectures: every pass is exact, idempotent and printable on all of them."""

from __future__ import annotations

from collections import Counter
from functools import cached_property
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from toolkit.compiler.interpret import from_tensors, interpret
from toolkit.compiler.ir import Graph
from toolkit.compiler.lower import lower
from toolkit.compiler.op_spec import Array, CacheState, Packing
from toolkit.compiler.pass_ import run_passes
from toolkit.compiler.shapes import Bounds
from toolkit.compiler.targets import CPU
from toolkit.compiler.text import constants, parse_graph, print_graph
from toolkit.models.capture import capture
from toolkit.passes.pipelines import pipeline
from toolkit.passes.quantization import Quantization
from toolkit.runtime.encodings import FLOAT32
from toolkit.runtime.plan import PassReport

VOCAB = 97
SIZES: dict[str, object] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2: dict[str, object] = {
    "vocab_size": VOCAB, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip
LAYERS: dict[str, object] = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
ARCHITECTURES: dict[str, dict[str, object]] = {
    "llama": SIZES | {"num_key_value_heads": 2, "attention_bias": True},
    "mistral": SIZES | {"num_key_value_heads": 2, "sliding_window": 4},
    "qwen2": SIZES | {"num_key_value_heads": 2},
    "qwen3": SIZES | {"num_key_value_heads": 2, "head_dim": 32},
    "gemma3_text": SIZES | {"num_key_value_heads": 1, "head_dim": 32} | LAYERS,
    "phi3": SIZES | {"num_key_value_heads": 2, "partial_rotary_factor": 0.5},
    "gpt2": GPT2,
    "olmo2": SIZES | {"num_key_value_heads": 2},
}
UNFUSED = {"olmo2"}
"""Their queries and keys are normalized over all heads at once."""
SEQUENCES = ([3, 14, 15, 92, 65, 35, 8], [9, 79, 32])
TOLERANCE = 1e-4


class Captured:
    """An architecture with random weights: its graph, its tensors and its Hugging Face model."""

    def __init__(self, kind: str) -> None:
        config = AutoConfig.for_model(kind, **ARCHITECTURES[kind])
        config._attn_implementation = "eager"
        torch.manual_seed(0)
        make: Any = AutoModelForCausalLM.from_config
        self.model = make(config, dtype=torch.float32).eval()
        for parameter in self.model.parameters():
            torch.nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 1.0)
        self.tensors = {name: parameter.detach().numpy() for name, parameter in self.model.named_parameters()}
        self.bounds = Bounds(max_tokens=64, max_sequences=4, max_rows=16, max_context=64)
        self.graph = capture(config, dtype="float32", bounds=self.bounds, has_weight=self.tensors.__contains__)

    @cached_property
    def fused(self) -> Graph:
        return self._fused[0]

    @cached_property
    def notes(self) -> list[str]:
        return [note for report in self._fused[1] for note in report.notes]

    @cached_property
    def _fused(self) -> tuple[Graph, tuple[PassReport, ...]]:
        passes = pipeline(CPU, quant=Quantization.parse("keep"), encoding_of=lambda name: FLOAT32)
        return run_passes(self.graph, passes, check=True)

    @cached_property
    def expected(self) -> Array:
        """Logits of every token, each sequence run alone by Hugging Face."""
        with torch.no_grad():
            return np.concatenate([self.model(torch.tensor([tokens])).logits[0].numpy() for tokens in SEQUENCES])


@pytest.fixture(scope="module", params=ARCHITECTURES)
def captured(request: pytest.FixtureRequest) -> Captured:
    return Captured(request.param)


def step(*parts: tuple[int, list[int]]) -> dict[str, Array]:
    """A step over parts of sequences given as (first position, tokens)."""
    tokens = [token for _, part in parts for token in part]
    positions = [start + index for start, part in parts for index in range(len(part))]
    columns = {"tokens": tokens, "positions": positions, "rows": list(range(len(tokens)))}
    return {name: np.array(column, np.int32) for name, column in columns.items()}


def test_the_fused_graph_equals_hugging_face_in_chunks(captured: Captured) -> None:
    (a, b), caches, parts = SEQUENCES, dict[str, CacheState](), dict[int, list[Array]]({0: [], 1: []})
    for (a0, a1), (b0, b1) in [((0, 4), (0, 1)), ((4, 5), (1, 2)), ((5, 7), (2, 3))]:
        packing = Packing((0, a1 - a0, a1 - a0 + b1 - b0), (a1, b1), (0, 1))
        inputs = step((a0, a[a0:a1]), (b0, b[b0:b1]))
        (logits,) = interpret(captured.fused, inputs, from_tensors(captured.tensors), caches, packing).values()
        parts[0].append(logits[: a1 - a0])
        parts[1].append(logits[a1 - a0 :])
    np.testing.assert_allclose(np.concatenate(parts[0] + parts[1]), captured.expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_attention_is_fused_or_reported(captured: Captured) -> None:
    kinds = Counter(op.kind for op in captured.fused.ops)
    unfused = 2 if captured.model.config.model_type in UNFUSED else 0
    assert (kinds["rope_kv_write"], kinds["kv_write"], len(captured.notes)) == (2 - unfused, unfused, unfused)
    assert kinds["paged_attention"] == 2
    assert kinds["activation"] == kinds["mul"] == kinds["attention"] == 0
    assert kinds["linear"] == 9


def test_every_pass_is_idempotent_and_printable(captured: Captured) -> None:
    graph = captured.graph
    for each in pipeline(CPU, quant=Quantization.parse("int4"), encoding_of=lambda name: FLOAT32):
        graph = each(graph)
        assert each(graph) == graph, each.name
        text = print_graph(graph)
        again = parse_graph(text, constants(graph))
        assert again == graph, each.name
        assert print_graph(again) == text


def test_every_level_can_be_lowered_and_fusion_saves_launches(captured: Captured) -> None:
    launches = []
    for level in (0, 1, 2):
        quant = Quantization.parse("none", "float32")
        passes = pipeline(CPU, quant=quant, encoding_of=lambda name: FLOAT32, level=level)
        fused, _ = run_passes(captured.graph, passes)
        (lowered,) = lower(fused, CPU, captured.bounds, "float32")
        launches.append(len(lowered.forward))
    assert launches[0] >= launches[1] > launches[2]
